"""The pure step functions: a model and an optimizer become the programs init, train, evaluate, diagnose and decode.

A model is known by its interface alone, `Model`. The training state is a tree:

  step              scalar int32, steps made
  seed              [2] int32, the key of all random numbers: those of step t are a function of (seed, t, layer)
  skipped           scalar int32, the steps that changed no weight, their loss or a gradient not being finite
  skipped_in_a_row  scalar int32, how many of these were the last ones
  theta             the weights
  optimizer_state             the optimizer's

so a state says all that the next step needs, and a step can be replayed bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

from lingvo_moe import program_cache, tree
from lingvo_moe.decoding.flat_beam_search import BeamSearch, flat_beam_search
from lingvo_moe.layers.base import Context, Weight, initial_value
from lingvo_moe.ops.random_numbers import fold_seed
from lingvo_moe.layers.summaries import SummaryCollector, norm, root_mean_square
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program, lower
from lingvo_moe.sharding.layout import Layout, Spec

# What `diagnose` reads of a training state.
DIAGNOSED = ("step", "seed", "theta")


class Model(Protocol):
    """What a step needs of a model."""

    def weights(self) -> dict:
        """The tree of `Weight`s."""

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """(loss to minimise, scalar metrics; among them `cross_entropy` and `tokens`)."""

    def decoding_theta(self, theta: dict, context: Context) -> dict:
        """The weights as the next two take them."""

    def start_decoding(self, theta: dict, source: dict, cache_length: int, context: Context) -> dict:
        """The state before the first target token."""

    def decode_step(
        self,
        theta: dict,
        state: dict,
        ids: tf.Tensor,
        position: tf.Tensor,
        start: tf.Tensor,
        mask: tf.Tensor,
        context: Context,
    ) -> tuple[tf.Tensor, dict]:
        """(logits `[B, K, V]`, state) after one token for each of K hypotheses."""


class Optimizer(Protocol):
    """What a step needs of an optimizer; see `optimizers.adafactor`."""

    def state(self, weights: dict) -> dict:
        """The tree of its own `Weight`s."""

    def update(
        self, weights: dict, theta: dict, gradients: dict, optimizer_state: dict, step: tf.Tensor, context: Context
    ) -> tuple[dict, dict]:
        """(theta, optimizer_state) after one step."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """A model, an optimizer and a layout, as programs, which may be made for a platform, see `Context`, and run on all."""

    model: Model
    optimizer: Optimizer
    layout: Layout
    platform: str = ""

    def state_specs(self) -> dict:
        """The tree of `Spec`s of the training state."""
        weights = self.model.weights()
        counts = {name: Spec((), "int32", "") for name in ("step", "skipped", "skipped_in_a_row")}
        return {
            **counts,
            "seed": Spec((2,), "int32", "s"),
            "theta": weight_specs(weights),
            "optimizer_state": weight_specs(self.optimizer.state(weights)),
        }

    @program_cache.kept
    def init(self) -> Program:
        """`init_function`, lowered."""
        logical_axes = {path: spec.logical_axes for path, spec in tree.flatten({"state": self.state_specs()}).items()}
        return lower("init", self.init_function, {"seed": Spec((2,), "int32", "s")}, logical_axes, self.layout)

    def init_function(self, inputs: dict) -> dict:
        """`{seed} -> {state}`: created already in place, each device holding its own part."""
        weights = self.model.weights()
        return {
            "state": {
                "step": tf.constant(0),
                "skipped": tf.constant(0),
                "skipped_in_a_row": tf.constant(0),
                "seed": tf.identity(inputs["seed"]),
                "theta": self._initial(weights, "theta", inputs["seed"]),
                "optimizer_state": self._initial(self.optimizer.state(weights), "optimizer_state", inputs["seed"]),
            }
        }

    @program_cache.kept
    def train(self, batch_specs: dict) -> Program:
        """`train_function`, lowered; the state is donated."""
        inputs = {"state": self.state_specs(), "batch": batch_specs}
        return lower("train", self.train_function(batch_specs), inputs, {}, self.layout, donated=("state",))

    def train_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """`{state, batch} -> {state, metrics}`, one step.

        A loss or gradient that is not finite changes neither weights nor optimizer_state; the step is counted as skipped, and the next
        one has another batch and other random numbers.

        Metrics are the model's, of the weights before the step, and `loss`, `gradient_norm`, `learning_rate`, `skipped` and
        `skipped_in_a_row`.
        """

        def function(inputs: dict) -> dict:
            state, weights = inputs["state"], self.model.weights()
            theta = self._in_place(weights, state["theta"])
            loss, metrics, gradients = self._differentiated(theta, state, self._batch(batch_specs, inputs["batch"]))
            with tf.name_scope("optimizer"):
                updated = self.optimizer.update(
                    weights, theta, gradients, state["optimizer_state"], state["step"], self._context()
                )
                norm = _global_norm(weights, gradients)
                is_finite = tf.math.is_finite(loss) & tf.math.is_finite(norm)
                theta, optimizer_state = (
                    tree.map_leaves(lambda new, old: tf.where(is_finite, new, old), new, old)
                    for new, old in zip(updated, (theta, state["optimizer_state"]))
                )
            skipped = tf.cast(~is_finite, tf.int32)
            counts = {
                "skipped": state["skipped"] + skipped,
                "skipped_in_a_row": (state["skipped_in_a_row"] + skipped) * skipped,
            }
            metrics = dict(
                metrics,
                **counts,
                loss=loss,
                gradient_norm=norm,
                learning_rate=self.optimizer.learning_rate(state["step"]),
            )
            return {
                "state": {
                    **counts,
                    "step": state["step"] + 1,
                    "seed": tf.identity(state["seed"]),
                    "theta": theta,
                    "optimizer_state": optimizer_state,
                },
                "metrics": metrics,
            }

        return function

    @program_cache.kept
    def diagnose(self, batch_specs: dict) -> Program:
        """`diagnose_function`, lowered."""
        places: dict[str, str] = {}

        def function(inputs: dict) -> dict:
            outputs = self.diagnose_function(batch_specs)(inputs)
            places.update({path: "r" * tensor.shape.rank for path, tensor in tree.flatten(outputs).items()})
            return outputs

        state = {name: spec for name, spec in self.state_specs().items() if name in DIAGNOSED}
        return lower("diagnose", function, {"state": state, "batch": batch_specs}, places, self.layout)

    def diagnose_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """`{state, batch} -> {metrics, blocks, weights, gradients}`: a training step looked at, with its random numbers.

        `state` is the parts `DIAGNOSED` of the training state before the step. All results are float32: scalars, and of
        repeated layers `[R]`, a number for each repeat.

          metrics    the model's, `loss` and `gradient_norm`
          blocks     by the block's path among the weights: `rms` and `max` of what it returns (see `layers.measures`), of
                     experts `router_entropy` and `load_entropy`; `softmax` is the logits
          weights    the root mean square of each, by its path
          gradients  the norm of each weight's, by its path
        """

        def function(inputs: dict) -> dict:
            state, weights, add_summary = inputs["state"], self.model.weights(), SummaryCollector()
            theta, batch = self._in_place(weights, state["theta"]), self._batch(batch_specs, inputs["batch"])
            loss, metrics, gradients = self._differentiated(theta, state, batch, add_summary)
            return {
                "metrics": dict(metrics, loss=loss, gradient_norm=_global_norm(weights, gradients)),
                "blocks": tree.unflatten(add_summary.values),
                "weights": tree.map_leaves(_of_repeats(root_mean_square), weights, theta),
                "gradients": tree.map_leaves(_of_repeats(norm), weights, gradients),
            }

        return function

    @program_cache.kept
    def evaluate(self, batch_specs: dict) -> Program:
        """`evaluate_function`, lowered."""
        inputs = {"theta": weight_specs(self.model.weights()), "batch": batch_specs}
        return lower("evaluate", self.evaluate_function(batch_specs), inputs, {}, self.layout)

    def evaluate_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """`{theta, batch} -> {metrics}`, without random numbers."""

        def function(inputs: dict) -> dict:
            theta = self._in_place(self.model.weights(), inputs["theta"])
            _, metrics = self.model.loss(theta, self._batch(batch_specs, inputs["batch"]), self._context())
            return {"metrics": metrics}

        return function

    @program_cache.kept
    def decode(self, source_specs: dict, search: BeamSearch) -> Program:
        """`{theta, source} -> {ids, scores, lengths}`: the whole flat beam search; outputs as `decoding.Hypotheses`."""

        def function(inputs: dict) -> dict:
            context = self._context()
            theta = self.model.decoding_theta(self._in_place(self.model.weights(), inputs["theta"]), context)
            source = self._batch(source_specs, inputs["source"])
            state = self.model.start_decoding(theta, source, search.cache_length, context)

            def step(state, ids, position, start, mask):
                return self.model.decode_step(theta, state, ids, position, start, mask, context)

            found = flat_beam_search(search, step, state, source["ids"].shape[0], context)
            return {"ids": found.ids, "scores": found.scores, "lengths": found.lengths}

        inputs = {"theta": weight_specs(self.model.weights()), "source": source_specs}
        logical_axes = {"ids": "BTL", "scores": "BT", "lengths": "BT"}
        return lower("decode", function, inputs, logical_axes, self.layout)

    def _context(self, **settings) -> Context:
        return Context(self.layout, platform=self.platform, **settings)

    def _differentiated(
        self, theta: dict, state: dict, batch: dict, add_summary: SummaryCollector | None = None
    ) -> tuple[tf.Tensor, dict, dict]:
        """(loss, metrics, gradients) of the step after `state["step"]`, whose random numbers are a function of seed and step."""
        seed = fold_seed(fold_seed(state["seed"], "train"), state["step"])
        leaves = tree.flatten(theta)
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            loss, metrics = self.model.loss(theta, batch, self._context(seed=seed, add_summary=add_summary))
        return loss, metrics, tree.unflatten(dict(zip(leaves, _gradient(tape, loss, list(leaves.values())))))

    def _initial(self, weights: dict, prefix: str, seed: tf.Tensor) -> dict:
        flat = tree.flatten(weights, f"{prefix}/")
        values = {
            path: self.layout.annotate(initial_value(weight, path, seed), weight.logical_axes)
            for path, weight in flat.items()
        }
        return tree.unflatten(values)[prefix]

    def _in_place(self, weights: dict, theta: dict) -> dict:
        return tree.map_leaves(lambda weight, tensor: self.layout.annotate(tensor, weight.logical_axes), weights, theta)

    def _batch(self, specs: dict, batch: dict) -> dict:
        return tree.map_leaves(lambda spec, tensor: self.layout.annotate(tensor, spec.logical_axes), specs, batch)


def weight_specs(weights: dict) -> dict:
    """The tree of float32 `Spec`s of a tree of `Weight`s."""
    return {
        name: Spec(node.shape, "float32", node.logical_axes) if isinstance(node, Weight) else weight_specs(node)
        for name, node in weights.items()
    }


def _of_repeats(measure: Callable[[tf.Tensor, Sequence[int]], tf.Tensor]) -> Callable[[Weight, tf.Tensor], tf.Tensor]:
    """`measure` of a tensor in a weight's place: over all dimensions but that of repeated layers."""
    return lambda weight, tensor: measure(tensor, range(weight.logical_axes.startswith("R"), len(weight.logical_axes)))


def _gradient(tape: tf.GradientTape, loss: tf.Tensor, leaves: list[tf.Tensor]) -> list[tf.Tensor]:
    found = tape.gradient(loss, leaves, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    with warnings.catch_warnings():
        # TensorFlow keeps an embedding's gradient as rows, and warns that it is large when dense, which XLA makes it anyway.
        warnings.filterwarnings("ignore", "Converting sparse IndexedSlices to a dense Tensor", UserWarning)
        return [tf.convert_to_tensor(gradient) for gradient in found]


def _global_norm(weights: dict, gradients: dict) -> tf.Tensor:
    flat = tree.flatten(gradients)
    return tf.sqrt(tf.add_n([_sum_of_squares(weight, flat[path]) for path, weight in tree.flatten(weights).items()]))


def _sum_of_squares(weight: Weight, gradient: tf.Tensor) -> tf.Tensor:
    """From the means of rows: Adafactor's too, so that the compiler finds both in one pass over the gradient."""
    row_means = tf.reduce_mean(tf.square(gradient), axis=weight.columns)
    return tf.reduce_sum(row_means) * math.prod(weight.shape[d] for d in weight.columns)
