"""Stacked layers, scanned: graph size, compile time and (with rematerialisation) memory do not grow with depth.

`repeat` applies one body R times to weights whose leading dimension is R. Three ways compute the same numbers:

  unroll        R copies in the graph; fastest to run for few layers.
  scan          one loop; the backward pass reads whatever the forward pass computed.
  scan + remat  one loop; each repeat's input is kept, and the backward loop computes the repeat again (GShard section 5.1),
                but for the tensors that the layers mark with `Context.keep` and the policy keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_moe import tree
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.summaries import SummaryCollector
from lingvo_moe.lazy import tf

# What a repeat keeps for its backward pass: everything; its inputs alone; the outputs of its blocks and what crossed between
# devices as well; the widest tensors, hidden layers and attention's projections, as well.
REMAT = ("none", "full", "keep_outputs", "keep_hidden")
KEPT = {"full": (), "keep_outputs": ("output",), "keep_hidden": ("output", "hidden")}

# (theta of one repeat, inputs [B, T, M], float constants, context) -> (outputs [B, T, M], scalar metrics)
Body = Callable[[dict, "tf.Tensor", dict, Context], tuple["tf.Tensor", dict]]


def repeat(
    body: Body,
    weights: dict,
    theta: dict,
    inputs: tf.Tensor,
    constants: dict,
    context: Context,
    *,
    metric_names: Sequence[str] = (),
    unroll: bool = False,
    remat: str = "none",
) -> tuple[tf.Tensor, dict]:
    """Applies `body` R times; random numbers of repeat i are those of `context.fold(i)`.

    Args:
      body: a pure function. What it closes over gets no gradient: tensors that need one go into `constants`.
      weights: the tree of stacked `Weight`s that `theta` holds values for; their letters are the slices' sharding.
      theta: tensors `[R, ...]`.
      inputs: `[B, T, M]`.
      constants: tree of float tensors that every repeat reads (the encoder's outputs, in a decoder).
      context: of the call.
      metric_names: the names of the metrics that `body` returns.
      unroll: see the module's docstring.
      remat: one of REMAT; with `unroll`, only "none".

    Returns:
      (`[B, T, M]`, metrics averaged over repeats). What `body` measures reaches the context's meter as `[R]`.
    """
    if unroll and remat != "none":
        raise ValueError("repeat: unroll and remat exclude each other; rematerialisation needs the loop.")
    run = _Repeat(body, weights, theta, constants, context, metric_names)
    if unroll:
        outputs, metrics, measured = run.unrolled(inputs)
    elif remat == "none":
        outputs, metrics, measured = run.scanned(inputs)
    else:
        outputs, metrics, measured = run.rematerialised(inputs, KEPT[remat])
    for name, values in measured.items():
        context.add_summary(name, values)
    return outputs, {name: value / run.times for name, value in metrics.items()}


class _Repeat:
    """The flat view of one call of `repeat`: lists of tensors instead of trees, as loops and gradients want them."""

    def __init__(
        self, body: Body, weights: dict, theta: dict, constants: dict, context: Context, metric_names: Sequence[str]
    ):
        stacked = tree.flatten(theta)
        self._body, self._context = body, context
        self._names, self._theta = list(stacked), list(stacked.values())
        declared = tree.flatten(weights)
        self._logical_axes = [declared[name].logical_axes for name in self._names]
        # A gradient that was computed in bfloat16 is kept in it: the same number in half the room.
        self._gradient_dtypes = ["float32" if declared[name].wide else context.dtype for name in self._names]
        self._constant_names, self._constants = list(tree.flatten(constants)), list(tree.flatten(constants).values())
        self.times = int(self._theta[0].shape[0])
        self._metric_names = list(metric_names)

    def unrolled(self, inputs: tf.Tensor) -> tuple[tf.Tensor, dict, dict]:
        """(outputs, metrics summed over repeats, what was measured, each `[R]`), as of the other two ways."""
        slices = [tf.unstack(weight) for weight in self._theta]
        outputs, totals, rows = inputs, [0.0] * len(self._metric_names), []
        for i in range(self.times):
            add_summary = self._summaries()
            outputs, metrics = self._call(
                i, [weight[i] for weight in slices], outputs, self._constants, add_summary=add_summary
            )
            totals = [total + metric for total, metric in zip(totals, metrics)]
            rows.append(add_summary.values if add_summary else {})
        measured = {name: tf.stack([row[name] for row in rows]) for name in rows[0]}
        return outputs, dict(zip(self._metric_names, totals)), measured

    def scanned(self, inputs: tf.Tensor) -> tuple[tf.Tensor, dict, dict]:
        _, names = self._probe(inputs)

        def step(i, outputs, totals, measured):
            add_summary = self._summaries()
            outputs, metrics = self._call(i, self._slices(i), outputs, self._constants, add_summary=add_summary)
            return i + 1, outputs, tf.add(totals, self._packed(metrics)), _with_row(measured, i, add_summary)

        start = (tf.constant(0), inputs, tf.zeros(len(self._metric_names)), [tf.zeros(self.times) for _ in names])
        _, outputs, totals, measured = tf.while_loop(
            lambda i, *_: i < self.times, step, start, maximum_iterations=self.times
        )
        return outputs, self._unpacked(totals), dict(zip(names, measured))

    def rematerialised(self, inputs: tf.Tensor, kinds: tuple[str, ...]) -> tuple[tf.Tensor, dict, dict]:
        marked, names = self._probe(inputs, kinds)

        @tf.custom_gradient
        def run(inputs, *rest):
            kept, outputs, totals, measured = self._forward_loop(inputs, kinds, marked, names, *self._split(rest))

            def gradient(outputs_gradient, totals_gradient, *_):
                return self._backward_loop(kept, outputs_gradient, totals_gradient, kinds, *self._split(rest))

            return (outputs, totals, *measured), gradient

        outputs, totals, *measured = run(inputs, *self._theta, *self._constants)
        return outputs, self._unpacked(totals), dict(zip(names, measured))

    def _forward_loop(self, inputs, kinds, marked, names, theta, constants):
        """Returns (what each repeat keeps, stacked: its input and the `marked` tensors, which are those of `kinds`; outputs;
        totals of metrics; what was measured, each `[R]`)."""
        places = [_Place(inputs.shape, inputs.dtype, "BTM"), *marked]

        def step(i, outputs, totals, measured, kept):
            recorder, add_summary = _Recorder(kinds), self._summaries()
            following, metrics = self._call(i, self._slices(i, theta), outputs, constants, recorder, add_summary)
            kept = [
                self._context.annotate(_store(stack, i, tensor), "R" + place.logical_axes)
                for stack, tensor, place in zip(kept, [outputs, *recorder.tensors], places, strict=True)
            ]
            return i + 1, following, tf.add(totals, self._packed(metrics)), _with_row(measured, i, add_summary), kept

        empty = [
            self._context.annotate(tf.zeros((self.times, *place.shape), place.dtype), "R" + place.logical_axes)
            for place in places
        ]
        start = (
            tf.constant(0),
            inputs,
            tf.zeros(len(self._metric_names)),
            [tf.zeros(self.times) for _ in names],
            empty,
        )
        _, outputs, totals, measured, kept = tf.while_loop(
            lambda i, *_: i < self.times, step, start, maximum_iterations=self.times
        )
        return list(zip(kept, places)), outputs, totals, measured

    def _probe(self, inputs: tf.Tensor, kinds: tuple[str, ...] = ()) -> tuple[list[_Place], list[str]]:
        """What a loop must know before its first turn: the places of the tensors of `kinds`, and the names of what is
        measured. The body is traced for them, unless there is nothing to find."""
        recorder, add_summary = _Recorder(kinds), self._summaries()
        if kinds or add_summary:
            probe = tf.function(
                lambda inputs: self._call(0, self._slices(0), inputs, self._constants, recorder, add_summary)[0],
                autograph=False,
            )
            probe.get_concrete_function(tf.TensorSpec(inputs.shape, inputs.dtype))
        return recorder.places, list(add_summary.values) if add_summary else []

    def _summaries(self) -> SummaryCollector | None:
        """A meter for one repeat, if anybody listens."""
        return SummaryCollector() if self._context.add_summary else None

    def _backward_loop(self, kept, outputs_gradient, totals_gradient, kinds, theta, constants):
        def step(i, gradient, constant_gradients, theta_gradients):
            inputs, *marked = [self._context.annotate(stack[i], place.logical_axes) for stack, place in kept]
            slices = self._slices(i, theta)
            with tf.GradientTape() as tape:
                tape.watch([inputs, *slices, *constants])
                with tf.name_scope("rematerialised"):  # `analysis.plan` finds it by this name
                    outputs, metrics = self._call(i, slices, inputs, constants, _Player(kinds, marked))
                totals = self._packed(metrics)
            found = tape.gradient(
                [outputs, totals],
                [inputs, *slices, *constants],
                output_gradients=[gradient, totals_gradient],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            of_slices, of_constants = found[1 : 1 + len(slices)], found[1 + len(slices) :]
            theta_gradients = [
                self._annotate_weight(k, _store(total, i, self._annotate_slice(k, tf.cast(part, total.dtype))))
                for k, (total, part) in enumerate(zip(theta_gradients, of_slices))
            ]
            constant_gradients = [tf.add(a, b) for a, b in zip(constant_gradients, of_constants)]
            return [i - 1, self._context.annotate(found[0], "BTM"), constant_gradients, theta_gradients]

        zeros = [
            self._annotate_weight(k, tf.zeros(weight.shape, dtype))
            for k, (weight, dtype) in enumerate(zip(theta, self._gradient_dtypes))
        ]
        start = [tf.constant(self.times - 1), outputs_gradient, [tf.zeros_like(c) for c in constants], zeros]
        _, gradient, constant_gradients, theta_gradients = tf.while_loop(
            lambda i, *_: i >= 0, step, start, maximum_iterations=self.times
        )
        theta_gradients = [tf.cast(total, weight.dtype) for total, weight in zip(theta_gradients, theta)]
        return [gradient, *theta_gradients, *constant_gradients]

    def _call(
        self, i, slices, inputs, constants, checkpoint_policy=None, add_summary=None
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        theta = tree.unflatten(dict(zip(self._names, slices)))
        outputs, metrics = self._body(
            theta,
            inputs,
            tree.unflatten(dict(zip(self._constant_names, constants))),
            dataclasses.replace(self._context.fold(i), checkpoint_policy=checkpoint_policy, add_summary=add_summary),
        )
        return self._context.annotate(outputs, "BTM"), [metrics[name] for name in self._metric_names]

    def _split(self, tensors):
        return tensors[: len(self._names)], tensors[len(self._names) :]

    def _slices(self, i, theta=None) -> list[tf.Tensor]:
        return [self._annotate_slice(k, weight[i]) for k, weight in enumerate(theta or self._theta)]

    def _annotate_slice(self, k: int, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, self._logical_axes[k].removeprefix("R"))

    def _annotate_weight(self, k: int, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, self._logical_axes[k])

    def _packed(self, metrics: list[tf.Tensor]) -> tf.Tensor:
        return tf.stack(metrics) if metrics else tf.zeros(0)

    def _unpacked(self, totals: tf.Tensor) -> dict:
        return dict(zip(self._metric_names, tf.unstack(totals) if self._metric_names else []))


class _Recorder:
    """A `Context.keeper` for the forward pass: notes the marked tensors of some kinds, in order."""

    def __init__(self, kinds: tuple[str, ...]):
        self.tensors: list[tf.Tensor] = []
        self.places: list[_Place] = []
        self._kinds = kinds

    def __call__(self, tensor: tf.Tensor, kind: str, logical_axes: str) -> tf.Tensor:
        if kind in self._kinds:
            self.tensors.append(tensor)
            self.places.append(_Place(tensor.shape, tensor.dtype, logical_axes))
        return tensor


class _Player:
    """A `Context.keeper` for the backward pass: gives what was kept, so that nothing computes the marked tensor again. Its
    gradient still goes to what it was computed from."""

    def __init__(self, kinds: tuple[str, ...], kept: list[tf.Tensor]):
        self._kinds, self._kept = kinds, iter(kept)

    def __call__(self, tensor: tf.Tensor, kind: str, logical_axes: str) -> tf.Tensor:
        if kind not in self._kinds:
            return tensor
        kept = next(self._kept)
        if not tensor.dtype.is_floating:
            return kept
        return tf.custom_gradient(lambda again: (tf.identity(kept), lambda gradient: gradient))(tensor)


@dataclasses.dataclass(frozen=True)
class _Place:
    """What a loop must know of a tensor before its first turn."""

    shape: tf.TensorShape
    dtype: tf.DType
    logical_axes: str


def _with_row(stacks: list[tf.Tensor], i: tf.Tensor, add_summary: SummaryCollector | None) -> list[tf.Tensor]:
    """The `[R]` stacks, one for each measure, with row i of each from the meter of repeat i."""
    if not add_summary:
        return stacks
    return [
        tf.where(tf.equal(tf.range(stack.shape[0]), i), value, stack)
        for stack, value in zip(stacks, add_summary.values.values(), strict=True)
    ]


def _store(stack: tf.Tensor, i: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """`stack` with row i replaced, in place where the compiler can: `[R, ...]`, scalar, `[...]`."""
    return dynamic_update(stack, value[None], [i] + [0] * (stack.shape.rank - 1))


def dynamic_update(tensor: tf.Tensor, update: tf.Tensor, start: list) -> tf.Tensor:
    """`tensor` with the block that begins at `start` replaced by `update`; only in compiled programs."""
    from tensorflow.compiler.tf2xla.python import xla  # TensorFlow's own slice updates become scatters

    return xla.dynamic_update_slice(tensor, update, tf.stack([tf.cast(index, tf.int32) for index in start]))
