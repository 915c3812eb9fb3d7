"""Stacked layers, scanned: graph size, compile time and (with rematerialisation) memory do not grow with depth.

`repeat` applies one body R times to weights whose leading dimension is R. Three ways compute the same numbers:

  unroll        R copies in the graph; fastest to run for few layers.
  scan          one loop; the backward pass reads whatever the forward pass computed.
  scan + remat  one loop; each repeat's input is saved, and the backward loop recomputes the repeat (GShard section
                5.1), except for tensors that layers name with `Context.checkpoint_name` and the policy saves. Also
                called gradient checkpointing or activation checkpointing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_moe import tree
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.checkpoint_policy import REMAT, SAVED_NAMES, Restore, Save, TensorSpec
from lingvo_moe.layers.summaries import SummaryCollector, add_summaries, collector_for
from lingvo_moe.lazy import tf
from lingvo_moe.ops.slices import dynamic_update_slice

# (theta of one repeat, inputs [B, T, M], constants, context) -> (outputs [B, T, M], scalar metrics)
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
      body: a pure function; the tensors that it needs go into `constants`.
      weights: the tree of stacked `Weight`s that `theta` holds values for; their logical axes are the slices' sharding.
      theta: tensors `[R, ...]`.
      inputs: `[B, T, M]`.
      constants: a tree of tensors that every repeat reads: masks, and in a decoder the encoder's outputs, `[B, ...]`;
        a bias of all rows. Those of a float type get gradients.
      context: of the call.
      metric_names: the names of the metrics that `body` returns.
      unroll: see the module's docstring.
      remat: one of `checkpoint_policy.REMAT`; with `unroll`, only "none".

    Returns:
      (`[B, T, M]`, metrics averaged over repeats). The summaries of `body` are added to the context's as `[R]`.

    Raises:
      ValueError: an unknown `remat`, or one other than "none" with `unroll`.
    """
    if remat not in REMAT:
        raise ValueError(f"repeat: remat is {remat!r}; expected one of {', '.join(REMAT)}.")
    if unroll and remat != "none":
        raise ValueError("repeat: unroll and remat exclude each other; rematerialisation needs the loop.")
    run = _Repeat(body, weights, theta, constants, context, metric_names)
    if unroll:
        outputs, metrics, summaries = run.unrolled(inputs)
    elif remat == "none":
        outputs, metrics, summaries = run.scanned(inputs)
    else:
        outputs, metrics, summaries = run.rematerialised(inputs, SAVED_NAMES[remat])
    add_summaries(context, summaries)
    return outputs, {name: value / run.times for name, value in metrics.items()}


