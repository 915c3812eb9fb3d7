"""Makes the programs of a training, for a machine that has JAX, NumPy and SentencePiece but no TensorFlow.

    python -m tools.gpu_training.make --model=m4.Pocket [--set FIELD=VALUE ...] [--directory=build/gpu_training]
        [--initial_weights=FILE [--initial_set FIELD=VALUE ...]]

`tools.gpu_training.run` trains with them. The initial weights are those of the file, if one is named, in int8.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

from absl import flags
from safetensors.numpy import save_file

from lingvo_moe import experiment, overrides, registry, tree
from lingvo_moe.cli import app
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.steps import weight_specs
from lingvo_moe.training import checkpoint_tools
from lingvo_moe.training.deepening import deepen
from lingvo_moe.training.quantization import quantize
from tools.gpu_training import FACTS, PROGRAMS, WEIGHTS

_VALUES = flags.FlagValues()
flags.DEFINE_string("directory", "build/gpu_training", "directory of the programs", flag_values=_VALUES)
flags.DEFINE_string("model", "m4.Pocket", "a registered model that reads texts", flag_values=_VALUES)
flags.DEFINE_multi_string("set", [], "changed settings, FIELD=VALUE", flag_values=_VALUES)
flags.DEFINE_string("initial_weights", None, "a safetensors file; default: random weights", flag_values=_VALUES)
flags.DEFINE_multi_string("initial_set", [], "settings of a shallower model that has them", flag_values=_VALUES)


def main(arguments: list[str]):
    """Writes the programs, their facts and the initial weights."""
    app.no_arguments(arguments[1:])
    name = registry.full_name(_VALUES.model)
    own = experiment.get(name, ["platform=gpu", *_VALUES.set], DeviceMesh((1,)))
    directory = pathlib.Path(_VALUES.directory)
    make(own, name, directory)
    if _VALUES.initial_weights:
        write_weights(own, name, pathlib.Path(_VALUES.initial_weights), _VALUES.initial_set, directory / WEIGHTS)
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    print("\n".join(f"{directory / file}: {size / 2**20:.1f} MiB" for file, size in sizes.items()))


def make(own: Experiment, name: str, directory: pathlib.Path):
    """Writes the programs of an experiment and their facts; raises UserError if they cannot be written."""
    if not isinstance(own.input, InputConfig):
        raise UserError(f"--model={name} reads no texts; name a model that does, for instance m4.Pocket.")
    specs = own.input.specs()
    made = {"train": own.steps.train(specs), "evaluate": own.steps.evaluate(specs)}
    schedule = own.optimizer.learning_rate
    if not isinstance(schedule, InverseSquareRoot):
        raise UserError(
            f"the learning rate of {name} is {schedule}; expected an InverseSquareRoot, with its cool-down."
        )
    facts = {"model": name, "input": dataclasses.asdict(own.input), "schedule": dataclasses.asdict(schedule)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS:
            made[program].save(os.fspath(directory / f"{program}.zip"))
        (directory / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--directory={directory}: cannot be written to ({error.strerror}).") from None


def write_weights(own: Experiment, name: str, file: pathlib.Path, settings: list[str], output: pathlib.Path):
    """Writes the weights of a file in int8, for the experiment's layers if those of the file are fewer."""
    model = own.model
    if settings:
        if not isinstance(model, Transformer):
            raise UserError(f"--initial_set: {name} has no stacks of layers, so leave it out.")
        model = overrides.apply(model, [text.removeprefix("model.") for text in settings])
    step, values = checkpoint_tools.read_safetensors(file, name, weight_specs(model.weights()), "--initial_weights")
    if settings:
        shapes = {path: spec.shape for path, spec in tree.flatten(weight_specs(own.model.weights())).items()}
        values = deepen(values, shapes)
    metadata = {"lingvo_moe": json.dumps({"format": 1, "model": name, "step": step})}
    save_file(quantize(values), output, metadata)


if __name__ == "__main__":
    app.run(main, _VALUES)
