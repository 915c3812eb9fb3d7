"""The analytical cost model: time and memory of a training step in any layout, from its hyperparameters alone.

A prediction takes less than a millisecond.

The terms, and where they come from:

  products      FLOPs in whole tiles at PRODUCT_EFFICIENCY of the peak, or the operands at the memory's bandwidth; exact
                ones of float32 take a TPU's matrix unit six passes, and run outside of a GPU's
  other work    elements of softmaxes, norms, one-hot masks: bytes at the memory's bandwidth, see WORK_BYTES
  collectives   those of `sharded_product`, at the links' full bandwidth (`hardware`), one after another, as in `plan`
  optimizer     passes over the weights of a device, OPTIMIZER_PASSES
  bubbles       iterations of a pipeline without a microbatch: their products, other work and collectives
  memory        weights, optimizer state and gradients exactly; saved tensors by the checkpoint policy; a workspace

The constants are fitted to the compiled plans of docs/plans, TPU v3 (`python -m
tools.partitioning.rank_layouts --calibration` prints the comparison). For other devices they are an extrapolation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from lingvo_moe import tree
from lingvo_moe.analysis import model_parts
from lingvo_moe.analysis.hardware import GENERATIONS, links_of
from lingvo_moe.analysis.layout_space import Candidate
from lingvo_moe.analysis.model_parts import GATE, ITEM_BYTES, Part, Saved, Step, Work
from lingvo_moe.analysis.roofline import EXACT_PASSES
from lingvo_moe.analysis.sharded_product import Division, Machine, Move, Partitioner
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.checkpoint_policy import SAVED_NAMES
from lingvo_moe.layers.pipeline_schedule import Schedule
from lingvo_moe.ops.precision import HIGHEST
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout

PRODUCT_EFFICIENCY = 0.95
# Bytes that are read or written for an element, forward and backward, at the memory's bandwidth.
WORK_BYTES = {
    "attention": 30.0,  # logits: mask and softmax, and their gradients
    "attention recomputed": 14.0,
    "attention dropout": 30.0,  # a random number is some ten operations on 32 bits
    "residual": 40.0,  # norm and addition
    "residual dropout": 100.0,
    "activation": 4.0,
    "gating": 110.0,  # the softmax, and the ranks of all tokens in float32
    "one_hot": 8.0,
    "softmax": 20.0,
}
OPTIMIZER_PASSES = 10.0  # over float32 weights, gradients and updates
STACKED_PASSES = 4.0  # weights that a loop slices and rounds, and gradients that it stacks or adds up, each microbatch
SAVED_PASSES = 4.0  # tensors that a loop stacks and reads again
WORKSPACE_LOGITS = 2.0  # float32 copies of a layer's logits
WORKSPACE_WEIGHTS = 2.0  # float32 copies of the largest stacked weight, in its update
_USABLE = 15.48 / 16  # what the compiler gives to a program on TPU v3


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The prediction for a candidate.

    Attributes:
      compute: seconds by part of the model, bubbles included.
      collectives: seconds by kind, what is moved (`weights` or `activations`) and mesh axis.
      bubbles: the seconds of both that iterations without a microbatch take.
      memory: bytes of a device by kind.
      available: bytes of a device.
      tokens: of a step, as in a plan.
    """

    compute: dict[str, float]
    collectives: dict[tuple[str, str, str], float]
    bubbles: float
    memory: dict[str, float]
    available: float
    tokens: int

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.compute.values()) + sum(self.collectives.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, counted as a plan counts them."""
        return self.tokens / self.seconds

    @property
    def bytes(self) -> float:
        """The memory of a device, of all kinds together."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.bytes <= self.available

    def reason(self, count: int = 3) -> str:
        """The largest shares of the step time: `feed_forward 41%, all-gather of weights along x 10%; bubbles 8%`."""
        terms = dict(self.compute)
        terms |= {f"{kind} of {what} along {axis}": value for (kind, what, axis), value in self.collectives.items()}
        largest = sorted(terms.items(), key=lambda term: -term[1])[:count]
        bubbles = f"; bubbles {self.bubbles / self.seconds:.0%}" if self.bubbles else ""
        return ", ".join(f"{name} {value / self.seconds:.0%}" for name, value in largest) + bubbles


@dataclasses.dataclass(frozen=True)
class _PartCost:
    """One run of a part, forward and backward: seconds, collectives, bytes that are saved, the largest temporary."""

    seconds: float
    moves: tuple[Move, ...]
    saved_bytes: float
    temporary_bytes: float


class _Sizes(NamedTuple):
    """Bytes of a device; `stacked` are the weights of stacks, `largest` is one weight."""

    weights: float
    stacked: float
    optimizer_state: float
    gradients: float
    largest: float


class _Divided(NamedTuple):
    """How devices divide a step of a part: forward, and both products of the backward pass together."""

    forward: Division
    backward: Division


class CostModel:
    """Predicts candidates of one experiment on one slice or cluster.

    Raises:
      UserError: a model whose parts are not known, see `model_parts.model_of`.
    """

    def __init__(self, experiment: Experiment, target: Slice | Cluster):
        if isinstance(target, Cluster):
            experiment = dataclasses.replace(experiment, platform="gpu")
        self._experiment, self._model = experiment, model_parts.model_of(experiment)
        declared = self._model.weights()
        self._weights = tuple(tree.flatten(declared).values())
        self._states = tuple(tree.flatten(experiment.optimizer.state(declared)).values())
        self._is_exact = experiment.matmul_precision == HIGHEST and self._model.activation_dtype == "float32"
        if isinstance(target, Slice):
            hardware = GENERATIONS[target.generation]
            self._available = hardware.memory * _USABLE
            peak = self._exact_flops = hardware.peak_flops
            self._exact_passes = EXACT_PASSES
        else:
            hardware = target.gpu
            self._available = float(hardware.available)
            peak = hardware.peak_flops if self._model.activation_dtype == "bfloat16" else hardware.tf32_flops
            self._exact_flops, self._exact_passes = hardware.float32_flops, 1
        self._links, self._memory_bandwidth = links_of(target), hardware.memory_bandwidth
        self._part_costs: dict[tuple, _PartCost] = {}
        self._numbers: dict[Part, int] = {}
        self._divided: dict[tuple, list[_Divided]] = {}
        self._tables = functools.cache(self._mapping)
        self._sizes = functools.cache(self._bytes_of)
        self._parts = functools.cache(self._numbered_parts)
        self._machines = functools.cache(
            lambda mesh, flops=peak: Machine(mesh, self._links, flops * PRODUCT_EFFICIENCY, self._memory_bandwidth)
        )

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether there is memory for the weights and their update, without which nothing else matters."""
        sizes = self._sizes(candidate.layout, candidate.accumulates)
        return sizes.weights + sizes.optimizer_state + sizes.gradients <= self._available

    def estimate(self, candidate: Candidate) -> Estimate:
        """Predicts a legal candidate."""
        schedules = self._schedules(candidate)
        compute: dict[str, float] = defaultdict(float)
        collectives: dict[tuple[str, str, str], float] = defaultdict(float)
        bubbles, saved, temporary = 0.0, 0.0, 0.0
        for number, part in self._parts(candidate.batch_size, candidate.microbatches):
            schedule = schedules[part.stack] if part.stack else None
            times = part.count * (schedule.iterations * schedule.repeats_per_iteration if schedule else 1)
            cost = self._part_cost(number, part, candidate, is_inside=schedule is not None)
            compute[part.name] += times * cost.seconds
            wasted = times * schedule.bubble_share if schedule else 0.0
            bubbles += wasted * cost.seconds
            for move in cost.moves:
                what = "weights" if move.is_weight else "activations"
                runs: float = times
                if schedule and self._is_deferred(move, part.stack, candidate):  # sums of microbatches, in float32
                    runs = part.count * schedule.repeats_per_stage * 4 / ITEM_BYTES[self._model.activation_dtype]
                else:
                    bubbles += wasted * move.seconds
                collectives[move.kind, what, candidate.mesh.axis_names[move.axis]] += runs * move.seconds
            saved += times * cost.saved_bytes
            temporary = max(temporary, cost.temporary_bytes)
        compute["saved tensors"] = SAVED_PASSES * saved / self._memory_bandwidth
        for name, seconds in self._of_weights(candidate, schedules):
            compute[name] += seconds
        for schedule, key, seconds in self._of_stages(candidate, schedules):
            collectives[key] += seconds
            bubbles += schedule.bubble_share * seconds if schedule else 0.0
        memory = self._memory(candidate, saved, temporary)
        tokens = candidate.batch_size * next(iter(self._experiment.input.lengths.values()))
        return Estimate(dict(compute), dict(collectives), bubbles, memory, self._available, tokens)

    def _numbered_parts(self, batch_size: int, microbatches: int) -> tuple[tuple[int, Part], ...]:
        """The parts, each with a number: those of an encoder and a decoder that are alike have one, and one cost."""
        parts = model_parts.parts_of(self._experiment, batch_size, microbatches)
        alike = [dataclasses.replace(part, stack="", count=1) for part in parts]
        return tuple((self._numbers.setdefault(one, len(self._numbers)), part) for one, part in zip(alike, parts))

    def _schedules(self, candidate: Candidate) -> dict[str, Schedule]:
        """The schedule of each stack."""
        return {
            stack: Schedule.of(candidate.pipeline, candidate.stages, candidate.microbatches, repeats)
            for stack, repeats in self._model.repeats.items()
        }

    def _part_cost(self, number: int, part: Part, candidate: Candidate, is_inside: bool) -> _PartCost:
        """The cost of one run, from the cache if a candidate with the same sharding of this part has been there."""
        remat = candidate.remat if is_inside else "none"
        table = self._table(candidate.layout, is_inside and candidate.stages > 1)
        shardings = tuple(table[axes] for axes in part.axes)
        key = (number, shardings, candidate.mesh.shape)
        if (*key, remat) not in self._part_costs:
            partitioner = Partitioner(
                dict(zip(part.axes, shardings)), dict(part.sizes), self._machines(candidate.mesh.shape)
            )
            if key not in self._divided:
                self._divided[key] = [self._divide(step, partitioner) for step in part.steps]
            self._part_costs[*key, remat] = self._cost_of(part, self._divided[key], partitioner, remat)
        return self._part_costs[*key, remat]

    def _cost_of(self, part: Part, steps: list[_Divided], partitioner: Partitioner, remat: str) -> _PartCost:
        names = SAVED_NAMES.get(remat)  # None: everything is saved
        forward: dict[tuple, Move] = {}
        backward: dict[tuple, Move] = {}
        seconds = 0.0
        for step, divided in zip(part.steps, steps):
            seconds += divided.forward.seconds + divided.backward.seconds
            forward |= {move.key: move for move in divided.forward.moves}
            if names is not None and step.saved not in (*names, "end"):
                seconds += divided.forward.seconds
                backward |= {move.key: move for move in divided.forward.moves}
        for divided in steps:
            backward |= {move.key: move for move in divided.backward.moves}
        seconds += sum(self._work_seconds(work, partitioner, names is not None) for work in part.work)
        saved = sum(self._saved_bytes(saved, names, partitioner) for saved in part.saved)
        logits = [4 * partitioner.elements(work.axes) for work in part.work if work.kind == "attention"]
        moves = (*forward.values(), *backward.values())
        return _PartCost(seconds, moves, saved, WORKSPACE_LOGITS * max(logits, default=0.0))

    def _divide(self, step: Step, partitioner: Partitioner) -> _Divided:
        if step.product is None:
            moves = self._resharding(step, partitioner)
            # The gradient takes the way back: the same bytes between the same devices.
            back = tuple(move._replace(key=("d", *move.key)) for move in moves)
            return _Divided(Division(0.0, moves), Division(0.0, back))
        passes = 1
        if step.is_exact or self._is_exact:
            passes, machine = self._exact_passes, self._machines(partitioner.machine.mesh, self._exact_flops)
            partitioner = dataclasses.replace(partitioner, machine=machine)
        forward = partitioner.divide(step.product)
        backward = [partitioner.divide(product) for product in step.product.backward()]
        return _Divided(
            Division(passes * forward.seconds, forward.moves),
            Division(
                passes * sum(division.seconds for division in backward),
                tuple(move for division in backward for move in division.moves),
            ),
        )

    @staticmethod
    def _resharding(step: Step, partitioner: Partitioner) -> tuple[Move, ...]:
        assert step.resharded is not None
        return partitioner.reshard(step.resharded, step.before, step.item_bytes)

    def _work_seconds(self, work: Work, partitioner: Partitioner, is_recomputed: bool) -> float:
        size = WORK_BYTES[work.kind]
        size += WORK_BYTES.get(f"{work.kind} recomputed", 0.0) if is_recomputed else 0.0
        size += WORK_BYTES.get(f"{work.kind} dropout", 0.0) if work.has_dropout else 0.0
        return partitioner.elements(work.axes) * size / self._memory_bandwidth

    @staticmethod
    def _saved_bytes(saved: Saved, names: tuple[str, ...] | None, partitioner: Partitioner) -> float:
        if names is not None and saved.name not in (*names, "input"):
            return 0.0
        return partitioner.elements(saved.axes) * saved.item_bytes * saved.copies

    def _of_weights(self, candidate: Candidate, schedules: dict[str, Schedule]) -> Iterator[tuple[str, float]]:
        """The optimizer, and the gradients that loops collect."""
        sizes = self._sizes(candidate.layout, candidate.accumulates)
        yield "optimizer", OPTIMIZER_PASSES * sizes.weights / self._memory_bandwidth
        iterations = 1.0
        if candidate.accumulates:
            iterations = max(schedule.iterations / schedule.rounds for schedule in schedules.values())
        yield "gradients", STACKED_PASSES * iterations * sizes.stacked / self._memory_bandwidth

    def _is_deferred(self, move: Move, stack: str, candidate: Candidate) -> bool:
        """Whether a gradient is reduced once, after the loop of microbatches; see `layers.weight_gradients`."""
        if not (candidate.accumulates and move.is_weight and move.kind == "all-reduce"):
            return False
        table = self._table(candidate.layout, candidate.stages > 1)
        return (
            move.axis == table["BTM"][0]
            and all(layer.independent_rows for layer in self._model.feed_forwards(stack))
            and all(move.axis not in table[weight.logical_axes] for weight in self._weights if weight.is_repeated)
        )

    def _of_stages(
        self, candidate: Candidate, schedules: dict[str, Schedule]
    ) -> Iterator[tuple[Schedule | None, tuple[str, str, str], float]]:
        """What a pipeline sends from stage to stage in each iteration of a schedule, and, once, to all stages."""
        if candidate.stages == 1:
            return
        axis, table = 0, self._table(candidate.layout, True)
        machine, name = self._machines(candidate.mesh.shape), candidate.mesh.axis_names[0]
        model, item_bytes = self._model, ITEM_BYTES[self._model.activation_dtype]
        for stack, schedule in schedules.items():
            length = self._experiment.input.lengths["source" if stack == "encoder" else "target"]
            shards = math.prod(candidate.mesh.shape[axis] for axis in table["BTM"] if axis >= 0)
            rows = candidate.batch_size / candidate.microbatches
            size = rows * length * model.model_dim * item_bytes / shards
            seconds = 2 * schedule.iterations * machine.collective_seconds("collective-permute", size, axis)
            yield schedule, ("collective-permute", "activations", name), seconds
            whole = candidate.microbatches * size
            yield None, ("all-reduce", "activations", name), 2 * machine.collective_seconds("all-reduce", whole, axis)
            if table["BTV"][2] >= 0:
                # XLA embeds, and computes logits, in another order of the devices, in both passes: two permutes of the
                # whole batch in float32, two in the type of activations. It also gathers whole rows from all stages.
                both = 2 * whole * (1 + 4 / item_bytes)
                yield (
                    None,
                    ("collective-permute", "activations", name),
                    machine.collective_seconds("collective-permute", both, axis),
                )
                rows = whole * (candidate.mesh.shape[table["BTM"][2]] if table["BTM"][2] >= 0 else 1)
                yield None, ("all-gather", "activations", name), machine.collective_seconds("all-gather", rows, axis)

    def _memory(self, candidate: Candidate, saved: float, temporary: float) -> dict[str, float]:
        sizes = self._sizes(candidate.layout, candidate.accumulates)
        return {
            "weights": sizes.weights,
            "optimizer state": sizes.optimizer_state,
            "gradients": sizes.gradients,
            "saved": saved,
            "workspace": temporary + WORKSPACE_WEIGHTS * sizes.largest,
        }

    def _bytes_of(self, layout: Layout, accumulates: bool) -> _Sizes:
        table, narrow = self._table(layout, False), ITEM_BYTES[self._model.activation_dtype]
        weights = stacked = gradients = largest = 0.0
        for weight in self._weights:
            size = 4 * weight.size / _shards(layout, table[weight.logical_axes])
            is_narrow = weight.is_repeated and not weight.keep_float32 and not accumulates
            weights += size
            stacked += size * weight.is_repeated
            gradients += size * (narrow / 4 if is_narrow else 1)
            largest = max(largest, size)
        states = sum(4 * state.size / _shards(layout, table[state.logical_axes]) for state in self._states)
        return _Sizes(weights, stacked, states, gradients, largest)

    def _table(self, layout: Layout, within_stages: bool) -> dict[str, tuple[int, ...]]:
        """The sharding of every tensor of the parts and of every weight, which the sizes of the mesh do not change."""
        return self._tables(layout.rules, layout.mesh.axis_names, within_stages)

    def _mapping(
        self, rules: tuple[AxisRule, ...], names: tuple[str, ...], within_stages: bool
    ) -> dict[str, tuple[int, ...]]:
        layout = Layout(DeviceMesh((1,) * len(names), names), rules)
        layout = layout.within_stages() if within_stages else layout
        axes = {axes for _, part in self._parts(self._experiment.input.batch_size, 1) for axes in part.axes}
        axes |= {weight.logical_axes for weight in (*self._weights, *self._states)}
        return {name: (-1, -1) if name == GATE else layout.dims_mapping(name) for name in axes}


def _shards(layout: Layout, sharding: tuple[int, ...]) -> int:
    return math.prod(layout.mesh.shape[axis] for axis in sharding if axis >= 0)
