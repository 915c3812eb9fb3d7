"""Plans a model on an absent TPU slice or GPU cluster: memory, collectives, time of a step, cost of a training run.

There are three kinds of figures, and `plan_text` marks them: the compiler's own (memory, collectives, cycles), the
program's (sizes and sharding of its inputs), and our model's (time on the links, see `hardware`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_moe.analysis import compiler_schedule, flops, roofline
from lingvo_moe.analysis.collectives import Collective, find_collectives, missed
from lingvo_moe.analysis.hardware import Network, Torus, hardware_of, links_of
from lingvo_moe.analysis.hlo import Buffer, Module
from lingvo_moe.analysis.instruction import Instruction
from lingvo_moe.engines.cluster import GPUS, Cluster
from lingvo_moe.engines.topology import Compiled, Slice
from lingvo_moe.errors import OutOfMemory, UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.program import Argument, Program
from lingvo_moe.utils import output_files

PROGRAMS = ("train", "decode")
# Of the saved JSON. In version 3, `devices` were `cores`; in version 2, `tokens` of a training step were of both sides.
VERSION = 4
_SECONDS_PER_YEAR = 365.25 * 24 * 3600
_REMATERIALISED = "rematerialised"  # the name scope of `layers.repeat` and `layers.pipeline`
_ITERATIONS = re.compile(r"pipeline_(\d+)_of_(\d+)_iterations")  # the name scope of `layers.pipeline_schedule`
# Name scopes of the layers, models and steps; the innermost one decides.
PARTS = (
    "embedding",
    "self_attention",
    "cross_attention",
    "feed_forward",
    "gating",
    "dispatch",
    "experts",
    "combine",
    "convolution",
    "subsampling",
    "analysis",
    "upsampling",
    "synthesis",
    "softmax",
    "ctc",
    "optimizer",
)
_PART = re.compile("|".join(PARTS))
_OTHER = "other"
ALL_PARTS = (*PARTS, _OTHER)
_MAX_BUFFERS = 5


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device by category (GShard figure 7).

    Attributes:
      replicated_weights, distributed_weights, optimizer_state, inputs: counted from the program's inputs.
      temporaries: activations, gradients and buffers of collectives; the compiler's figure, None if it stopped before.
      available: a device's memory; the compiler's figure if the program does not fit, else None.
      needed: what the compiler reports as not fitting; None if the program fits.
    """

    replicated_weights: int
    distributed_weights: int
    optimizer_state: int
    inputs: int
    temporaries: int | None
    available: int | None = None
    needed: int | None = None

    @property
    def total(self) -> int:
        """The sum of the known categories."""
        return (
            self.replicated_weights
            + self.distributed_weights
            + self.optimizer_state
            + self.inputs
            + (self.temporaries or 0)
        )


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """All collectives of one kind among groups of one size: number of runs, bytes per device, our model's seconds."""

    kind: str
    group: int
    runs: int
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The figures of one program on one slice or cluster, of which each GPU counts as a core.

    Attributes:
      model, changes, program, topology, mesh, devices, weights: what was compiled, and for what; `changes` are those of
        the registered model, each `field=value`.
      batch_size: the rows of a training step's batch, or the sentences that are decoded at a time.
      layout, remat, num_groups, num_experts, num_layers, activation_dtype: the relevant settings.
      tokens: of the source (of a language model, all) in one run of the program: what the papers count.
      model_flops: of the model in a training step, see `flops`; None for decoding.
      memory: per device.
      collectives: by kind and size of the groups; empty if the program does not fit.
      cycles: of one core by the compiler's estimates, of a GPU by `roofline`, without collectives; None if the program
        does not fit.
      rematerialised_cycles: those of them that recompute a layer's activations.
      cycles_by_part: those of a training step by part of the model, see PARTS.
      compute_seconds: cycles over the published clock; None without one.
      scheduled_seconds: of one run, by the compiler's own estimates, see `compiler_schedule`; of GPUs alone.
      unknown_loops: loops that are counted as one trip because their trip count depends on data.
      lower_seconds, compile_seconds: on this machine.
      bubble_cycles: those of the cycles that a stage of a pipeline spends in iterations without a microbatch.
      largest_buffers: if the program does not fit, its largest buffers, as compiled for devices with more memory.
      compiler_options: beside the compiler's defaults, each `NAME=VALUE`.
      rows: what the rows of `batch_size` are in decoding: sentences, or prompts of a language model.
      unit: of what `tokens` counts: tokens, voxels of a model that segments volumes, or frames of 10 ms of one that
        recognises speech.
    """

    model: str
    changes: tuple[str, ...]
    program: str
    topology: str
    mesh: str
    devices: int
    weights: int
    layout: str
    remat: str
    batch_size: int
    num_groups: int
    num_experts: int
    num_layers: int
    activation_dtype: str
    tokens: int
    model_flops: float | None
    memory: Memory
    collectives: tuple[CollectiveCost, ...]
    cycles: int | None
    rematerialised_cycles: int | None
    cycles_by_part: dict[str, int]
    compute_seconds: float | None
    unknown_loops: int
    lower_seconds: float
    compile_seconds: float
    scheduled_seconds: float | None = None
    bubble_cycles: int = 0
    largest_buffers: tuple[Buffer, ...] = ()
    compiler_options: tuple[str, ...] = ()
    rows: str = "sentences"
    unit: str = "tokens"

    @property
    def fits(self) -> bool:
        """Whether the program fits into a device's memory."""
        return self.memory.needed is None

    @property
    def device(self) -> str:
        """What the topology's devices are: `core` of a TPU, or `GPU`."""
        return "GPU" if self.topology.partition(":")[0] in GPUS else "core"

    @property
    def collective_seconds(self) -> float:
        """The time of all collectives, one after the other."""
        return sum(collective.seconds for collective in self.collectives)

    @property
    def step_seconds(self) -> float | None:
        """The time of computation and collectives without overlap; None if unknown."""
        return None if self.compute_seconds is None else self.compute_seconds + self.collective_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of steps of `step_seconds`; None if unknown."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def utilisation(self) -> float | None:
        """MFU, the model's FLOPs as a fraction of the devices' peak; None if the time or the FLOPs are unknown."""
        if self.step_seconds is None or self.model_flops is None:
            return None
        return self.model_flops / (self.step_seconds * self.devices * hardware_of(self.topology).peak_flops)

    def device_hours_per_million(self) -> float | None:
        """Returns the device-hours for a million rows of `batch_size`; None if the time is unknown."""
        if self.step_seconds is None:
            return None
        return 1e6 / self.batch_size * self.step_seconds * self.devices / 3600

    def device_years(self, tokens: float) -> float | None:
        """Returns the device-years of a training run over `tokens`; None if the time of a step is unknown."""
        if self.step_seconds is None:
            return None
        return tokens / self.tokens * self.step_seconds * self.devices / _SECONDS_PER_YEAR

    def save(self, path: str | os.PathLike):
        """Writes the plan as JSON; `-` is standard output."""
        with output_files.atomic_writer(os.fspath(path)) as file:
            json.dump({"version": VERSION, **dataclasses.asdict(self)}, file, indent=1)
            file.write("\n")

    @staticmethod
    def load(path: str | os.PathLike) -> Plan:
        """Reads what `save` wrote.

        Raises:
          UserError: the file cannot be read, or is not a plan of this version.
        """
        remedy = f"regenerate it with `plan NAME --json={path}`."
        try:
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
            version = values.pop("version", 1)
            if version != VERSION:
                raise UserError(f"{path}: a plan of version {version}, this program reads version {VERSION}; {remedy}")
            values["changes"] = tuple(values["changes"])
            values["compiler_options"] = tuple(values.get("compiler_options", ()))
            values["memory"] = Memory(**values["memory"])
            values["collectives"] = tuple(CollectiveCost(**cost) for cost in values["collectives"])
            values["largest_buffers"] = tuple(Buffer(**buffer) for buffer in values["largest_buffers"])
            return Plan(**values)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); `plan NAME --json={path}` writes it."
            ) from None
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a plan of version {VERSION} ({error}); {remedy}") from None


