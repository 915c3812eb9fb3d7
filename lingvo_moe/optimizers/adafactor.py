"""Adafactor (Shazeer and Stern 2018) as in GShard appendix A.2: factored second moments, by default no momentum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lingvo_moe import ranges, tree
from lingvo_moe.layers.base import Context, Weight
from lingvo_moe.lazy import tf
from lingvo_moe.ops import fusion
from lingvo_moe.ops.factored_moments import mean_by_rows, prefers_mean_by_rows
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.ranges import ABOVE_0, SHARE_BELOW_1, Range

_LEAST_NORMAL = 2.0**-126  # of float32; programs may replace smaller numbers by 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
    """Stores one row and one column of second moments for each matrix, instead of a second moment for each element.

    `Weight.rows` and `Weight.columns` declare which dimensions of a weight form its matrices. Every expert and every
    stacked layer is a matrix of its own, with its own factors, clipping and scale.

    Attributes:
      learning_rate: a function of the step.
      beta1: the decay of the first moment, an average of updates that is as large as the weights; 0 for none, as in the
        papers. Small batches are noisy and gain from it. The learning rate multiplies the average, where Mesh
        TensorFlow's Adafactor averages products with the rate.
      beta2_cap, beta2_exponent: the decay of the second moments at step t (from 1) is min(cap, 1 - t^-exponent).
      clipping_threshold: the largest root mean square of an update, per matrix; there is no gradient clipping.
      multiply_by_parameter_scale: whether updates are relative to the root mean square of the matrix
        (section 8).
      minimum_scale: the least such root mean square.
      epsilon: added to squared gradients; with the share of it that a step adds, (1 - beta2_cap) * epsilon, no second
        moment is 0.

    Raises:
      UserError: a number is out of range.
    """

    learning_rate: InverseSquareRoot = InverseSquareRoot()
    beta1: float = 0.0
    beta2_cap: float = 0.99
    beta2_exponent: float = 0.8
    clipping_threshold: float = 1.0
    multiply_by_parameter_scale: bool = True
    minimum_scale: float = 1e-3
    epsilon: float = 1e-30

    def __post_init__(self):
        above = ("beta2_exponent", "clipping_threshold", "minimum_scale")
        decays = dict.fromkeys(("beta1", "beta2_cap"), SHARE_BELOW_1)
        ranges.check("optimizer.", self, {**decays, **dict.fromkeys(above, ABOVE_0)})
        ranges.check("optimizer.", self, {"epsilon": Range(_LEAST_NORMAL / (1.0 - self.beta2_cap))})

    def state(self, weights: dict) -> dict:
        """Declares the optimizer state: `row` and `column` for each matrix, `moment` for each vector, initially zero.

        With `beta1` each weight also has a `momentum` of its own shape.

        The optimizer state has the logical axes of its weight, so the layout shards it like the weight.

        Args:
          weights: the tree of a model's `Weight`s.

        Returns:
          A tree of `Weight`s, with a node for each of the model's.
        """
        return {
            name: self._state_of(node) if isinstance(node, Weight) else self.state(node)
            for name, node in weights.items()
        }

    def _state_of(self, weight: Weight) -> dict:
        return _factors(weight) | ({"momentum": weight.zeros()} if self.beta1 else {})

    def update(
        self,
        weights: dict,
        theta: dict,
        gradients: dict,
        optimizer_state: dict,
        step: tf.Tensor,
        is_finite: tf.Tensor,
        context: Context,
    ) -> tuple[dict, dict]:
        """Applies the gradients of one step.

        Args:
          weights: the tree of `Weight`s that declares theta.
          theta: float32 tensors for `weights`.
          gradients: likewise.
          optimizer_state: float32 tensors for `self.state(weights)`.
          step: scalar int32, the number of steps before this one.
          is_finite: scalar bool; if false, theta and optimizer state stay as they are.
          context: the layout and platform of the step.

        Returns:
          (theta, optimizer_state) after the step.
        """
        count = tf.cast(step, tf.float32) + 1.0
        beta2 = tf.minimum(self.beta2_cap, 1.0 - tf.pow(count, -self.beta2_exponent))
        scalars = beta2, self.learning_rate(step), is_finite
        declared, values, flat_gradients = (tree.flatten(t) for t in (weights, theta, gradients))
        flat_state, functions = tree.flatten(optimizer_state), {}
        new_theta, new_state = {}, {}
        for path, weight in declared.items():
            key = weight.shape, weight.logical_axes, weight.fan_in  # all that the update reads of a declaration
            if key not in functions:
                functions[key] = self._update_of(weight, context)
            state = {name: flat_state[f"{path}/{name}"] for name in self._state_of(weight)}
            with tf.name_scope(path.replace("/", "_")):
                new_theta[path], updated = functions[key](values[path], flat_gradients[path], state, *scalars)
            new_state |= {f"{path}/{name}": new for name, new in updated.items()}
        return tree.unflatten(new_theta), tree.unflatten(new_state)

    def _update_of(self, weight: Weight, context: Context) -> Callable:
        """Returns the function from a weight's value, gradient and optimizer state to its new value and state.

        In a graph, weights with equal declarations share one graph function: with operators for each weight, the update
        was almost half of a step's graph.
        """

        def apply(
            value: tf.Tensor,
            gradient: tf.Tensor,
            state: dict[str, tf.Tensor],
            beta2: tf.Tensor,
            rate: tf.Tensor,
            is_finite: tf.Tensor,
        ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            gradient = context.annotate(gradient, weight.logical_axes)
            update, moments = self._scaled(weight, gradient, state, beta2, context)
            if self.multiply_by_parameter_scale:
                update *= tf.maximum(self.minimum_scale, tf.sqrt(_mean_square(weight, value)))
            new_state = {name: tf.where(is_finite, moment, state[name]) for name, moment in moments.items()}
            if self.beta1:
                update = self.beta1 * state["momentum"] + (1.0 - self.beta1) * update
                # So the new weights are computed from the stored momentum, not from all that it is computed from.
                update = fusion.optimization_barrier(tf.where(is_finite, update, state["momentum"]), context)
                new_state["momentum"] = update
            return tf.where(is_finite, value - rate * update, value), new_state

        return apply if tf.executing_eagerly() else tf.function(apply, autograph=False)

    def _scaled(
        self, weight: Weight, gradient: tf.Tensor, state: dict, beta2: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, dict]:
        """Returns the clipped update, before its scale and the learning rate, and the new second moments."""

        def decayed(name: str, mean: tf.Tensor) -> tf.Tensor:
            # Algorithm 4 adds epsilon to each square; added to their mean, it has the same effect and costs less.
            return beta2 * state[name] + (1.0 - beta2) * (mean + self.epsilon)

        if not weight.rows:
            moment = decayed("moment", tf.square(gradient))
            update = gradient * tf.math.rsqrt(moment)
            return self._clipped(update, _mean_square(weight, update)), {"moment": moment}
        # What feeds a sum alone is fused into it; what feeds several operations is written to memory.
        for_columns, for_update = (fusion.optimization_barrier(gradient, context) for _ in range(2))
        row = decayed("row", tf.reduce_mean(tf.square(gradient), axis=weight.columns))
        column = decayed("column", tf.reduce_mean(tf.square(for_columns), axis=weight.rows))
        wide_row = _expand(row, weight.columns)
        # The quotient wide_row / total may underflow in float32; each of the two does not.
        total = tf.reduce_mean(wide_row, axis=weight.rows, keepdims=True)
        by_row = tf.math.rsqrt(wide_row) * tf.sqrt(total)
        by_column = tf.math.rsqrt(_expand(column, weight.rows))
        column_apart = fusion.optimization_barrier(by_column, context)
        if prefers_mean_by_rows(weight.logical_axes, weight.rows, weight.columns, context):
            mean_square = mean_by_rows(for_update, wide_row, column_apart, weight.rows, weight.columns) * total
        else:
            row_apart = fusion.optimization_barrier(by_row, context)
            mean_square = _mean_square(weight, for_update * row_apart * column_apart)
        return self._clipped(gradient * by_row * by_column, mean_square), {"row": row, "column": column}

    def _clipped(self, update: tf.Tensor, mean_square: tf.Tensor) -> tf.Tensor:
        return update / tf.maximum(1.0, tf.sqrt(mean_square) / self.clipping_threshold)


def _factors(weight: Weight) -> dict:
    """Declares the second moments of one weight."""
    if not weight.rows:
        return {"moment": weight.zeros()}
    return {"row": weight.zeros(weight.columns), "column": weight.zeros(weight.rows)}


def _expand(factor: tf.Tensor, dimensions: tuple[int, ...]) -> tf.Tensor:
    for dimension in sorted(dimensions):
        factor = tf.expand_dims(factor, dimension)
    return factor


def _mean_square(weight: Weight, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the mean square of each matrix or vector of a tensor of the weight's shape, with dimensions kept as 1."""
    return tf.reduce_mean(tf.square(tensor), axis=weight.rows + weight.columns, keepdims=True)
