"""What inference from Python runs: the model of a log directory, its experiment, and an engine."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from lingvo_moe import definitions, program_cache
from lingvo_moe import experiment as experiments
from lingvo_moe.engines import registry as engines
from lingvo_moe.engines.base import Engine
from lingvo_moe.engines.registry import EngineOptions
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.training import hyperparameters


def configured(
    logdir: str | pathlib.Path,
    name: str | None = None,
    assignments: Sequence[str] = (),
    mesh: DeviceMesh = DeviceMesh(),
    platform: str | None = None,
) -> tuple[str, Experiment, Engine]:
    """Returns the name of a model, its experiment, and an engine to decode with.

    Args:
      logdir: that of `train`.
      name: the registered name of the model; None for that of the log directory's `hyperparameters.json`, with the
        hyperparameters that it has.
      assignments: other hyperparameters, as `--set` has them: `["search.beam_size=8"]`.
      mesh: of the devices to decode on.
      platform: `cpu`, `gpu` or `tpu`; None for what JAX prefers.

    Raises:
      UserError: no name and no file, an unknown hyperparameter, devices that are not there.
    """
    definitions.check_texts("assignments", assignments)
    if name is None:
        file = pathlib.Path(logdir) / hyperparameters.FILE
        recorded = hyperparameters.load(file.parent)
        if recorded is None:
            raise UserError(
                f"{file}: no such file. Name the log directory of a training run, or pass the model's name."
            )
        name, own = recorded.resolve(str(file))
        assignments = (*own, *assignments)
    experiment = experiments.get(name, assignments, mesh)
    options = EngineOptions(
        purpose="decode", num_devices=mesh.size, platform=platform, executables=program_cache.executables()
    )
    engine = engines.make("pjrt", options)
    experiment = dataclasses.replace(experiment, platform=experiment.platform or engine.platform)
    return name, experiment, engine
