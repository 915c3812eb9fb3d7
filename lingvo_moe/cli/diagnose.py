"""The command `diagnose`: one training step looked at, layer by layer, from flags to a table."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np

from lingvo_moe import registry
from lingvo_moe.cli import run_setup
from lingvo_moe.cli.run_config import DiagnoseConfig
from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.experiment import Experiment
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import WEIGHTS, Reader
from lingvo_moe.training.diagnosis import Diagnosis
from lingvo_moe.training.replay import Replay
from lingvo_moe.utils import output_files

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Step:
    """What to look at: the step after `done` steps, of this batch, with the weights of a checkpoint."""

    done: int
    seed: tuple[int, int]
    checkpoint: int
    batch: dict


def diagnose(config: DiagnoseConfig):
    """`diagnose`: of a batch that training could not learn from, or of the one that it would read next."""
    output_files.check_path("--json", config.json)
    saved = Replay.load(config.batch) if config.batch else None
    if saved:
        saved.check_model(config.batch, registry.full_name(config.model))
    name, experiment, engine = run_setup.set_up(config, "diagnose", {})
    checkpoints = Checkpoints(config.log_directory())
    theta_specs = experiment.steps.state_specs()["theta"]
    checkpoints.require(name, theta_specs)
    if saved:
        saved.check_shapes(config.batch, experiment.batch_specs())
    step = _replayed(saved, checkpoints) if saved else _next(experiment, checkpoints)
    _log.info(
        f"compiling the diagnosis of {name}, {experiment.model.num_weights():,} weights, for {len(engine.devices)} "
        f"{engine.platform} device(s), mesh {experiment.mesh} ..."
    )
    program = engine.load(experiment.steps.diagnose(experiment.batch_specs()))
    _, theta = checkpoints.restore_theta(name, theta_specs, program.shardings("state")["theta"], step.checkpoint)
    state = {"step": np.int32(step.done), "seed": np.array(step.seed, np.int32), "theta": theta}
    found = Diagnosis.of(program({"state": state, "batch": step.batch}), experiment.model.weights())
    print(f"step {step.done + 1} of {name}, with the weights of {checkpoints.path(step.checkpoint)}\n\n{found.text()}")
    if saved:
        print(f"\ntraining saw a loss of {saved.loss:.6g} and a gradient norm of {saved.gradient_norm:.6g}")
    if config.json:
        about = {"model": name, "step": step.done + 1, "checkpoint": step.checkpoint, "batch": config.batch}
        with output_files.atomic_writer(config.json) as file:
            json.dump({**about, **found.as_json()}, file, indent=1)


def _replayed(saved: Replay, checkpoints: Checkpoints) -> _Step:
    """The step that training kept, with the weights of then if they are still there."""
    checkpoint = saved.checkpoint
    if checkpoint not in checkpoints.steps() or checkpoints.problems(checkpoint, WEIGHTS):
        checkpoint = checkpoints.latest(WEIGHTS)
        _log.info(
            f"{checkpoints.path(saved.checkpoint)}, which has the weights of then, is gone or damaged; those of step "
            f"{checkpoint} are used instead, so the numbers are not those that training saw."
        )
    return _Step(saved.step - 1, saved.seed, checkpoint, saved.batch)


def _next(experiment: Experiment, checkpoints: Checkpoints) -> _Step:
    """The step that training would make next from the newest checkpoint; of weights alone, with the first batch of all."""
    experiment.open_tokenizers()
    checkpoint = checkpoints.latest(WEIGHTS)
    reader = Reader(checkpoints.path(checkpoint))
    seed = (0, experiment.training.seed) if "origin" in reader.meta else tuple(reader.read("seed").tolist())
    stream = TrainInput(experiment.corpus, experiment.tokenizers, experiment.input).batches(reader.meta["data_state"])
    batch, _ = next(stream)
    stream.close()
    return _Step(checkpoint, seed, checkpoint, batch)
