"""The command `diagnose`: one training step looked at, layer by layer, from flags to a table."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
from absl import flags

from lingvo_moe import registry
from lingvo_moe.cli import run_flags
from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.experiment import Experiment
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import WEIGHTS, Reader
from lingvo_moe.training.diagnosis import Diagnosis
from lingvo_moe.training.replay import Replay
from lingvo_moe.utils import output_files


@dataclasses.dataclass(frozen=True)
class _Step:
    """What to look at: the step after `done` steps, of this batch, with the weights of a checkpoint."""

    done: int
    seed: tuple[int, int]
    checkpoint: int
    batch: dict


def diagnose(values: flags.FlagValues):
    """`diagnose`: of a batch that training could not learn from, or of the one that it would read next."""
    output_files.check_path("--json", values.json)
    saved = Replay.load(values.batch) if values.batch else None
    if saved:
        saved.check_model(values.batch, registry.full_name(values.model))
    name, config, engine = run_flags.set_up(values, {})
    checkpoints = Checkpoints(run_flags.logdir(values))
    theta_specs = config.steps.state_specs()["theta"]
    checkpoints.require(name, theta_specs)
    if saved:
        saved.check_shapes(values.batch, config.batch_specs())
    step = _replayed(saved, checkpoints) if saved else _next(config, checkpoints)
    run_flags.say(
        f"compiling the diagnosis of {name}, {config.model.num_weights():,} weights, for {len(engine.devices)} "
        f"{engine.platform} device(s), mesh {config.mesh} ..."
    )
    program = engine.load(config.steps.diagnose(config.batch_specs()))
    _, theta = checkpoints.restore_theta(name, theta_specs, program.shardings("state")["theta"], step.checkpoint)
    state = {"step": np.int32(step.done), "seed": np.array(step.seed, np.int32), "theta": theta}
    found = Diagnosis.of(program({"state": state, "batch": step.batch}), config.model.weights())
    print(f"step {step.done + 1} of {name}, with the weights of {checkpoints.path(step.checkpoint)}\n\n{found.text()}")
    if saved:
        print(f"\ntraining saw a loss of {saved.loss:.6g} and a gradient norm of {saved.gradient_norm:.6g}")
    if values.json:
        about = {"model": name, "step": step.done + 1, "checkpoint": step.checkpoint, "batch": values.batch}
        with output_files.atomic_writer(values.json) as file:
            json.dump({**about, **found.as_json()}, file, indent=1)


def _replayed(saved: Replay, checkpoints: Checkpoints) -> _Step:
    """The step that training kept, with the weights of then if they are still there."""
    checkpoint = saved.checkpoint
    if checkpoint not in checkpoints.steps() or checkpoints.problems(checkpoint, WEIGHTS):
        checkpoint = checkpoints.latest(WEIGHTS)
        run_flags.say(
            f"{checkpoints.path(saved.checkpoint)}, which has the weights of then, is gone or damaged; those of step "
            f"{checkpoint} are used instead, so the numbers are not those that training saw."
        )
    return _Step(saved.step - 1, saved.seed, checkpoint, saved.batch)


def _next(config: Experiment, checkpoints: Checkpoints) -> _Step:
    """The step that training would make next from the newest checkpoint; of weights alone, with the first batch of all."""
    config.open_tokenizers()
    checkpoint = checkpoints.latest(WEIGHTS)
    reader = Reader(checkpoints.path(checkpoint))
    seed = (0, config.training.seed) if "origin" in reader.meta else tuple(reader.read("seed").tolist())
    stream = TrainInput(config.corpus, config.tokenizers, config.input).batches(reader.meta["data_state"])
    batch, _ = next(stream)
    stream.close()
    return _Step(checkpoint, seed, checkpoint, batch)
