"""From the configuration of a command that runs programs to what it runs: model, experiment and engine."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping

from lingvo_moe import program_cache
from lingvo_moe.cli.run_config import RunConfig, TrainConfig
from lingvo_moe.distributed.membership import Membership
from lingvo_moe.distributed.membership import find as find_membership
from lingvo_moe.engines import registry as engines
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.experiment import get as get_experiment
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import allocator

_logger = logging.getLogger(__name__)
# The flags that are for one of our engines.
_ENGINE_OF_FLAG = {"platform": "pjrt", "devices": "pjrt", "cache": "pjrt", "tpu": "tpu_strategy"}


def set_up(
    config: RunConfig,
    purpose: engines.Purpose,
    changes: Mapping[str, object],
    processes: int = 1,
    reads_batches: bool = True,
) -> tuple[str, Experiment, Engine]:
    """Makes what a command runs.

    Args:
      config: its flags.
      purpose: what the engine is for.
      changes: values of experiment fields that other flags set; None for a flag that was not passed.
      processes: how many processes share the devices.
      reads_batches: see `Experiment.check`.

    Returns:
      The model's full name, its experiment after all flags, and an engine with the devices it needs.
    """
    name, experiment, assignments = configure(config, changes, reads_batches)
    mesh = config.device_mesh()
    engine = _make_engine(config, purpose, experiment.mesh.size, mesh is None, processes)
    if mesh is None and len(engine.devices) != experiment.mesh.size:
        every = DeviceMesh((len(engine.devices),))
        experiment = get_experiment(name, assignments, every, reads_batches=reads_batches)
    return name, dataclasses.replace(experiment, platform=experiment.platform or engine.platform), engine


def configure(
    config: RunConfig, changes: Mapping[str, object], reads_batches: bool = True
) -> tuple[str, Experiment, list[str]]:
    """Returns the model's full name, its experiment on the mesh of the flags, and all assignments; needs no device."""
    name = config.full_name()
    _check_engine(config)
    languages = {f"input.{field}": getattr(config, field) for field in ("source_language", "target_language")}
    changes = {"corpus": config.corpus, "tokenizers": config.tokenizers, **languages, **changes}
    assignments = [*config.assignments, *(f"{path}={value}" for path, value in changes.items() if value is not None)]
    experiment = get_experiment(name, assignments, config.device_mesh(), reads_batches=reads_batches)
    return name, experiment, assignments


def membership(config: TrainConfig) -> Membership | None:
    """Returns the rank of this process in a run of several, from flags or a launcher; None for a run of one."""
    if config.engine == "tpu_strategy":
        if {"coordinator", "processes", "process"} & config.given:
            raise UserError(
                "--processes is for --engine=pjrt; with tpu_strategy one process reaches all machines of the slice. "
                "Leave --coordinator, --processes and --process out."
            )
        return None
    return find_membership(config.coordinator, config.processes, config.process, os.environ)


def _check_engine(config: RunConfig):
    """Raises UserError for an unknown engine, and for flags that are for another engine than `--engine`."""
    engines.ENGINES.get(config.engine)
    if config.engine not in _ENGINE_OF_FLAG.values():
        return
    wrong = next(
        (flag for flag, engine in _ENGINE_OF_FLAG.items() if flag in config.given and engine != config.engine), None
    )
    if wrong == "tpu":
        raise UserError(
            f"--tpu={config.tpu} is for --engine=tpu_strategy; pass that too, or leave --tpu out: the pjrt engine "
            f"takes the devices that JAX finds."
        )
    if wrong:
        raise UserError(
            f"--{wrong} is for --engine=pjrt; tpu_strategy takes all cores of the slice of --tpu. Leave --{wrong} out; "
            f"--mesh=AxB says how the cores form a mesh."
        )


def _make_engine(
    config: RunConfig, purpose: engines.Purpose, num_devices: int, all_accelerators: bool, processes: int
) -> Engine:
    if config.engine != "tpu_strategy":
        _use_cache(config)
        allocator.keep_freed_memory()
    options = engines.EngineOptions(
        purpose=purpose,
        num_devices=num_devices,
        all_accelerators=all_accelerators,
        processes=processes,
        platform=config.platform,
        tpu=config.tpu,
        executables=program_cache.executables(),
    )
    return engines.make(config.engine, options)


def _use_cache(config: RunConfig):
    """Turns the program cache on. A directory that was named must be usable; the default one may be missing."""
    try:
        program_cache.use(config.cache)
    except UserError as error:
        if "cache" in config.given:
            raise
        _logger.warning("programs are recompiled in each run: %s", error)
