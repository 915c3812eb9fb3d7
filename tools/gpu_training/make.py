"""Makes the programs of a training run, for a machine that has JAX, NumPy and SentencePiece but no TensorFlow.

    python -m tools.gpu_training.make --model=m4.Pocket --initial_weights=FILE [--set FIELD=VALUE ...]
        [--initial_set FIELD=VALUE ...] [--directory=build/gpu_training]

`tools.gpu_training.run` trains with them. The initial weights are read as `train --initial_weights` reads them, and
written in int8.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import numpy as np
from absl import flags
from safetensors.numpy import save_file

from lingvo_moe import experiment, registry
from lingvo_moe.cli import app, initial_weights
from lingvo_moe.cli.run_config import TrainConfig
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.training.quantization import quantize
from tools.gpu_training import FACTS, PROGRAMS, WEIGHTS

_VALUES = flags.FlagValues()
flags.DEFINE_string("directory", "build/gpu_training", "directory of the programs", flag_values=_VALUES)
flags.DEFINE_string("model", "m4.Pocket", "a registered model that reads texts", flag_values=_VALUES)
flags.DEFINE_multi_string("set", [], "changed settings, FIELD=VALUE", flag_values=_VALUES)
flags.DEFINE_string("initial_weights", None, "a file of `checkpoint convert --output`", flag_values=_VALUES)
flags.DEFINE_multi_string("initial_set", [], "settings of the shallower model of that file", flag_values=_VALUES)


def main(arguments: list[str]):
    """Writes the programs, their facts and the initial weights."""
    app.no_arguments(arguments[1:])
    name = registry.full_name(_VALUES.model)
    own = experiment.get(name, ["platform=gpu", *_VALUES.set], DeviceMesh((1,)))
    directory = pathlib.Path(_VALUES.directory)
    config = TrainConfig(
        model=name,
        logdir=os.fspath(directory),  # it has no checkpoints
        initial_weights=_VALUES.initial_weights,
        initial_set=tuple(_VALUES.initial_set),
    )
    _, weights = initial_weights.weights(config, name, own)
    if not weights:
        given = f"={_VALUES.initial_weights}: expected" if _VALUES.initial_weights else " is missing:"
        raise UserError(
            f"--initial_weights{given} a file of weights; make one: `python -m lingvo_moe checkpoint convert "
            "--logdir=LOGDIR --output=weights.safetensors`."
        )
    make(own, name, weights, directory)
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    print("\n".join(f"{directory / file}: {size / 2**20:.1f} MiB" for file, size in sizes.items()))


def make(own: Experiment, name: str, weights: dict[str, np.ndarray], directory: pathlib.Path):
    """Writes the programs of an experiment, their facts, and the initial weights, which are by path.

    Raises:
      UserError: the model reads no texts, its learning rate has no cool-down, or the directory cannot be written to.
    """
    if type(own.input) is not InputConfig:  # that of speech is derived from it
        raise UserError(f"--model={name} reads no texts; name a model that does, for instance m4.Pocket.")
    schedule = own.optimizer.learning_rate
    if not isinstance(schedule, InverseSquareRoot) or not schedule.cooldown_steps:
        raise UserError(
            f"--model={name}: its learning rate has no cool-down ({schedule}); pass --set=optimizer.learning_rate."
            "cooldown_after=N and --set=optimizer.learning_rate.cooldown_steps=M, with M above the number of steps."
        )
    specs = own.input.specs()
    made = {"train": own.steps.train(specs), "evaluate": own.steps.evaluate(specs)}
    facts = {
        "model": name,
        "input": dataclasses.asdict(own.input),
        "schedule": dataclasses.asdict(schedule),
        "vocabularies": own.model.vocabularies,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS:
            made[program].save(os.fspath(directory / f"{program}.zip"))
        (directory / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        save_file(quantize(weights), directory / WEIGHTS)
    except OSError as error:
        raise UserError(f"--directory={directory}: cannot be written to ({error.strerror}).") from None


if __name__ == "__main__":
    app.run(main, _VALUES)
