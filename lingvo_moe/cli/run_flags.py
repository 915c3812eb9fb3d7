"""From the flags of a command that runs programs to what it runs: model, experiment, engine.

Engines are imported when they are asked for: JAX, which one of them brings along, must not come before a TPU of TensorFlow's.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from typing import TYPE_CHECKING

from absl import flags

from lingvo_moe import experiment, program_cache, registry
from lingvo_moe.cli import process_setup
from lingvo_moe.distributed import process_group
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import DeviceMesh

if TYPE_CHECKING:
    from lingvo_moe.engines import pjrt, tpu_strategy

ENGINES = ("pjrt", "tpu_strategy")


def set_up(
    values: flags.FlagValues, changes: dict[str, object], processes: int = 1
) -> tuple[str, Experiment, pjrt.Engine | tpu_strategy.Engine]:
    """The model's full name, its experiment after all flags, and an engine with the devices it needs, of all `processes`."""
    name, own, assignments = configure(values, changes)
    given = mesh(values)
    engine = _engine(values, own.mesh.size, given is None, processes)
    if given is None and len(engine.devices) != own.mesh.size:
        own = experiment.get(name, assignments, DeviceMesh((len(engine.devices),)))
    return name, dataclasses.replace(own, platform=own.platform or engine.platform), engine


def configure(values: flags.FlagValues, changes: dict[str, object]) -> tuple[str, Experiment, list[str]]:
    """The model's full name, its experiment on the mesh that flags ask for, and the assignments that made it; no device yet."""
    name = registry.full_name(values.model)
    _check_engine(values)
    for flag in ("corpus", "tokenizers"):
        if flag in values and values[flag].value is not None:
            changes = {**changes, flag: values[flag].value}
    assignments = [*values.set, *(f"{path}={value}" for path, value in changes.items() if value is not None)]
    return name, experiment.get(name, assignments, mesh(values)), assignments


def connect(values: flags.FlagValues) -> ProcessGroup:
    """Meets the others that train the same model, if flags say that there are any; raises UserError as `processes.connect`."""
    given = [flag for flag in ("coordinator", "processes", "process") if values[flag].value is not None]
    if not given:
        return ProcessGroup()
    if len(given) < 3:
        raise UserError(
            f"--{given[0]} without the others: many processes need --coordinator, --processes and --process, each of "
            f"them its own --process (docs/processes.md)."
        )
    if values.engine == "tpu_strategy":
        raise UserError(
            "--processes is for --engine=pjrt; with tpu_strategy one process reaches all machines of the slice. "
            "Leave --coordinator, --processes and --process out."
        )
    return process_group.connect(values.coordinator, values.processes, values.process, say=say)


def mesh(values: flags.FlagValues) -> DeviceMesh | None:
    """The mesh that flags ask for, None where they ask for none."""
    if values.mesh is not None and values.devices is not None:
        raise UserError("--mesh and --devices both say how many devices; pass one of them.")
    if values.devices is not None and values.devices < 1:
        raise UserError(f"--devices={values.devices}: at least one device is needed.")
    return DeviceMesh.parse(values.mesh) if values.mesh else DeviceMesh((values.devices,)) if values.devices else None


def logdir(values: flags.FlagValues) -> pathlib.Path:
    """The directory of checkpoints and curves; raises UserError where none is given."""
    if not values.logdir:
        raise UserError("--logdir is missing: the directory of checkpoints and curves.")
    return pathlib.Path(values.logdir)


def say(line: str):
    """Tells what goes on, beside a command's own output."""
    print(line, file=sys.stderr, flush=True)


def _check_engine(values: flags.FlagValues):
    """Raises UserError for flags that are for another engine than the one that is asked for."""
    if "engine" not in values:
        return
    if values.engine == "tpu_strategy":
        for flag in ("platform", "devices", "cache"):
            if values[flag].present:
                raise UserError(
                    f"--{flag} is for --engine=pjrt; tpu_strategy takes all cores of the slice of --tpu. Leave "
                    f"--{flag} out; --mesh=AxB says how the cores form a mesh."
                )
    elif values.tpu is not None:
        raise UserError(
            f"--tpu={values.tpu} is for --engine=tpu_strategy; pass that too, or leave --tpu out: the pjrt engine "
            f"takes the devices that JAX finds."
        )


def _engine(
    values: flags.FlagValues, num_devices: int, all_accelerators: bool, processes: int
) -> pjrt.Engine | tpu_strategy.Engine:
    if "engine" in values and values.engine == "tpu_strategy":
        _keep_jax_from_the_tpu()
        from lingvo_moe.engines import tpu_strategy

        return tpu_strategy.Engine.connect(values.tpu or "")
    from lingvo_moe.engines import pjrt

    _use_cache(values)
    if program_cache.executables():
        pjrt.use_compilation_cache(program_cache.executables())
    process_setup.keep_freed_memory()
    return pjrt.Engine(num_devices, values.platform, all_accelerators, processes)


def _keep_jax_from_the_tpu():
    """The library of checkpoints brings JAX along, which takes a TPU where it finds one; this one is TensorFlow's."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is imported
    if "jax" in sys.modules:  # what --import names may have done so
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def _use_cache(values: flags.FlagValues):
    """A place that was named must be usable; where none was and the user's own is not, work goes on without, and says so."""
    try:
        program_cache.use(values.cache)
    except UserError as error:
        if values["cache"].present:
            raise
        say(f"programs are compiled anew each time: {error}")
