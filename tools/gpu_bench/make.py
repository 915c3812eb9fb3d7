"""Makes the programs of a benchmark on an accelerator, for a machine that has only JAX and NumPy.

    python -m tools.gpu_bench.make [--directory=build/gpu_bench] [--model=m4.Small] [--set FIELD=VALUE ...]

The default is m4.Small, but wide: 8 layers of M 1024 and H 8192 with 16 experts, bfloat16, 65,536 tokens on each side;
a training step needs 48 GiB, by `plan`.
`tools.gpu_bench.run` runs the programs of the directory.
"""

from __future__ import annotations

import json
import os
import pathlib

from absl import flags

from lingvo_moe import experiment, registry
from lingvo_moe.analysis.flops import training_step
from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.models.translation import Translation
from lingvo_moe.sharding.layout import DeviceMesh
from tools.gpu_bench import FACTS, PROGRAMS

_WIDE = (
    "model.model_dim=1024",
    "model.hidden_dim=8192",
    "model.num_heads=16",
    "model.head_dim=64",
    "model.num_groups=64",
    "model.activation_dtype=bfloat16",
    "model.unroll=True",
    "input.batch_size=256",
    "input.source_length=256",
    "input.target_length=256",
    "decoding_batch=32",
    "optimizer.learning_rate.peak_value=0.001",
    "optimizer.learning_rate.warmup_steps=0",
    "platform=gpu",
)
# The programs are copied to another machine.
_MAX_BYTES = 64 * 2**20

_VALUES = flags.FlagValues()
flags.DEFINE_string("directory", "build/gpu_bench", "directory of the programs", flag_values=_VALUES)
flags.DEFINE_string("model", "m4.Small", "a registered translation model", flag_values=_VALUES)
flags.DEFINE_multi_string("set", [], "further changed settings, FIELD=VALUE", flag_values=_VALUES)


def main(arguments: list[str]):
    """Writes the programs."""
    app.no_arguments(arguments[1:])
    if not experiment.get(_VALUES.model).translates:
        raise UserError(f"--model={_VALUES.model} does not translate; name a model that does, for instance m4.Small.")
    own = experiment.get(_VALUES.model, [*_WIDE, *_VALUES.set], DeviceMesh((1,)))
    size = make(own, registry.full_name(_VALUES.model), pathlib.Path(_VALUES.directory))
    print(
        f"{_VALUES.directory}: {', '.join(PROGRAMS)} of {registry.full_name(_VALUES.model)}, "
        f"{own.model.num_weights():,} weights, {size / 2**20:.1f} MiB"
    )


def make(own: Experiment, name: str, directory: pathlib.Path) -> int:
    """Writes the programs of an experiment and their facts; returns the programs' total size in bytes.

    Raises:
      UserError: the directory cannot be written to, or the programs are too large to be copied.
    """
    model = own.model
    assert isinstance(model, Translation), "the programs include the beam search"
    specs = own.input.specs()
    made = {
        "init": own.steps.init,
        "train": lambda: own.steps.train(specs),
        "decode": lambda: own.steps.decode(own.decoding_specs(), own.search),
    }
    facts = {
        "model": name,
        "weights": model.num_weights(),
        "flop": training_step(model, own.input),
        "tokens": own.input.batch_size * sum(own.input.lengths.values()),
        "dtype": model.activation_dtype,
        "vocabulary": min(model.source_vocabulary, model.target_vocabulary),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS:
            made[program]().save(os.fspath(directory / f"{program}.zip"))
        (directory / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--directory={directory}: cannot be written to ({error.strerror}); name another one."
        ) from None
    size = sum((directory / f"{program}.zip").stat().st_size for program in PROGRAMS)
    if size > _MAX_BYTES:
        raise UserError(
            f"the programs have {size / 2**20:.0f} MiB, {_MAX_BYTES // 2**20} are allowed; pass --set "
            f"model.unroll=False, with which the size does not grow with the layers."
        )
    return size


if __name__ == "__main__":
    app.run(main, _VALUES)
