"""Means of the weights of several checkpoints."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.training.checkpoint import Checkpoints, first_difference
from lingvo_moe.training.checkpoint_reader import WEIGHTS, Reader
from lingvo_moe.training.checkpoint_tools import check_new, choose, new_checkpoints, read_finite
from lingvo_moe.training.hyperparameters import Recorded
from lingvo_moe.training.hyperparameters import load as load_hyperparameters
from lingvo_moe.training.hyperparameters import save as save_hyperparameters
from lingvo_moe.utils import progress


def of_steps(checkpoints: Checkpoints, steps: list[int], output: str | pathlib.Path):
    """Writes the mean of the weights of several steps as the log directory `output`, under the newest step's number.

    The mean is computed in float64, array by array, and saved in float32.

    Args:
      checkpoints: to read from.
      steps: two or more.
      output: the log directory to write.

    Raises:
      UserError: a step is absent or corrupt, the models differ, or `output` has checkpoints.
    """
    if len(steps) < 2 or len(set(steps)) < len(steps):
        raise UserError(f"--steps={','.join(map(str, steps))}: expected two or more different steps.")
    origin = f"average of steps {', '.join(map(str, steps))}"
    _average({f"step {step}": (checkpoints, step) for step in steps}, output, origin)


def of_logdirs(logdirs: Mapping[str, Checkpoints], output: str | pathlib.Path):
    """Writes the mean of the newest weights of several log directories as the log directory `output`.

    As `of_steps`, of training runs that began with the same weights (Wortsman et al. 2022, "Model soups").

    Args:
      logdirs: two or more by name, each with a checkpoint.
      output: the log directory to write.

    Raises:
      UserError: a log directory has no valid checkpoint, the models differ, or `output` has checkpoints.
    """
    if len(logdirs) < 2:
        raise UserError(f"--logdirs={','.join(logdirs)}: expected two or more different log directories.")
    members = {name: (checkpoints, choose(checkpoints, None, WEIGHTS)) for name, checkpoints in logdirs.items()}
    steps = ", ".join(str(step) for _, step in members.values())
    _average(members, output, f"average of {len(logdirs)} log directories, steps {steps}")


def _average(members: Mapping[str, tuple[Checkpoints, int]], output: str | pathlib.Path, origin: str):
    check_new(output, "--output")
    read = {name: Reader(each.path(choose(each, step, WEIGHTS))) for name, (each, step) in members.items()}
    _check_one_model(read)
    recorded = _common_hyperparameters(members)
    tokenizer_hashes = _common_tokenizer_hashes(read)
    meta = next(iter(read.values())).meta
    shapes, theta = meta["weights"], {}
    for path in progress.track(sorted(shapes), f"averaging {len(read)} checkpoints", unit="arrays"):
        total = np.zeros(shapes[path], np.float64)
        for reader in read.values():
            total += read_finite(reader, path)
        theta[path] = (total / len(read)).astype(np.float32)
    newest = max(step for _, step in members.values())
    with new_checkpoints(output, "--output") as target:
        if recorded is not None:  # before the checkpoint, so that none lacks them
            save_hyperparameters(pathlib.Path(output), recorded)
        target.save_weights(newest, meta["model"], tree.unflatten(theta), origin, tokenizer_hashes)


def _check_one_model(members: Mapping[str, Reader]):
    """Raises UserError if members are of several models; the name says more than a field that differs."""
    (first_name, first), *others = members.items()
    model = first.meta["model"]
    for name, member in others:
        if member.meta["model"] != model:
            raise UserError(
                f"{first_name} is of {model}, {name} of {member.meta['model']}; the mean is of one model, so name "
                f"checkpoints of the same one."
            )


def _common_hyperparameters(members: Mapping[str, tuple[Checkpoints, int]]) -> Recorded | None:
    """Returns the hyperparameters of the first log directory that has them; raises UserError if models differ."""
    found = {name: load_hyperparameters(each.directory.parent) for name, (each, _) in members.items()}
    knowing = {name: recorded for name, recorded in found.items() if recorded is not None}
    models = {name: recorded.completed.of_weights for name, recorded in knowing.items()}
    for name, model in models.items():
        if model != (first := next(iter(models.values()))):
            raise UserError(
                f"{name}: its hyperparameters are not those of {next(iter(models))}: {first_difference(model, first)}. "
                f"The mean is of one model."
            )
    return next(iter(knowing.values()), None)


def _common_tokenizer_hashes(members: Mapping[str, Reader]) -> list[str] | None:
    """Returns `Reader.tokenizer_hashes` of those members that have them.

    Raises:
      UserError: weights or tokenizers differ.
    """
    (first_name, first), *_ = members.items()
    shapes = first.meta["weights"]
    knowing = [member for member in members.values() if member.tokenizer_hashes is not None]
    for member in members.values():
        if member.meta["weights"] != shapes:
            raise UserError(
                f"{member.directory}: its weights are not those of {first_name}: "
                f"{first_difference(member.meta['weights'], shapes)}."
            )
    for member in knowing:
        if member.tokenizer_hashes != knowing[0].tokenizer_hashes:
            raise UserError(
                f"{member.directory} was trained with other tokenizers than {knowing[0].directory}, so its numbers "
                f"stand for other pieces. Leave one of them out."
            )
    return knowing[0].tokenizer_hashes if knowing else None
