"""The pure step functions: a model and an optimizer become programs (init, train, evaluate, decode, ...).

They depend on `protocols.Model` and `protocols.Optimizer`, not on a class. The training state is a tree:

  step              scalar int32, the number of steps so far
  seed              [2] int32, the key of all random numbers: those of step t are a function of (seed, t, layer)
  skipped           scalar int32, the number of steps that changed no weight because their loss or a gradient was not
                    finite
  skipped_in_a_row  scalar int32, the number of such steps since the last one that changed weights
  theta             the weights; with `ema_decay` their moving average, which evaluation and decoding use
  ema_gap           with `ema_decay`: the weights that are trained, minus the average; initially zero
  optimizer_state   the optimizer's

The state is all that the next step depends on, so a step can be replayed bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

from lingvo_moe import definitions, program_cache, tree
from lingvo_moe.decoding.flat_beam_search import BeamSearch, flat_beam_search
from lingvo_moe.decoding.sampling import Sampling, sample
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Weight, initial_value
from lingvo_moe.layers.summaries import SummaryCollector, norm, root_mean_square
from lingvo_moe.lazy import tf
from lingvo_moe.ops.precision import matmul_precision
from lingvo_moe.ops.random_numbers import fold_seed
from lingvo_moe.program import COMPILER_DEFAULT, DIAGNOSED, Program, lower
from lingvo_moe.protocols import (
    DecodingModel,
    Model,
    Optimizer,
    RecognisingModel,
    RoutingModel,
    RowSelectingModel,
    SegmentingModel,
)
from lingvo_moe.sharding.layout import LOGICAL_AXES, Layout, Spec


@dataclasses.dataclass(frozen=True)
class Steps:
    """The programs of a model and an optimizer under a layout.

    Attributes:
      model, optimizer, layout: what the programs compute, and its sharding.
      platform: the platform that the programs are optimised for, see `Context`; they run on every platform.
      matmul_precision: of float32 operands of matmuls, see MATMUL_PRECISIONS.
      windowed_einsum_mib: the smallest tensor, in MiB, for which XLA makes a windowed einsum, see `Program`.
      ema_decay: of the moving average of the weights, per step; 0 for none.
    """

    model: Model
    optimizer: Optimizer
    layout: Layout
    platform: str = ""
    matmul_precision: str = "default"
    windowed_einsum_mib: int = COMPILER_DEFAULT
    ema_decay: float = 0.0

    def state_specs(self) -> dict:
        """Returns the tree of `Spec`s of the training state."""
        weights = self.model.weights()
        counts = {name: Spec((), "int32", "") for name in ("step", "skipped", "skipped_in_a_row")}
        return {
            **counts,
            "seed": Spec((2,), "int32", "s"),
            "theta": weight_specs(weights),
            **({"ema_gap": weight_specs(weights)} if self.ema_decay else {}),
            "optimizer_state": weight_specs(self.optimizer.state(weights)),
        }

    @program_cache.cached
    def init(self) -> Program:
        """Returns the lowered `init_function`."""
        logical_axes = {path: spec.logical_axes for path, spec in tree.flatten({"state": self.state_specs()}).items()}
        return self._lower("init", self.init_function, {"seed": Spec((2,), "int32", "s")}, logical_axes)

    def init_function(self, inputs: dict) -> dict:
        """`{seed} -> {state}`: the initial state, sharded from the start: each device computes its own shards."""
        weights = self.model.weights()
        theta = self._initial(weights, "theta", inputs["seed"])
        return {
            "state": {
                "step": tf.constant(0),
                "skipped": tf.constant(0),
                "skipped_in_a_row": tf.constant(0),
                "seed": tf.identity(inputs["seed"]),
                **self._average(theta, theta, tf.constant(0)),
                "optimizer_state": self._initial(self.optimizer.state(weights), "optimizer_state", inputs["seed"]),
            }
        }

    @program_cache.cached
    def train(self, batch_specs: dict) -> Program:
        """Returns the lowered `train_function`; the state is donated."""
        inputs = {"state": self.state_specs(), "batch": batch_specs}
        return self._lower("train", self.train_function(batch_specs), inputs, {}, donated=("state",))

    def train_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """Returns the function `{state, batch} -> {state, metrics}` of one step.

        If the loss or a gradient is not finite, weights and optimizer state stay as they are, and the step counts as
        skipped; the next one has another batch and other random numbers.

        The metrics are those of the model, for the weights before the step, and `loss`, `gradient_norm`,
        `learning_rate`, `skipped` and `skipped_in_a_row`.
        """

        def function(inputs: dict) -> dict:
            state, weights = inputs["state"], self.model.weights()
            before = {name: self._annotated(weights, state[name]) for name in ("theta", "ema_gap") if name in state}
            theta = self._trained(before)
            loss, metrics, gradients = self._differentiate(theta, state, self._annotated(batch_specs, inputs["batch"]))
            with tf.name_scope("optimizer"):
                gradient_norm = _global_norm(weights, gradients)
                is_finite = tf.math.is_finite(loss) & tf.math.is_finite(gradient_norm)
                learning_rate = self._learning_rate(state["step"])
                new_theta, optimizer_state = self._update(weights, theta, gradients, state, is_finite)
                updated = self._average(before["theta"], new_theta, state["step"])
                if self.ema_decay:  # otherwise these are the optimizer's weights
                    updated = tree.map_leaves(lambda new, old: tf.where(is_finite, new, old), updated, before)
            skipped = tf.cast(~is_finite, tf.int32)
            counts = {
                "skipped": state["skipped"] + skipped,
                "skipped_in_a_row": (state["skipped_in_a_row"] + skipped) * skipped,
            }
            metrics = dict(
                metrics,
                **counts,
                loss=loss,
                gradient_norm=gradient_norm,
                learning_rate=learning_rate,
            )
            return {
                "state": {
                    **counts,
                    "step": state["step"] + 1,
                    "seed": tf.identity(state["seed"]),
                    **updated,
                    "optimizer_state": optimizer_state,
                },
                "metrics": metrics,
            }

        return function

    @program_cache.cached
    def diagnose(self, batch_specs: dict) -> Program:
        """Returns the lowered `diagnose_function`."""
        logical_axes: dict[str, str] = {}

        def function(inputs: dict) -> dict:
            outputs = self.diagnose_function(batch_specs)(inputs)
            logical_axes.update({path: "r" * tensor.shape.rank for path, tensor in tree.flatten(outputs).items()})
            return outputs

        state = {name: spec for name, spec in self.state_specs().items() if name in DIAGNOSED}
        return self._lower("diagnose", function, {"state": state, "batch": batch_specs}, logical_axes)

    def diagnose_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """Returns the function `{state, batch} -> {metrics, blocks, weights, gradients}`, summaries of a training step.

        `state` holds the parts `DIAGNOSED` of the training state before the step; random numbers are those of the step.
        All results are float32: scalars, or `[R]` for repeated layers, one number for each repeat.

          metrics    the model's, `loss` and `gradient_norm`
          blocks     by the Transformer block's path among the weights: `rms` and `max` of its output (see
                     `layers.summaries`), for experts also `router_entropy` and `load_entropy`; `softmax` is the logits
          weights    the root mean square of each weight, by its path
          gradients  the norm of each weight's gradient, by its path
        """

        def function(inputs: dict) -> dict:
            state, weights, summaries = inputs["state"], self.model.weights(), SummaryCollector()
            theta, batch = self._annotated(weights, self._trained(state)), self._annotated(batch_specs, inputs["batch"])
            loss, metrics, gradients = self._differentiate(theta, state, batch, summaries)
            return {
                "metrics": dict(metrics, loss=loss, gradient_norm=_global_norm(weights, gradients)),
                "blocks": tree.unflatten(summaries.values),
                "weights": tree.map_leaves(_per_repeat(root_mean_square), weights, theta),
                "gradients": tree.map_leaves(_per_repeat(norm), weights, gradients),
            }

        return function

    @program_cache.cached
    def evaluate(self, batch_specs: dict) -> Program:
        """Returns the lowered `evaluate_function`."""
        inputs = {"theta": weight_specs(self.model.weights()), "batch": batch_specs}
        return self._lower("evaluate", self.evaluate_function(batch_specs), inputs, {})

    def evaluate_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """Returns the function `{theta, batch} -> {metrics}`, which uses no random numbers."""

        def function(inputs: dict) -> dict:
            theta = self._annotated(self.model.weights(), inputs["theta"])
            _, metrics = self._loss(theta, self._annotated(batch_specs, inputs["batch"]), self._context())
            return {"metrics": metrics}

        return function

    @program_cache.cached
    def decode(self, source_specs: dict, search: BeamSearch | Sampling) -> Program:
        """Returns the program `{theta, source} -> {ids, scores, lengths}` of a whole search; see `Hypotheses`.

        Args:
          source_specs: the tree of `Spec`s of the source sentences, or of a language model's prompts; for `Sampling`
            with `sampling`, see `decoding.sampling.input_specs`.
          search: beam search, or sampling. With `force_first`, the source has `first_ids` `[B] int32` as well.

        Raises:
          UserError: the model has no decoding step.
        """
        specs = weight_specs(self._decoding_model().weights())
        return self._search(source_specs, search, specs, self._prepare_decoding)

    @program_cache.cached
    def prepare_decoding(self) -> Program:
        """Returns the program `{theta} -> {theta}`: the weights as `decode_prepared` takes them, for one device.

        It computes what a search derives from the weights alone, slices and transpositions, once for many searches.
        Weights of the same form before and after keep their memory: a call consumes these inputs.

        Raises:
          UserError: the model has no decoding step.
        """
        specs, logical_axes = weight_specs(self._decoding_model().weights()), {}

        def function(inputs: dict) -> dict:
            prepared = {"theta": self._prepare_decoding(inputs["theta"])}
            flat = tree.flatten(prepared)
            logical_axes.update({path: _unsharded(tensor.shape.rank) for path, tensor in flat.items()})
            return prepared

        program = self._lower("prepare_decoding", function, {"theta": specs}, logical_axes)
        returned = {each.path: each for each in program.outputs}
        kept = tuple(each.path for each in program.inputs if returned.get(each.path) == each)
        return dataclasses.replace(program, donated=kept)

    @program_cache.cached
    def decode_prepared(self, source_specs: dict, search: BeamSearch | Sampling) -> Program:
        """Returns the program of `decode` for the weights that `prepare_decoding` returns, on one device."""
        return self._search(source_specs, search, self.prepared_specs(), lambda theta: theta)

    def prepared_specs(self) -> dict:
        """Returns the tree of `Spec`s of the weights that `prepare_decoding` returns."""
        outputs = self.prepare_decoding().outputs
        specs = {each.path: Spec(each.shape, each.dtype, _unsharded(len(each.shape))) for each in outputs}
        return tree.unflatten(specs)["theta"]

    def _decoding_model(self) -> DecodingModel:
        if not isinstance(self.model, DecodingModel):
            raise UserError(
                f"{type(self.model).__name__} does not decode: it lacks a method of `protocols.DecodingModel`."
            )
        return self.model

    def _prepare_decoding(self, theta: dict) -> dict:
        model = self._decoding_model()
        return model.prepare_decoding(self._annotated(model.weights(), theta), self._context())

    def _search(
        self, source_specs: dict, search: BeamSearch | Sampling, specs: dict, prepare: Callable[[dict], dict]
    ) -> Program:
        """Returns the program of a search, for weights of these specs, which `prepare` prepares for decoding."""
        model = self._decoding_model()
        select_rows = None
        # Each of several devices would have to keep equally many rows.
        if self.layout.is_one_device and isinstance(model, RowSelectingModel) and model.independent_sentences:
            select_rows = model.select_rows

        def function(inputs: dict) -> dict:
            context, theta = self._context(), prepare(inputs["theta"])
            source = self._annotated(source_specs, inputs["source"])
            first_ids = source.pop("first_ids", None)
            state = model.start_decoding(theta, source, search.cache_length, context)

            def step(state, ids, paddings, position, start, mask):
                return model.decode_step(theta, state, ids, paddings, position, start, mask, context)

            present = tf.reduce_any(tf.not_equal(source["segment_ids"], 0), axis=1)
            if isinstance(search, Sampling):
                hypotheses = sample(search, step, state, present, source["sampling"], context)
            else:
                hypotheses = flat_beam_search(search, step, state, present, context, select_rows, first_ids)
            return {"ids": hypotheses.ids, "scores": hypotheses.scores, "lengths": hypotheses.lengths}

        logical_axes = {"ids": "BTL", "scores": "BT", "lengths": "BT"}
        return self._lower("decode", function, {"theta": specs, "source": source_specs}, logical_axes)

    @program_cache.cached
    def transcribe(self, source_specs: dict) -> Program:
        """Returns the program `{theta, source} -> {classes}` of each position of each recording.

        Raises:
          UserError: the model does not recognise speech.
        """
        model = self.model
        if not isinstance(model, RecognisingModel):
            raise UserError(
                f"{type(model).__name__} reads no speech: it lacks `protocols.RecognisingModel.transcribe`."
            )
        return self._classify("transcribe", model.transcribe, source_specs, "BT")

    @program_cache.cached
    def segment(self, source_specs: dict) -> Program:
        """Returns the program `{theta, source} -> {classes}` of each voxel of each volume.

        Raises:
          UserError: the model does not segment volumes.
        """
        model = self.model
        if not isinstance(model, SegmentingModel):
            raise UserError(f"{type(model).__name__} cannot segment: it is not a `protocols.SegmentingModel`.")
        return self._classify("segment", model.segment, source_specs, "BXYZ")

    @program_cache.cached
    def explain(self, batch_specs: dict) -> Program:
        """Returns the program `{theta, batch} -> {STACK: {LAYER: {experts, weights}}}`, which experts take each token.

        Raises:
          UserError: the model does not expose its routing.
        """
        model = self.model
        if not isinstance(model, RoutingModel):
            raise UserError(
                f"{type(model).__name__} has no experts to explain: it lacks `protocols.RoutingModel.routing`."
            )
        logical_axes: dict[str, str] = {}

        def function(inputs: dict) -> dict:
            theta = self._annotated(model.weights(), inputs["theta"])
            found = model.routing(theta, self._annotated(batch_specs, inputs["batch"]), self._context())
            logical_axes.update(dict.fromkeys(tree.flatten(found), "BTr"))
            return found

        inputs = {"theta": weight_specs(model.weights()), "batch": batch_specs}
        return self._lower("explain", function, inputs, logical_axes)

    def _classify(
        self, name: str, classify: Callable[[dict, dict, Context], tf.Tensor], source_specs: dict, logical_axes: str
    ) -> Program:
        """Returns the program `{theta, source} -> {classes}`, which have these logical axes."""

        def function(inputs: dict) -> dict:
            theta = self._annotated(self.model.weights(), inputs["theta"])
            source = self._annotated(source_specs, inputs["source"])
            return {"classes": classify(theta, source, self._context())}

        inputs = {"theta": weight_specs(self.model.weights()), "source": source_specs}
        return self._lower(name, function, inputs, {"classes": logical_axes})

    def _lower(
        self,
        name: str,
        function: Callable[[dict], dict],
        inputs: dict,
        logical_axes: dict,
        donated: tuple[str, ...] = (),
    ) -> Program:
        with matmul_precision(self.matmul_precision):
            program = lower(name, function, inputs, logical_axes, self.layout, donated)
        return dataclasses.replace(program, windowed_einsum_mib=self.windowed_einsum_mib)

    def _context(self, **settings) -> Context:
        return Context(self.layout, platform=self.platform, matmul_precision=self.matmul_precision, **settings)

    def _differentiate(
        self, theta: dict, state: dict, batch: dict, add_summary: SummaryCollector | None = None
    ) -> tuple[tf.Tensor, dict, dict]:
        """Returns (loss, metrics, gradients) of the step that follows `state["step"]` steps."""
        seed = fold_seed(fold_seed(state["seed"], "train"), state["step"])
        leaves = tree.flatten(theta)
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            loss, metrics = self._loss(theta, batch, self._context(seed=seed, add_summary=add_summary))
        return loss, metrics, tree.unflatten(dict(zip(leaves, _gradient(tape, loss, list(leaves.values())))))

    def _loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """Returns the model's loss and metrics; raises UserError where they are not those of `protocols.Model`."""
        what = f"model {type(self.model).__name__}: loss"
        with definitions.named(lambda: what, self.model):
            result = self.model.loss(theta, batch, context)
            definitions.check_pair(what, result, "loss, metrics")
            loss, metrics = result
            definitions.check_form(what, loss, definitions.SCALAR)
            definitions.check_scalars(what, metrics)
            if lacking := [name for name in ("cross_entropy", "tokens") if name not in metrics]:
                raise UserError(f"{what} returned no metric {' and no metric '.join(lacking)}, which reports need.")
            return loss, metrics

    def _learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate; raises UserError where it is no scalar float32 tensor."""
        schedule = self.optimizer.learning_rate
        what = f"learning rate {type(schedule).__name__}"
        with definitions.named(lambda: what, schedule):
            rate = schedule(step)
            definitions.check_form(f"{what}: the result of a call", rate, definitions.SCALAR)
            return rate

    def _update(
        self, weights: dict, theta: dict, gradients: dict, state: dict, is_finite: tf.Tensor
    ) -> tuple[dict, dict]:
        """Returns the optimizer's (theta, optimizer_state); raises UserError where they are not what it was given."""
        before = {"theta": theta, "optimizer_state": state.get("optimizer_state", {})}
        what = f"optimizer {type(self.optimizer).__name__}: update"
        with definitions.named(lambda: what, self.optimizer):
            result = self.optimizer.update(
                weights, theta, gradients, before["optimizer_state"], state["step"], is_finite, self._context()
            )
            definitions.check_pair(what, result, "theta, optimizer_state")
            for (name, given), returned, declares in zip(before.items(), result, ("the model", "state")):
                definitions.check_type(f"{what}: the returned {name}", returned, dict)
                definitions.check_leaves(what, _forms(returned), _forms(given), declares)
            return result

    def _trained(self, state: dict) -> dict:
        """Returns the weights that are trained, of which the state may hold the average."""
        return tree.map_leaves(tf.add, state["theta"], state["ema_gap"]) if self.ema_decay else state["theta"]

    def _average(self, average: dict, trained: dict, step: tf.Tensor) -> dict:
        """Returns `theta`, and with `ema_decay` `ema_gap`, after the step that follows `step` steps.

        Early averages have a shorter memory, as in `tf.train.ExponentialMovingAverage` with `num_updates`.

        Args:
          average: the average of the weights so far.
          trained: the weights after the step.
          step: scalar int32.
        """
        if not self.ema_decay:
            return {"theta": trained}
        count = tf.cast(step, tf.float32)
        decay = tf.minimum(self.ema_decay, (1.0 + count) / (10.0 + count))
        gap = tree.map_leaves(lambda old, new: decay * (new - old), average, trained)
        return {"theta": tree.map_leaves(tf.subtract, trained, gap), "ema_gap": gap}

    def _initial(self, weights: dict, prefix: str, seed: tf.Tensor) -> dict:
        flat = tree.flatten(weights, f"{prefix}/")
        values = {
            path: self.layout.annotate(initial_value(weight, path, seed), weight.logical_axes)
            for path, weight in flat.items()
        }
        return tree.unflatten(values).get(prefix, {})  # an optimizer may have no state

    def _annotated(self, declared: dict, tensors: dict) -> dict:
        """Annotates a tree of tensors with the logical axes of a tree of `Weight`s or `Spec`s."""
        return tree.map_leaves(lambda leaf, tensor: self.layout.annotate(tensor, leaf.logical_axes), declared, tensors)