def make(
    name: str, experiment: Experiment, target: Slice | Cluster, program: str = "train", changes: Sequence[str] = ()
) -> Plan:
    """Traces, lowers and compiles a program of a registered model for a slice or a cluster.

    Args:
      name: of the model, for the plan.
      experiment: its mesh has as many devices as the target.
      target: a TPU slice or a cluster of GPUs.
      program: `train`, or `decode` for flat beam search.
      changes: of the registered model, for the plan.

    Raises:
      UserError: the mesh has another size, or its axis does not divide a dimension.
    """
    if isinstance(target, Cluster):
        experiment = dataclasses.replace(experiment, platform="gpu")
    start = time.monotonic()
    lowered = _lower(experiment, program)
    lowered_at = time.monotonic()
    shared = {
        "model": name,
        "changes": tuple(changes),
        "program": program,
        "topology": target.name,
        "compiler_options": target.compiler_options,
        **_settings(experiment, program),
        "tokens": _tokens(experiment, program),
        "rows": "prompts" if experiment.generates else "sentences",
        "unit": "voxels" if experiment.segments else "frames" if experiment.recognises else "tokens",
        "lower_seconds": lowered_at - start,
        "model_flops": flops.training_step(experiment.model, experiment.input) if program == "train" else None,
    }
    try:
        compiled = target.compile(lowered)
    except OutOfMemory as answer:
        compile_seconds = time.monotonic() - lowered_at
        return Plan(**shared, **_without_program(lowered, target, answer), compile_seconds=compile_seconds)
    compile_seconds = time.monotonic() - lowered_at
    return Plan(**shared, **_of_program(lowered, compiled, target), compile_seconds=compile_seconds)