class _Repeat:
    """One call of `repeat` with lists of tensors instead of trees, as loops and gradients take them."""

    def __init__(
        self, body: Body, weights: dict, theta: dict, constants: dict, context: Context, metric_names: Sequence[str]
    ):
        stacked = tree.flatten(theta)
        self._body, self._context = body, context
        self._names, self._theta = list(stacked), list(stacked.values())
        declared = tree.flatten(weights)
        self._logical_axes = [declared[name].logical_axes for name in self._names]
        # A gradient that was computed in bfloat16 is stored in it: the same number in half the memory.
        self._gradient_dtypes = ["float32" if declared[name].keep_float32 else context.dtype for name in self._names]
        flat = tree.flatten(constants)
        self._fixed = {name: tensor for name, tensor in flat.items() if not tensor.dtype.is_floating}
        self._constant_names = [name for name in flat if name not in self._fixed]
        self._constants = [flat[name] for name in self._constant_names]
        self.times = int(self._theta[0].shape[0])
        self._metric_names = list(metric_names)

    def unrolled(self, inputs: tf.Tensor) -> tuple[tf.Tensor, dict, dict]:
        """Returns (outputs, metrics summed over repeats, summaries, each `[R]`)."""
        slices = [tf.unstack(weight) for weight in self._theta]
        outputs, totals, rows = inputs, [0.0] * len(self._metric_names), []
        for i in range(self.times):
            collector = collector_for(self._context)
            theta = [weight[i] for weight in slices]
            outputs, metrics = self._call(i, theta, outputs, self._constants, add_summary=collector)
            totals = [total + metric for total, metric in zip(totals, metrics)]
            rows.append(collector.values if collector else {})
        summaries = {name: tf.stack([row[name] for row in rows]) for name in rows[0]}
        return outputs, dict(zip(self._metric_names, totals)), summaries

    def scanned(self, inputs: tf.Tensor) -> tuple[tf.Tensor, dict, dict]:
        """Computes what `unrolled` does, in a loop."""
        _, names = self._probe(inputs)

        def step(i, outputs, totals, summaries):
            collector = collector_for(self._context)
            outputs, metrics = self._call(i, self._slices(i), outputs, self._constants, add_summary=collector)
            return i + 1, outputs, tf.add(totals, self._packed(metrics)), _with_row(summaries, i, collector)

        start = (tf.constant(0), inputs, tf.zeros(len(self._metric_names)), [tf.zeros(self.times) for _ in names])
        _, outputs, totals, summaries = self._loop(step, start)
        return outputs, self._unpacked(totals), dict(zip(names, summaries))

    def rematerialised(self, inputs: tf.Tensor, saved_names: tuple[str, ...]) -> tuple[tf.Tensor, dict, dict]:
        """Computes what `unrolled` does, in a loop; saves the tensors with these checkpoint names."""
        specs, names = self._probe(inputs, saved_names)

        @tf.custom_gradient
        def run(inputs, *rest):
            saved, outputs, totals, summaries = self._forward_loop(
                inputs, saved_names, specs, names, *self._split(rest)
            )

            def gradient(outputs_gradient, totals_gradient, *_):
                return self._backward_loop(saved, outputs_gradient, totals_gradient, saved_names, *self._split(rest))

            return (outputs, totals, *summaries), gradient

        outputs, totals, *summaries = run(inputs, *self._theta, *self._constants)
        return outputs, self._unpacked(totals), dict(zip(names, summaries))

    def _forward_loop(self, inputs, saved_names, specs, names, theta, constants):
        """Runs all repeats.

        Returns:
          (the tensors that each repeat saves, stacked, with their specs: its input and those with `saved_names`;
          outputs; sums of metrics; summaries, each `[R]`).
        """
        specs = [TensorSpec(inputs.shape, inputs.dtype, "BTM"), *specs]

        def step(i, outputs, totals, summaries, saved):
            save, collector = Save(saved_names), collector_for(self._context)
            following, metrics = self._call(i, self._slices(i, theta), outputs, constants, save, collector)
            saved = [
                self._context.annotate(_store(stack, i, tensor), "R" + spec.logical_axes)
                for stack, tensor, spec in zip(saved, [outputs, *save.tensors], specs, strict=True)
            ]
            totals = tf.add(totals, self._packed(metrics))
            return i + 1, following, totals, _with_row(summaries, i, collector), saved

        empty = [
            self._context.annotate(tf.zeros((self.times, *spec.shape), spec.dtype), "R" + spec.logical_axes)
            for spec in specs
        ]
        no_summaries = [tf.zeros(self.times) for _ in names]
        start = (tf.constant(0), inputs, tf.zeros(len(self._metric_names)), no_summaries, empty)
        _, outputs, totals, summaries, saved = self._loop(step, start)
        return list(zip(saved, specs)), outputs, totals, summaries

    def _loop(self, step: Callable, start: tuple) -> tuple:
        """Runs `step` R times; the first loop variable counts."""
        return tf.while_loop(lambda i, *_: i < self.times, step, start, maximum_iterations=self.times)

    def _probe(self, inputs: tf.Tensor, saved_names: tuple[str, ...] = ()) -> tuple[list[TensorSpec], list[str]]:
        """Returns the specs of the tensors with `saved_names`, and the names of the summaries.

        A loop must know them before its first iteration. Traces the body for them, unless there are none.
        """
        save, collector = Save(saved_names), collector_for(self._context)
        if saved_names or collector:
            probe = tf.function(
                lambda inputs: self._call(0, self._slices(0), inputs, self._constants, save, collector)[0],
                autograph=False,
            )
            probe.get_concrete_function(tf.TensorSpec(inputs.shape, inputs.dtype))
        return save.specs, list(collector.values) if collector else []

    def _backward_loop(self, saved, outputs_gradient, totals_gradient, saved_names, theta, constants):
        def step(i, gradient, constant_gradients, theta_gradients):
            inputs, *tensors = [self._context.annotate(stack[i], spec.logical_axes) for stack, spec in saved]
            slices = self._slices(i, theta)
            with tf.GradientTape() as tape:
                tape.watch([inputs, *slices, *constants])
                with tf.name_scope("rematerialised"):  # `analysis.plan` finds it by this name
                    outputs, metrics = self._call(i, slices, inputs, constants, Restore(saved_names, tensors))
                totals = self._packed(metrics)
            gradients = tape.gradient(
                [outputs, totals],
                [inputs, *slices, *constants],
                output_gradients=[gradient, totals_gradient],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            of_slices, of_constants = gradients[1 : 1 + len(slices)], gradients[1 + len(slices) :]
            theta_gradients = [
                self._annotate_weight(k, _store(total, i, self._annotate_slice(k, tf.cast(part, total.dtype))))
                for k, (total, part) in enumerate(zip(theta_gradients, of_slices))
            ]
            constant_gradients = [tf.add(a, tf.cast(b, a.dtype)) for a, b in zip(constant_gradients, of_constants)]
            return [i - 1, self._context.annotate(gradients[0], "BTM"), constant_gradients, theta_gradients]

        zeros = [
            self._annotate_weight(k, tf.zeros(weight.shape, dtype))
            for k, (weight, dtype) in enumerate(zip(theta, self._gradient_dtypes))
        ]
        # Every repeat adds to the gradient of a constant: a sum of many bfloat16 numbers, but a small tensor.
        constant_zeros = [tf.zeros(constant.shape, tf.float32) for constant in constants]
        start = [tf.constant(self.times - 1), outputs_gradient, constant_zeros, zeros]
        _, gradient, constant_gradients, theta_gradients = tf.while_loop(
            lambda i, *_: i >= 0, step, start, maximum_iterations=self.times
        )
        of_inputs = [*theta_gradients, *constant_gradients]
        return [gradient, *(tf.cast(total, value.dtype) for total, value in zip(of_inputs, [*theta, *constants]))]

    def _call(
        self, i, slices, inputs, constants, checkpoint_policy=None, add_summary=None
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        theta = tree.unflatten(dict(zip(self._names, slices)))
        outputs, metrics = self._body(
            theta,
            inputs,
            tree.unflatten(dict(zip(self._constant_names, constants)) | self._fixed),
            dataclasses.replace(self._context.fold(i), checkpoint_policy=checkpoint_policy, add_summary=add_summary),
        )
        return self._context.annotate(outputs, "BTM"), [metrics[name] for name in self._metric_names]

    def _split(self, tensors):
        return tensors[: len(self._names)], tensors[len(self._names) :]

    def _slices(self, i, theta=None) -> list[tf.Tensor]:
        return [self._annotate_slice(k, weight[i]) for k, weight in enumerate(theta or self._theta)]

    def _annotate_slice(self, k: int, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, self._logical_axes[k][1:])

    def _annotate_weight(self, k: int, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, self._logical_axes[k])

    def _packed(self, metrics: list[tf.Tensor]) -> tf.Tensor:
        return tf.stack(metrics) if metrics else tf.zeros(0)

    def _unpacked(self, totals: tf.Tensor) -> dict:
        return dict(zip(self._metric_names, tf.unstack(totals) if self._metric_names else []))


def _with_row(stacks: list[tf.Tensor], i: tf.Tensor, collector: SummaryCollector | None) -> list[tf.Tensor]:
    """The `[R]` stacks, one for each summary, with row i of each from the summaries of repeat i."""
    if not collector:
        return stacks
    return [
        tf.where(tf.equal(tf.range(stack.shape[0]), i), value, stack)
        for stack, value in zip(stacks, collector.values.values(), strict=True)
    ]


def _store(stack: tf.Tensor, i: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """`stack` with row i replaced, in place where the compiler can: `[R, ...]`, scalar, `[...]`."""
    return dynamic_update_slice(stack, value[None], [i] + [0] * (stack.shape.rank - 1))