def weight_specs(weights: dict) -> dict:
    """Returns the tree of float32 `Spec`s of a tree of `Weight`s."""
    return {
        name: Spec(node.shape, "float32", node.logical_axes) if isinstance(node, Weight) else weight_specs(node)
        for name, node in weights.items()
    }


def _forms(tensors: dict) -> dict[str, str]:
    """Returns the dtype and shape of the tensors of a tree, by path."""
    return {path: definitions.form(tensor) for path, tensor in tree.flatten(tensors).items()}


def _unsharded(rank: int) -> str:
    """Returns logical axes of a tensor that no layout shards."""
    return LOGICAL_AXES[:rank].lower()


def _per_repeat(summary: Callable[[tf.Tensor, Sequence[int]], tf.Tensor]) -> Callable[[Weight, tf.Tensor], tf.Tensor]:
    """Returns a function that applies `summary` to all dimensions of a weight's tensor except that of repeats."""
    return lambda weight, tensor: summary(tensor, range(weight.is_repeated, len(weight.logical_axes)))


def _gradient(tape: tf.GradientTape, loss: tf.Tensor, leaves: list[tf.Tensor]) -> list[tf.Tensor]:
    gradients = tape.gradient(loss, leaves, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    with warnings.catch_warnings():
        # TensorFlow represents an embedding's gradient by its rows and warns about a dense one; XLA makes it dense.
        warnings.filterwarnings("ignore", "Converting sparse IndexedSlices to a dense Tensor", UserWarning)
        return [tf.convert_to_tensor(gradient) for gradient in gradients]


def _global_norm(weights: dict, gradients: dict) -> tf.Tensor:
    flat = tree.flatten(gradients)
    return tf.sqrt(tf.add_n([_sum_of_squares(weight, flat[path]) for path, weight in tree.flatten(weights).items()]))


def _sum_of_squares(weight: Weight, gradient: tf.Tensor) -> tf.Tensor:
    """Sums the means of rows, which Adafactor computes as well, so that one pass over the gradient serves both."""
    row_means = tf.reduce_mean(tf.square(gradient), axis=weight.columns)
    return tf.reduce_sum(row_means) * math.prod(weight.shape[d] for d in weight.columns)