def _without_program(lowered: Program, target: Slice | Cluster, answer: OutOfMemory) -> dict:
    """The fields of a plan that does not fit the devices: what the compiler reports instead of a program."""
    return {
        "memory": _memory(lowered, None, answer.available, answer.needed),
        "collectives": (),
        "cycles": None,
        "rematerialised_cycles": None,
        "cycles_by_part": {},
        "compute_seconds": None,
        "unknown_loops": 0,
        "largest_buffers": _largest_buffers(lowered, target),
    }


def _of_program(lowered: Program, compiled: Compiled, target: Slice | Cluster) -> dict:
    """The fields of a plan that are read from the compiled program."""
    hlo = compiled.hlo()
    with _reading():
        module = Module(hlo, lowered.mesh.size)
    if names := missed(hlo, module):
        raise UserError(
            f"the compiled module has collectives that this version cannot count: {', '.join(names)}. Please report it."
        )
    with _reading():
        collectives, runs = collective_costs(module, target), list(_runs(module, target))
        scheduled_seconds = compiler_schedule.seconds(compiled.schedule, module) if compiled.schedule else None
    cycles = sum(cycles for _, cycles in runs)
    clock = hardware_of(target.name).clock
    # Donated inputs become outputs; all other outputs count as temporaries.
    stats = compiled.memory()
    temporaries = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {
        "memory": _memory(lowered, temporaries),
        "cycles": cycles,
        "collectives": collectives,
        "rematerialised_cycles": _rematerialised(runs),
        "bubble_cycles": _bubbles(runs),
        "cycles_by_part": _by_part(runs),
        "compute_seconds": cycles / clock if clock else None,
        "scheduled_seconds": scheduled_seconds,
        "unknown_loops": module.unknown_loops,
    }


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raises UserError where the module has something that the block cannot read."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"the compiled module cannot be read: {error}. Please report it.") from None


def part_of(instruction: Instruction) -> str:
    """Returns the part of the model, of PARTS, that an instruction belongs to, or `other`."""
    scopes = _PART.findall(instruction.op_name)
    # The optimizer's inner scopes have the names of the weights.
    return "optimizer" if "optimizer" in scopes else scopes[-1] if scopes else _OTHER


def collective_costs(module: Module, target: Slice | Cluster) -> tuple[CollectiveCost, ...]:
    """Returns the collectives of a module that was compiled for a target; raises ValueError for unreadable groups."""
    return _collectives(find_collectives(module), links_of(target))


def _lower(experiment: Experiment, program: str) -> Program:
    if program == "train":
        return experiment.steps.train(experiment.batch_specs())
    if program == "decode":
        return experiment.steps.decode(experiment.decoding_specs(), experiment.search)
    raise UserError(f"--program={program}: expected {' or '.join(PROGRAMS)}.")


