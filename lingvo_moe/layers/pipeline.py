"""Stacked layers as a pipeline of stages on different devices (GSPMD section 3.3).

A stage is the body that `layers.repeat` scans, vectorised over a leading dimension of stages, the logical axis P, which
a layout shards. What a microbatch needs moves through buffers with this dimension: its activations, and with them the
float constants, such as the encoder's outputs. An iteration of the loop computes all stages and passes the buffers on
by one stage, which is a CollectivePermute. The last stage passes a microbatch to the storage of the first one.

The backward pass is the same loop in reverse. Each repeat of each microbatch is recomputed from its saved input, as
in `repeat` (GSPMD section 5.2 follows GPipe in this). Gradients of weights are added up by `weight_gradients`.

Random numbers are functions of (seed, microbatch, repeat), and metrics are means over microbatches and repeats, so
results do not depend on the schedule or the number of stages. In a bubble a stage computes zeros or stale data; masks
keep its outputs from the activations, and its metrics and gradients from the sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.checkpoint_policy import SAVED_NAMES, Restore, Save, TensorSpec
from lingvo_moe.layers.pipeline_schedule import Iteration, Schedule
from lingvo_moe.layers.repeat import Body
from lingvo_moe.layers.stage_buffers import StageBuffers, select
from lingvo_moe.layers.summaries import SummaryCollector, add_summaries, collector_for, larger
from lingvo_moe.layers.weight_gradients import RowParts, WeightGradients
from lingvo_moe.lazy import tf
from lingvo_moe.ops.vectorize import vectorize


def pipeline(
    body: Body,
    weights: dict,
    theta: dict,
    inputs: tf.Tensor,
    constants: dict,
    constant_axes: dict,
    context: Context,
    schedule: Schedule,
    *,
    metric_names: Sequence[str] = (),
    remat: str = "full",
    independent_rows: bool = False,
) -> tuple[tf.Tensor, dict]:
    """Applies `body` R times to each microbatch; row b of a batch is in microbatch b modulo their number.

    Args:
      body: as in `repeat`. Its context is `context.fold(microbatch).fold(repeat)`, and of one microbatch, as there,
        `context.fold(repeat)`.
      weights: as in `repeat`.
      theta: as in `repeat`, tensors `[R, ...]`.
      inputs: `[B, T, M]`.
      constants: a tree of tensors, as in `repeat`, but each `[B, ...]`.
      constant_axes: the tree of their logical axes.
      context: of the call.
      schedule: for R repeats.
      metric_names: the names of the metrics that `body` returns.
      remat: a policy of `checkpoint_policy.SAVED_NAMES`.
      independent_rows: whether `body` computes each row of a batch by itself (`Layer.independent_rows`). If it has no
        metrics either, devices that divide the rows reduce their gradients of the weights once, after the loop.

    Returns:
      (`[B, T, M]`, metrics averaged over microbatches and repeats). Summaries of `body` are added to the context's as
      `[R]`: means over microbatches; of those called `max`, the largest.

    Raises:
      UserError: microbatches that do not divide B, or a body that cannot be vectorised.
      ValueError: another policy.
    """
    if remat not in SAVED_NAMES:
        raise ValueError(f"pipeline: remat is {remat!r}; microbatches are recomputed by one of {list(SAVED_NAMES)}.")
    if inputs.shape[0] % schedule.microbatches:
        raise UserError(
            f"model.microbatches is {schedule.microbatches}, which does not divide a batch of {inputs.shape[0]} rows; "
            f"use a divisor of it."
        )
    layout = context.layout.within_stages() if schedule.stages > 1 else context.layout
    inside = dataclasses.replace(context, layout=layout, microbatches=schedule.microbatches)
    buffers = StageBuffers(schedule, inside)
    rows = inputs.shape[0] // schedule.microbatches
    parts = RowParts.of(layout, rows, weights) if independent_rows and not metric_names else None
    stages = _Stages(body, weights, constants, constant_axes, buffers, metric_names, SAVED_NAMES[remat], parts)
    run = _Pipeline(stages, buffers, [buffers.divide(inputs, _ACTIVATIONS), *stages.carried], stages.stacked(theta))
    outputs, metrics, summaries = run()
    add_summaries(context, summaries)
    return context.annotate(buffers.join(outputs, _ACTIVATIONS), _ACTIVATIONS), metrics


_ACTIVATIONS = "BTM"


@dataclasses.dataclass(frozen=True)
class _Results:
    """What all stages compute in an iteration, each by stage: outputs, metrics, named tensors, summaries."""

    outputs: tf.Tensor
    metrics: tf.Tensor
    saved: list[tf.Tensor]
    summaries: list[tf.Tensor]


class _Stages:
    """The body for all stages at once, and its gradient, with lists of tensors instead of trees.

    Attributes:
      carried: the float constants by microbatch, which move with the activations.
      carried_axes: the logical axes of the activations and of `carried`.
      parts: of a microbatch, whose gradients of the weights are computed separately; None for those of all rows.
      saved_specs: of what the backward pass needs of a repeat, its inputs first; known after `probe`.
      summary_names: known after `probe`.
    """

    def __init__(
        self,
        body: Body,
        weights: dict,
        constants: dict,
        constant_axes: dict,
        buffers: StageBuffers,
        metric_names: Sequence[str],
        saved_names: tuple[str, ...],
        parts: RowParts | None,
    ):
        self._body, self._buffers, self._saved_names, self.parts = body, buffers, saved_names, parts
        self.metric_names = list(metric_names)
        declared, axes = tree.flatten(weights), tree.flatten(constant_axes)
        self._names, self.weight_axes = list(declared), [weight.logical_axes for weight in declared.values()]
        divided = {name: buffers.divide(value, axes[name]) for name, value in tree.flatten(constants).items()}
        # Masks need no gradient, and all devices have them: each stage looks up those of its microbatch.
        self._fixed = {name: value for name, value in divided.items() if not value.dtype.is_floating}
        self._fixed_axes = [axes[name] for name in self._fixed]
        self._carried_names = [name for name in divided if name not in self._fixed]
        self.carried = [divided[name] for name in self._carried_names]
        self.carried_axes = [_ACTIVATIONS, *(axes[name] for name in self._carried_names)]
        self.saved_specs: list[TensorSpec] = []
        self.summary_names: list[str] = []

    def stacked(self, theta: dict) -> list[tf.Tensor]:
        """The weights by stage, in the order of their declarations."""
        flat = tree.flatten(theta)
        return [self._buffers.by_stage(flat[name], axes) for name, axes in zip(self._names, self.weight_axes)]

    def probe(self, carried: Sequence[tf.Tensor], theta: Sequence[tf.Tensor]):
        """Traces the body once, as loops must know what it saves and summarises before their first iteration."""
        save, collector = Save(self._saved_names), collector_for(self._buffers.context)
        inputs, *constants = (tensor[0] for tensor in carried)
        fixed = [tensor[0] for tensor in self._fixed.values()]
        zero = tf.constant(0)

        def call(inputs: tf.Tensor) -> tf.Tensor:
            weights = [weight[0, 0] for weight in theta]
            return self._call(weights, inputs, constants, fixed, zero, zero, save, collector)[0]

        tf.function(call, autograph=False).get_concrete_function(tf.TensorSpec(inputs.shape, inputs.dtype))
        self.saved_specs = [TensorSpec(inputs.shape, inputs.dtype, _ACTIVATIONS), *save.specs]
        self.summary_names = list(collector.values) if collector else []

    def compute(
        self, iteration: Iteration, j: tf.Tensor, theta: list[tf.Tensor], inputs: tf.Tensor, constants: list[tf.Tensor]
    ) -> _Results:
        """Repeat j of an iteration at all stages, from inputs and constants by stage."""

        def one(*arguments) -> tuple:
            save, collector = Save(self._saved_names), collector_for(self._buffers.context)
            outputs, metrics = self._call(*arguments, checkpoint_policy=save, add_summary=collector)
            return outputs, metrics, save.tensors, list(collector.values.values()) if collector else []

        return _Results(*self._vectorized(one, self._arguments(iteration, j, theta, inputs, constants)))

    def gradients(
        self,
        iteration: Iteration,
        j: tf.Tensor,
        theta: list[tf.Tensor],
        inputs: tf.Tensor,
        constants: list[tf.Tensor],
        saved: list[tf.Tensor],
        upstream: tuple[tf.Tensor, tf.Tensor],
    ) -> list[tf.Tensor]:
        """The gradients, by stage, of inputs, constants and the weights of the repeat, which is recomputed.

        Those of weights are `[P, U, ...]` if rows are differentiated in parts.

        Args:
          iteration: of the loop.
          j: number of the repeat in the iteration.
          theta: the weights by stage.
          inputs: by stage.
          constants: by stage.
          saved: what `compute` saved.
          upstream: the gradients of its outputs, by stage, and of its metrics, the same at all stages.
        """
        of_outputs, of_metrics = upstream

        def of_rows(part, theta, rows, microbatch, repeat) -> list[tf.Tensor]:
            inputs, constants, fixed, saved, of_outputs = rows
            sources, policy = [inputs, *constants, *theta], Restore(self._saved_names, saved)
            with tf.GradientTape() as tape:
                tape.watch(sources)
                with tf.name_scope("rematerialised"):  # `analysis.plan` finds it by this name
                    results = self._call(theta, inputs, constants, fixed, microbatch, repeat, policy, part=part)
            return tape.gradient(
                list(results),
                sources,
                output_gradients=[of_outputs, of_metrics],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )

        def one(theta, inputs, constants, fixed, microbatch, repeat, saved, of_outputs) -> list[tf.Tensor]:
            rows = (inputs, constants, fixed, saved, of_outputs)
            if self.parts is None:
                return of_rows(None, theta, rows, microbatch, repeat)
            gradients = self.parts.map(lambda part, rows: of_rows(part, theta, rows, microbatch, repeat), (rows,))
            of_carried, of_theta = gradients[: 1 + len(constants)], gradients[1 + len(constants) :]
            return [*map(self.parts.join, of_carried), *of_theta]

        return self._vectorized(one, (*self._arguments(iteration, j, theta, inputs, constants), saved, of_outputs))

    def _call(
        self,
        theta: list[tf.Tensor],
        inputs: tf.Tensor,
        constants: list[tf.Tensor],
        fixed: list[tf.Tensor],
        microbatch: tf.Tensor,
        repeat: tf.Tensor,
        checkpoint_policy: Callable | None = None,
        add_summary: SummaryCollector | None = None,
        part: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """One stage: (outputs, metrics `[number of metrics]`), of the rows of one part if that is given."""
        context = self._buffers.context
        if self._buffers.schedule.stages > 1:
            context = dataclasses.replace(context, layout=context.layout.vectorized(self._buffers.stage_axis))
        if self._buffers.schedule.microbatches > 1:
            context = context.fold(microbatch)
        context = dataclasses.replace(
            context.fold(repeat), checkpoint_policy=checkpoint_policy, add_summary=add_summary
        )
        if self.parts is not None and part is not None:
            context = self.parts.context(context, part)
        named = dict(zip(self._carried_names, constants)) | dict(zip(self._fixed, fixed))
        weights = tree.unflatten(dict(zip(self._names, theta)))
        outputs, metrics = self._body(weights, inputs, tree.unflatten(named), context)
        values = [metrics[name] for name in self.metric_names]
        return context.annotate(outputs, _ACTIVATIONS), tf.stack(values) if values else tf.zeros(0)

    def _arguments(self, iteration, j, theta, inputs, constants) -> tuple:
        """The arguments of `_call` by stage."""
        weights = [
            self._buffers.stage_weight(weight, iteration, j, axes) for weight, axes in zip(theta, self.weight_axes)
        ]
        fixed = [
            self._buffers.look_up(tensor, iteration, axes)
            for tensor, axes in zip(self._fixed.values(), self._fixed_axes)
        ]
        return weights, inputs, constants, fixed, iteration.stages.microbatch, iteration.repeat(j)

    def _vectorized(self, function: Callable, arguments: tuple):
        if self._buffers.schedule.stages > 1:
            return vectorize(function, arguments)
        results = function(*tf.nest.map_structure(lambda tensor: tensor[0], arguments))
        return tf.nest.map_structure(lambda tensor: tensor[None], results)


class _Pipeline:
    """The loops of one call of `pipeline`."""

    def __init__(self, stages: _Stages, buffers: StageBuffers, carried: list[tf.Tensor], theta: list[tf.Tensor]):
        """Takes the activations and constants by microbatch, and the weights by stage."""
        self._stages, self._buffers, self._schedule = stages, buffers, buffers.schedule
        self._carried, self._theta, self._axes = carried, theta, stages.carried_axes
        stages.probe(carried, theta)
        self._weight_gradients = WeightGradients(buffers, stages.weight_axes, stages.parts)
        self._constant_specs = [
            TensorSpec(tensor.shape[1:], tensor.dtype, axes) for tensor, axes in zip(carried[1:], self._axes[1:])
        ]

    def __call__(self) -> tuple[tf.Tensor, dict, dict]:
        """Returns (outputs by microbatch, metrics, summaries `[R]`)."""

        @tf.custom_gradient
        def run(*tensors):
            carried, theta = list(tensors[: len(self._carried)]), list(tensors[len(self._carried) :])
            saved, outputs, totals, summaries = self._forward(carried, theta)

            def gradient(outputs_gradient, totals_gradient, *_):
                return self._backward(saved, theta, carried, (outputs_gradient, totals_gradient))

            return (outputs, totals, *summaries), gradient

        outputs, totals, *summaries = run(*self._carried, *self._theta)
        means = totals / (self._schedule.repeats * self._schedule.microbatches)
        metrics = dict(zip(self._stages.metric_names, tf.unstack(means) if self._stages.metric_names else []))
        by_repeat = [self._buffers.by_repeat(stacked) for stacked in summaries]
        return outputs, metrics, dict(zip(self._stages.summary_names, by_repeat))

    def _forward(self, carried: list[tf.Tensor], theta: list[tf.Tensor]) -> tuple[tuple, tf.Tensor, tf.Tensor, list]:
        """Runs all iterations.

        Returns:
          (what the backward pass needs: of each iteration the constants, of each repeat in it its inputs and the named
          tensors; outputs by microbatch; sums of metrics; summaries by stage and repeat).
        """
        buffers, schedule = self._buffers, self._schedule
        storage, *constants = (buffers.store(tensor, axes) for tensor, axes in zip(carried, self._axes))

        def step(t, states, storage, totals, summaries, by_iteration, by_repeat):
            iteration = schedule.at(t)
            states = [buffers.enter(s, iteration, state) for s, state in zip([storage, *constants], states)]
            by_iteration = buffers.save(by_iteration, t, states[1:], self._constant_specs)
            outputs, totals, summaries, by_repeat = self._forward_iteration(
                t, theta, states, totals, summaries, by_repeat
            )
            states = [
                buffers.pass_on(state, axes) for state, axes in zip([outputs, *states[1:]], self._axes, strict=True)
            ]
            storage = buffers.put(storage, iteration.last.microbatch, iteration.ends, states[0])
            return t + 1, states, storage, totals, summaries, by_iteration, by_repeat

        start = (
            tf.constant(0),
            [buffers.empty(s, axes) for s, axes in zip([storage, *constants], self._axes)],
            storage,
            tf.zeros((schedule.stages, len(self._stages.metric_names))),
            [tf.zeros((schedule.stages, schedule.repeats_per_stage)) for _ in self._stages.summary_names],
            buffers.stacks(schedule.iterations, self._constant_specs),
            buffers.stacks(schedule.iterations * schedule.repeats_per_iteration, self._stages.saved_specs),
        )
        _, _, storage, totals, summaries, by_iteration, by_repeat = _loop(
            schedule.iterations, self._scoped(step), start
        )
        return (by_iteration, by_repeat), buffers.fetch(storage, _ACTIVATIONS), tf.reduce_sum(totals, axis=0), summaries

    def _forward_iteration(self, t, theta, states, totals, summaries, saved) -> tuple:
        """Runs the repeats of iteration t; returns (outputs, totals, summaries, saved)."""
        iteration, buffers = self._schedule.at(t), self._buffers

        def step(j, inputs, totals, summaries, saved):
            results = self._stages.compute(iteration, j, theta, inputs, states[1:])
            saved = buffers.save(saved, self._index(t, j), [inputs, *results.saved], self._stages.saved_specs)
            active = iteration.active(j)
            totals = totals + select(active, results.metrics, 0)
            summaries = self._with_summaries(summaries, iteration, j, results.summaries)
            outputs = buffers.annotate(select(active, results.outputs, inputs), _ACTIVATIONS)
            return j + 1, outputs, totals, summaries, saved

        start = (tf.constant(0), states[0], totals, summaries, saved)
        return _loop(self._schedule.repeats_per_iteration, step, start)[1:]

    def _backward(
        self, saved: tuple, theta: list[tf.Tensor], carried: list[tf.Tensor], upstream: tuple[tf.Tensor, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients of `carried` and of the weights by stage."""
        buffers, schedule = self._buffers, self._schedule
        # As in `repeat`: every repeat adds to the gradient of a constant, which may be bfloat16.
        of_stored = [upstream[0], *(tf.zeros(constant.shape, tf.float32) for constant in carried[1:])]
        storages = [buffers.store(tensor, axes) for tensor, axes in zip(of_stored, self._axes)]

        def step(t, of_states, storages, of_theta):
            iteration = schedule.at(t)
            ended = select(iteration.ends, storages[0][:, iteration.last.microbatch], 0)
            storages = [
                buffers.put(storages[0], iteration.last.microbatch, iteration.ends, tf.zeros_like(ended)),
                *storages[1:],
            ]
            of_states = [
                buffers.pass_back(state, axes)
                for state, axes in zip([of_states[0] + ended, *of_states[1:]], self._axes, strict=True)
            ]
            of_states, of_theta = self._backward_iteration(t, theta, saved, (of_states, upstream[1]), of_theta)
            storages = [
                buffers.put(
                    storage,
                    iteration.first.microbatch,
                    iteration.starts,
                    storage[:, iteration.first.microbatch] + state,
                )
                for storage, state in zip(storages, of_states)
            ]
            return t - 1, [select(~iteration.starts, state, 0) for state in of_states], storages, of_theta

        start = (
            tf.constant(schedule.iterations - 1),
            [buffers.empty(storage, axes) for storage, axes in zip(storages, self._axes)],
            storages,
            self._weight_gradients.zeros(theta),
        )
        _, _, storages, of_theta = _loop(schedule.iterations, self._scoped(step), start, backwards=True)
        of_carried = [
            tf.cast(buffers.fetch(storage, axes), tensor.dtype)
            for storage, tensor, axes in zip(storages, carried, self._axes, strict=True)
        ]
        return [*of_carried, *self._weight_gradients.reduced(of_theta)]

    def _backward_iteration(self, t, theta, saved: tuple, upstream: tuple, of_theta: list[tf.Tensor]) -> tuple:
        """Runs the repeats of iteration t in reverse; returns the gradients of the states before it and of weights."""
        iteration, buffers, stages = self._schedule.at(t), self._buffers, self._stages
        (by_iteration, by_repeat), (of_states, of_metrics) = saved, upstream
        constants = buffers.restore(by_iteration, t, self._constant_specs)

        def step(j, of_states, of_theta):
            inputs, *named = buffers.restore(by_repeat, self._index(t, j), stages.saved_specs)
            gradients = stages.gradients(iteration, j, theta, inputs, constants, named, (of_states[0], of_metrics))
            active, count = iteration.active(j), len(of_states)
            before = [
                select(active, gradients[0], of_states[0]),
                *(
                    old + select(active, tf.cast(new, old.dtype), 0)
                    for old, new in zip(of_states[1:], gradients[1:count])
                ),
            ]
            of_theta = self._weight_gradients.add(of_theta, iteration, j, gradients[count:])
            return j - 1, [buffers.annotate(state, axes) for state, axes in zip(before, self._axes)], of_theta

        last = self._schedule.repeats_per_iteration - 1
        return _loop(last + 1, step, (tf.constant(last), of_states, of_theta), backwards=True)[1:]

    def _scoped(self, step: Callable) -> Callable:
        """The step of an iteration in a name scope, by which `analysis.plan` counts the cycles of bubbles."""

        def scoped(*variables):
            with tf.name_scope(self._schedule.scope):
                return step(*variables)

        return scoped

    def _index(self, t: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        """The number of a repeat among those of all iterations."""
        return t * self._schedule.repeats_per_iteration + j

    def _with_summaries(
        self, stacks: list[tf.Tensor], iteration: Iteration, j: tf.Tensor, values: list[tf.Tensor]
    ) -> list:
        """Adds the summaries of repeat j, each `[P]`, to those by stage and repeat."""
        is_computed = (
            tf.equal(iteration.index_in_stage(j)[:, None], tf.range(self._schedule.repeats_per_stage))
            & iteration.active(j)[:, None]
        )
        combined = []
        for name, stack, value in zip(self._stages.summary_names, stacks, values, strict=True):
            if name.endswith("/max"):
                combined.append(tf.where(is_computed, larger(stack, value[:, None]), stack))
            else:
                combined.append(stack + tf.where(is_computed, value[:, None] / self._schedule.microbatches, 0.0))
        return combined


def _loop(times: int, step: Callable, start: tuple, backwards: bool = False) -> tuple:
    """Runs `step` `times` times; the first loop variable counts, up from 0 or down to 0."""
    if times == 1:
        return tuple(step(*start))
    condition = (lambda i, *_: i >= 0) if backwards else (lambda i, *_: i < times)
    return tf.while_loop(condition, step, start, maximum_iterations=times)
