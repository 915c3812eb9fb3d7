"""Adafactor (Shazeer and Stern 2018) as GShard appendix A.2 uses it: no momentum, factored second moments."""

from __future__ import annotations

import dataclasses

from lingvo_moe import tree
from lingvo_moe.layers.base import Context, Weight
from lingvo_moe.lazy import tf
from lingvo_moe.ops.factored_moments import mean_of_quotients, prefers_mean_of_quotients
from lingvo_moe.optimizers.schedules import InverseSquareRoot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
    """One row and one column of second moments per matrix instead of a full one.

    A weight says which of its dimensions are rows and columns (`Weight.rows`, `Weight.columns`); every expert and every
    stacked layer is a matrix of its own, with its own factors, its own clipping and its own scale.

    Attributes:
      learning_rate: by step.
      beta2_cap, beta2_exponent: the second moment's decay at step t (from 1) is min(cap, 1 - t^-exponent).
      clipping_threshold: an update's root mean square, per matrix, is at most this.
      multiply_by_parameter_scale: steps are relative to the matrix's root mean square (Adafactor section 8).
      minimum_scale: a matrix counts as at least this large.
      epsilon: added to squared gradients.
    """

    learning_rate: InverseSquareRoot = InverseSquareRoot()
    beta2_cap: float = 0.99
    beta2_exponent: float = 0.8
    clipping_threshold: float = 1.0
    multiply_by_parameter_scale: bool = True
    minimum_scale: float = 1e-3
    epsilon: float = 1e-30

    def state(self, weights: dict) -> dict:
        """The optimizer's own weights: for each weight a node of zeros, `row` and `column`, or `moment` for vectors."""
        return {
            name: self._state_of(node) if isinstance(node, Weight) else self.state(node)
            for name, node in weights.items()
        }

    def update(
        self, weights: dict, theta: dict, gradients: dict, optimizer_state: dict, step: tf.Tensor, context: Context
    ) -> tuple[dict, dict]:
        """One step for all weights.

        Args:
          weights: declarations; the other trees hold tensors for them (`optimizer_state`: for `self.state(weights)`).
          theta, gradients, optimizer_state: float32.
          step: scalar int32, how many steps were made before.
          context: of the step: where weights live, and what to be fast on.

        Returns:
          (theta, optimizer_state) after the step.
        """
        count = tf.cast(step, tf.float32) + 1.0
        beta2 = tf.minimum(self.beta2_cap, 1.0 - tf.pow(count, -self.beta2_exponent))
        rate = self.learning_rate(step)
        declared, values, flat_gradients = (tree.flatten(t) for t in (weights, theta, gradients))
        flat_state = tree.flatten(optimizer_state)
        new_theta, new_state = {}, {}
        for path, weight in declared.items():
            own = {name: flat_state[f"{path}/{name}"] for name in self._state_of(weight)}
            with tf.name_scope(path.replace("/", "_")):
                new_theta[path], updated = self._update_one(
                    weight, values[path], flat_gradients[path], own, beta2, rate, context
                )
            new_state.update({f"{path}/{name}": value for name, value in updated.items()})
        return tree.unflatten(new_theta), tree.unflatten(new_state)

    def _state_of(self, weight: Weight) -> dict:
        if not weight.rows:
            return {"moment": _zeros(weight, ())}
        return {"row": _zeros(weight, weight.columns), "column": _zeros(weight, weight.rows)}

    def _update_one(
        self,
        weight: Weight,
        value: tf.Tensor,
        gradient: tf.Tensor,
        optimizer_state: dict,
        beta2: tf.Tensor,
        rate: tf.Tensor,
        context: Context,
    ) -> tuple[tf.Tensor, dict]:
        gradient = context.annotate(gradient, weight.logical_axes)
        squared = tf.square(gradient)
        declared = self._state_of(weight)

        def decayed(name: str, mean: tf.Tensor) -> tf.Tensor:
            # Epsilon is in each square (Adafactor's algorithm 4), and so in their mean, where adding it costs nothing.
            return context.annotate(
                beta2 * optimizer_state[name] + (1.0 - beta2) * (mean + self.epsilon), declared[name].logical_axes
            )

        if weight.rows:
            row = decayed("row", tf.reduce_mean(squared, axis=weight.columns))
            column = decayed("column", tf.reduce_mean(squared, axis=weight.rows))
            new_state = {"row": row, "column": column}
            wide_row = _expand(row, weight.columns)
            total = tf.reduce_mean(wide_row, axis=weight.rows, keepdims=True)
            # A row's share of the total may be too small for a float32; the two by themselves are not.
            update = gradient * (tf.math.rsqrt(wide_row) * tf.sqrt(total)) * tf.math.rsqrt(_expand(column, weight.rows))
            matrices = (weight.logical_axes, weight.rows, weight.columns)
            if prefers_mean_of_quotients(*matrices, context):
                mean_square = mean_of_quotients(squared, wide_row, column, *matrices) * total
            else:
                mean_square = _mean_square(weight, update)
        else:
            new_state = {"moment": decayed("moment", squared)}
            update = gradient * tf.math.rsqrt(new_state["moment"])
            mean_square = _mean_square(weight, update)
        update /= tf.maximum(1.0, tf.sqrt(mean_square) / self.clipping_threshold)
        if self.multiply_by_parameter_scale:
            update *= tf.maximum(self.minimum_scale, tf.sqrt(_mean_square(weight, value)))
        return context.annotate(value - rate * update, weight.logical_axes), new_state


def _zeros(weight: Weight, without: tuple[int, ...]) -> Weight:
    """The declaration of a entry: the weight's, without some dimensions, starting from zero."""
    kept = [d for d in range(len(weight.shape)) if d not in without]
    return Weight(tuple(weight.shape[d] for d in kept), "".join(weight.logical_axes[d] for d in kept))


def _expand(factor: tf.Tensor, dimensions: tuple[int, ...]) -> tf.Tensor:
    for dimension in sorted(dimensions):
        factor = tf.expand_dims(factor, dimension)
    return factor


def _mean_square(weight: Weight, tensor: tf.Tensor) -> tf.Tensor:
    """The mean square of each matrix or vector of a tensor in the weight's place; its dimensions are kept, as 1."""
    return tf.reduce_mean(tf.square(tensor), axis=weight.rows + weight.columns, keepdims=True)