def _tokens(experiment: Experiment, program: str) -> int:
    rows = experiment.input.batch_size if program == "train" else experiment.decoding_batch
    return rows * next(iter(experiment.input.lengths.values()))


def _memory(
    program: Program, temporaries: int | None, available: int | None = None, needed: int | None = None
) -> Memory:
    size: dict[str, int] = defaultdict(int)
    for argument in program.inputs:
        size[_kind(argument, program)] += _bytes_per_device(argument, program)
    return Memory(
        size["replicated_weights"],
        size["distributed_weights"],
        size["optimizer_state"],
        size["inputs"],
        temporaries,
        available,
        needed,
    )


def _kind(argument: Argument, program: Program) -> str:
    parts = argument.path.split("/")
    if {"optimizer_state", "ema_gap"}.intersection(parts[:2]):
        return "optimizer_state"
    if "theta" in parts[:2]:
        return "distributed_weights" if _parts(argument, program) > 1 else "replicated_weights"
    return "inputs"


def _bytes_per_device(argument: Argument, program: Program) -> int:
    return math.prod(argument.shape) * np.dtype(argument.dtype).itemsize // _parts(argument, program)


def _parts(argument: Argument, program: Program) -> int:
    """Returns the number of different shards."""
    return math.prod(program.mesh.shape[axis] for axis in argument.dims_mapping if axis >= 0)


def _runs(module: Module, target: Slice | Cluster) -> Iterator[tuple[Instruction, int]]:
    """Yields instructions and the cycles of all of their runs: the TPU compiler's, or our roofline of a GPU."""
    for instruction, times in module.runs():
        if isinstance(target, Slice):
            yield instruction, instruction.cycles * times
        else:
            yield instruction, roofline.cycles(module, instruction, target.gpu) * times


def _collectives(collectives: list[Collective], links: Torus | Network) -> tuple[CollectiveCost, ...]:
    grouped: dict[tuple[str, int], list[Collective]] = defaultdict(list)
    for collective in collectives:
        grouped[collective.kind, collective.group_size].append(collective)
    return tuple(
        CollectiveCost(
            kind,
            group,
            sum(c.times for c in members),
            sum(c.bytes * c.times for c in members),
            sum(c.times * c.seconds(links) for c in members),
        )
        for (kind, group), members in sorted(grouped.items())
    )


def _rematerialised(runs: list[tuple[Instruction, int]]) -> int:
    return sum(
        cycles
        for instruction, cycles in runs
        if _REMATERIALISED in instruction.op_name and "gradient_tape" not in instruction.op_name
    )


def _bubbles(runs: list[tuple[Instruction, int]]) -> int:
    bubbles = 0.0
    for instruction, cycles in runs:
        if found := _ITERATIONS.search(instruction.op_name):
            busy, iterations = map(int, found.groups())
            bubbles += cycles * (1 - busy / iterations)
    return round(bubbles)


def _by_part(runs: list[tuple[Instruction, int]]) -> dict[str, int]:
    cycles_by_part: dict[str, int] = dict.fromkeys(ALL_PARTS, 0)
    for instruction, cycles in runs:
        cycles_by_part[part_of(instruction)] += cycles
    return cycles_by_part


def _largest_buffers(lowered: Program, target: Slice | Cluster) -> tuple[Buffer, ...]:
    """Compiles the program for more memory: out of memory, the TPU's compiler does not report the buffers."""
    larger = target.with_more_memory()
    if larger is None:
        return ()
    try:
        hlo = larger.compile(lowered).hlo()
    except OutOfMemory:
        return ()
    with _reading():
        return tuple(Module(hlo, lowered.mesh.size).largest_buffers(_MAX_BUFFERS))


def _settings(experiment: Experiment, program: str) -> dict:
    model = experiment.model
    return {
        "mesh": str(experiment.mesh),
        "devices": experiment.mesh.size,
        "weights": model.num_weights(),
        "layout": experiment.layout,
        "remat": model.remat,
        "batch_size": experiment.input.batch_size if program == "train" else experiment.decoding_batch,
        "num_groups": model.num_groups,
        "num_experts": model.num_experts,
        "num_layers": model.num_layers,
        "activation_dtype": model.activation_dtype,
    }
