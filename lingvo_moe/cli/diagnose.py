"""The command `diagnose`: one training step, layer by layer, from flags to a table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pathlib

import numpy as np

from lingvo_moe import tree
from lingvo_moe.cli import run_setup
from lingvo_moe.cli.run_config import DiagnoseConfig
from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.training import compiling
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import WEIGHTS, Reader
from lingvo_moe.training.diagnosis import Diagnosis
from lingvo_moe.training.replay import Replay
from lingvo_moe.utils import output_files

_logger = logging.getLogger(__name__)
_VERSION = 2  # of the JSON file; in version 1 a scope was called place


@dataclasses.dataclass(frozen=True)
class _Step:
    """What to diagnose.

    Attributes:
      done: how many steps precede it.
      seed: of the training state.
      checkpoint: the step of the checkpoint that holds the weights.
      batch: of the step.
    """

    done: int
    seed: tuple[int, int]
    checkpoint: int
    batch: dict


def diagnose(config: DiagnoseConfig):
    """`diagnose`: prints the table of a training step that was skipped, or of the one that training would make next."""
    output_files.check_path("--json", config.json)
    saved = Replay.load(config.batch) if config.batch else None
    if saved:
        saved.check_model(config.full_name())
    name, experiment, engine = run_setup.set_up(config, "diagnose", {})
    checkpoints = Checkpoints(config.log_directory())
    theta_specs = experiment.steps.state_specs()["theta"]
    checkpoints.newest_compatible_step(name, theta_specs)
    if saved:
        saved.check_shapes(experiment.batch_specs())
    step = _replayed(saved, checkpoints) if saved else _next(experiment, checkpoints)
    _check_average(checkpoints.path(step.checkpoint), experiment.training.ema_decay)
    with compiling.announced(f"the diagnosis of {name}", experiment, engine.platform):
        program = engine.compile(experiment.steps.diagnose(experiment.batch_specs()))
    if not saved and step.checkpoint not in checkpoints.steps():  # training has removed it meanwhile
        step = _next(experiment, checkpoints)
    _, theta = checkpoints.restore_theta(name, theta_specs, program.shardings("state")["theta"], step.checkpoint)
    state = {"step": np.int32(step.done), "seed": np.array(step.seed, np.int32), "theta": theta}
    if experiment.training.ema_decay:
        state["ema_gap"] = _read_gap(checkpoints, step.checkpoint, theta)
    diagnosis = Diagnosis.of(program({"state": state, "batch": step.batch}), experiment.model.weights())
    text = (
        f"step {step.done + 1} of {name}, with the weights of {checkpoints.path(step.checkpoint)}\n\n{diagnosis.text()}"
    )
    if saved:
        text += f"\n\ntraining computed a loss of {saved.loss:.6g} and a gradient norm of {saved.gradient_norm:.6g}"
    print(text, file=output_files.table_stream(config.json))
    if config.json:
        about = {
            "version": _VERSION,
            "model": name,
            "step": step.done + 1,
            "checkpoint": step.checkpoint,
            "batch": config.batch,
        }
        with output_files.atomic_writer(config.json) as file:
            json.dump({**about, **diagnosis.as_json()}, file, indent=1)


def _replayed(saved: Replay, checkpoints: Checkpoints) -> _Step:
    """Returns the step that training saved, with its weights if their checkpoint still exists."""
    checkpoint = saved.checkpoint
    if checkpoint not in checkpoints.steps() or checkpoints.problems(checkpoint, WEIGHTS):
        checkpoint = _latest(checkpoints)
        _logger.warning(
            "%s, which has the weights of that step, is missing or corrupt; those of step %d are used instead, so the "
            "numbers may differ from those of training.",
            checkpoints.path(saved.checkpoint),
            checkpoint,
        )
    return _Step(saved.step - 1, saved.seed, checkpoint, saved.batch)


def _next(experiment: Experiment, checkpoints: Checkpoints) -> _Step:
    """Returns the step that training would make next; a checkpoint of weights alone gets the first batch."""
    experiment.check_tokenizers()
    checkpoint = _latest(checkpoints)
    reader = Reader(checkpoints.path(checkpoint))
    seed = (0, experiment.training.seed) if "origin" in reader.meta else tuple(reader.read("seed").tolist())
    train_input = TrainInput(experiment.corpus, experiment.tokenizers, experiment.input)
    with contextlib.closing(train_input.batches(reader.meta["data_state"])) as stream:
        batch, _ = next(stream)
    return _Step(checkpoint, seed, checkpoint, batch)


def _check_average(path: pathlib.Path, ema_decay: float):
    """Raises UserError where the checkpoint has an average of the weights and the settings none, or the reverse."""
    reader = Reader(path)
    if "rest" not in reader.items:
        return
    averaged = any(name.startswith("ema_gap/") for name in reader.specs(["rest"]))
    if averaged != bool(ema_decay):
        raise UserError(
            f"{path} was saved {'with' if averaged else 'without'} an average of the weights, but training.ema_decay "
            f"is {ema_decay}; pass --set training.ema_decay as it was in training."
        )


def _read_gap(checkpoints: Checkpoints, step: int, theta: dict) -> dict:
    """Returns the trained weights minus their average; zeros for a checkpoint of weights alone."""
    reader = Reader(checkpoints.path(step))
    if "rest" not in reader.items:
        return tree.map_leaves(lambda weight: np.zeros(weight.shape, np.float32), theta)
    return tree.unflatten({path: reader.read(f"ema_gap/{path}") for path in tree.flatten(theta)})


def _latest(checkpoints: Checkpoints) -> int:
    latest = checkpoints.latest(WEIGHTS)
    if latest is None:
        raise UserError(f"{checkpoints.directory}: the checkpoints have been removed.")
    return latest
