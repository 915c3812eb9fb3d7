"""The buffers of a pipeline: what is divided into microbatches, and what is stacked by stage.

A tensor stacked by stage has the stages as its leading dimension, the logical axis P.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.checkpoint_policy import TensorSpec
from lingvo_moe.layers.pipeline_schedule import Iteration, Schedule
from lingvo_moe.lazy import tf
from lingvo_moe.ops.slices import dynamic_update_slice
from lingvo_moe.sharding import leading_dimension

# Dimensions that are never sharded: iterations of a loop, microbatches in a storage, a stage's repeats of a weight.
_ITERATIONS, _MICROBATCHES, _REPEATS = "v", "s", "r"


@dataclasses.dataclass(frozen=True)
class StageBuffers:
    """Makes, reads and writes the buffers of a schedule, each annotated with its sharding."""

    schedule: Schedule
    context: Context

    @property
    def stage_axis(self) -> str:
        """The logical axis of stages; of a single stage, one that is not sharded."""
        return "P" if self.schedule.stages > 1 else "p"

    def annotate(self, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Annotates a tensor stacked by stage; `logical_axes` are those of one stage."""
        return self.context.annotate(tensor, self.stage_axis + logical_axes)

    def divide(self, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """A batch `[B, ...]` to microbatches `[m, B / m, ...]`.

        Row b is in microbatch b modulo m, so that each device has as many rows of every microbatch, and none moves.
        """
        rows = tf.reshape(tensor, (-1, self.schedule.microbatches, *tensor.shape[1:]))
        return self.context.annotate(_swap(rows), _MICROBATCHES + logical_axes)

    def join(self, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Inverts `divide`."""
        return self.context.annotate(tf.reshape(_swap(tensor), (-1, *tensor.shape[2:])), logical_axes)

    def store(self, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Microbatches `[m, ...]` to the storage of the first stage, `[P, m, ...]`; zeros at the others."""
        return self.annotate(select(self._is_first, tensor[None], 0), _MICROBATCHES + logical_axes)

    def fetch(self, storage: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Inverts `store`: the sum over stages of one value and zeros, an AllReduce where stages are sharded."""
        return self.context.annotate(
            tf.reduce_sum(select(self._is_first, storage, 0), axis=0), _MICROBATCHES + logical_axes
        )

    def empty(self, storage: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Zeros for one microbatch of a storage at each stage, `[P, B / m, ...]`."""
        return self.annotate(tf.zeros((self.schedule.stages, *storage.shape[2:]), storage.dtype), logical_axes)

    def enter(self, storage: tf.Tensor, iteration: Iteration, state: tf.Tensor) -> tf.Tensor:
        """`state [P, B / m, ...]`, at the first stage replaced by the microbatch of the storage that starts there."""
        return select(iteration.starts, storage[:, iteration.first.microbatch], state)

    def put(self, storage: tf.Tensor, microbatch: tf.Tensor, mask: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        """The storage with a microbatch replaced by `state [P, B / m, ...]` at stages where `mask [P]` is true."""
        new = select(mask, state, storage[:, microbatch])
        return dynamic_update_slice(storage, new[:, None], [0, microbatch] + [0] * (storage.shape.rank - 2))

    def pass_on(self, state: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Passes the state of each stage on to the next one; of the last stage, to the first one."""
        return self.annotate(leading_dimension.pass_on(state), logical_axes)

    def pass_back(self, state: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Inverts `pass_on`."""
        return self.annotate(leading_dimension.pass_back(state), logical_axes)

    def look_up(self, tensor: tf.Tensor, iteration: Iteration, logical_axes: str) -> tf.Tensor:
        """Returns the microbatch of each stage, `[P, ...]`, from microbatches `[m, ...]` that all devices have."""
        return self.annotate(tf.gather(tensor, iteration.stages.microbatch), logical_axes)

    # Weights: `[R, ...]` as they are stored, and `[P, repeats, ...]` by stage.

    def by_stage(self, weight: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Stacks a weight `[R, ...]`, with these logical axes, by stage; padded with zeros."""
        schedule, shape = self.schedule, weight.shape[1:]
        missing = schedule.stages * schedule.repeats_per_stage - schedule.repeats
        padded = tf.pad(weight, [[0, missing], *([[0, 0]] * len(shape))]) if missing else weight
        parts = tf.reshape(padded, (schedule.rounds, schedule.stages, schedule.repeats_per_iteration, *shape))
        return self.annotate(
            tf.reshape(_swap(parts), (schedule.stages, schedule.repeats_per_stage, *shape)),
            self.stage_weight_axes(logical_axes),
        )

    def by_repeat(self, stacked: tf.Tensor) -> tf.Tensor:
        """Inverts `by_stage`, without an annotation."""
        schedule, shape = self.schedule, stacked.shape[2:]
        parts = tf.reshape(stacked, (schedule.stages, schedule.rounds, schedule.repeats_per_iteration, *shape))
        return tf.reshape(_swap(parts), (-1, *shape))[: schedule.repeats]

    def stage_weight_axes(self, logical_axes: str) -> str:
        """The logical axes of one stage of a weight that is stored with these."""
        return _REPEATS + logical_axes[1:]

    def stage_weight(self, stacked: tf.Tensor, iteration: Iteration, j: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """The weight of each stage for repeat j of an iteration: `[P, repeats, ...]` to `[P, ...]`."""
        arguments = [(stacked, self.stage_weight_axes(logical_axes)), (iteration.index_in_stage(j), "")]
        return self._by_each_stage(_take_at, arguments, logical_axes[1:])

    def add_to_stage_weight(
        self, stacked: tf.Tensor, iteration: Iteration, j: tf.Tensor, part: tf.Tensor, logical_axes: str
    ) -> tf.Tensor:
        """Adds `part [P, ...]` to the weight of each stage, see `stage_weight`."""
        part, axes = self.annotate(part, logical_axes[1:]), self.stage_weight_axes(logical_axes)
        arguments = [(stacked, axes), (iteration.index_in_stage(j), ""), (part, logical_axes[1:])]
        return self._by_each_stage(_add_at, arguments, axes)

    def _by_each_stage(
        self, function: Callable[..., tf.Tensor], arguments: Sequence[tuple[tf.Tensor, str]], logical_axes: str
    ) -> tf.Tensor:
        """Applies `function` to tensors stacked by stage, each with the logical axes of one stage."""
        layout, stages = self.context.layout, self.stage_axis
        if layout.num_shards(stages, stages) == 1:
            return self.annotate(function(*(tensor for tensor, _ in arguments)), logical_axes)
        by_stage = [(tensor, stages + axes) for tensor, axes in arguments]
        return leading_dimension.map_shards(function, by_stage, stages + logical_axes, layout)

    # What the backward pass needs, stacked by iteration.

    def stacks(self, iterations: int, specs: Sequence[TensorSpec]) -> list[tf.Tensor]:
        """Zeros `[iterations, P, ...]` for tensors with these specs of one stage."""
        return [
            self._annotate_stack(tf.zeros((iterations, self.schedule.stages, *spec.shape), spec.dtype), spec)
            for spec in specs
        ]

    def save(
        self, stacks: Sequence[tf.Tensor], index: tf.Tensor, tensors: Sequence[tf.Tensor], specs: Sequence[TensorSpec]
    ) -> list[tf.Tensor]:
        """The stacks with entry `index` replaced by `tensors`, each `[P, ...]`."""
        return [
            self._annotate_stack(
                dynamic_update_slice(stack, tensor[None], [index] + [0] * (stack.shape.rank - 1)), spec
            )
            for stack, tensor, spec in zip(stacks, tensors, specs, strict=True)
        ]

    def restore(self, stacks: Sequence[tf.Tensor], index: tf.Tensor, specs: Sequence[TensorSpec]) -> list[tf.Tensor]:
        """Entry `index` of the stacks."""
        return [self.annotate(stack[index], spec.logical_axes) for stack, spec in zip(stacks, specs, strict=True)]

    def _annotate_stack(self, stack: tf.Tensor, spec: TensorSpec) -> tf.Tensor:
        return self.context.annotate(stack, _ITERATIONS + self.stage_axis + spec.logical_axes)

    @property
    def _is_first(self) -> tf.Tensor:
        return tf.equal(tf.range(self.schedule.stages), 0)


def select(mask: tf.Tensor, chosen: tf.Tensor, other: tf.Tensor | float) -> tf.Tensor:
    """Returns `chosen` for the stages where `mask [P]` is true, `other` for the rest."""
    return tf.where(tf.reshape(mask, [-1] + [1] * (chosen.shape.rank - 1)), chosen, tf.cast(other, chosen.dtype))


def _swap(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor with its first two dimensions swapped."""
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])


def _take_at(stacked: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Returns repeat `indices [P]` of each stage, `[P, ...]`, from `stacked [P, repeats, ...]`."""
    return tf.gather(stacked, indices, axis=1, batch_dims=1)


def _add_at(stacked: tf.Tensor, indices: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    """`stacked [P, repeats, ...]` with `part [P, ...]` added to repeat `indices [P]` of each stage."""
    return tf.tensor_scatter_nd_add(stacked, tf.stack([tf.range(indices.shape[0]), indices], axis=1), part)
