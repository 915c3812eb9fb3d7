"""Rewrites testdata/golden after a change that is meant (`make golden`): what the registered models are, and what they exchange.

NAME.txt is every hyperparameter of a model; collectives/NAME.txt the exchanges of its miniature (lingvo_moe.analysis.miniature),
for models that are made for a slice.
"""

from __future__ import annotations

import functools
import pathlib

from absl import flags

from lingvo_moe import experiment, registry
from lingvo_moe.analysis import miniature
from lingvo_moe.cli import app
from lingvo_moe.utils import progress

DIRECTORY = pathlib.Path(__file__).parent.parent / "testdata" / "golden"
_VALUES = flags.FlagValues()
flags.DEFINE_boolean("collectives", True, "also the exchanges, which takes minutes", flag_values=_VALUES)
_SMALLEST_SLICE = 32  # cores; what runs at home is tested as it is


def main(arguments: list[str]):
    """Writes the texts of all models in the zoo and removes those of models that are gone."""
    app.no_arguments(arguments[1:])
    _write(DIRECTORY, {name: experiment.text(name, experiment.get(name)) for name in registry.names()})
    if _VALUES.collectives:
        _write(
            DIRECTORY / "collectives",
            {name: collectives(name) for name in progress.track(giants(), "compiling miniatures")},
        )


def giants() -> list[str]:
    """The registered models that are made for a slice."""
    return [name for name in registry.names() if experiment.get(name).mesh.size >= _SMALLEST_SLICE]


def collectives(name: str) -> str:
    """The exchanges of a model's miniature; models of one structure have the same one, which is compiled once."""
    return _collectives(miniature.of(name))


@functools.cache
def _collectives(small: experiment.Experiment) -> str:
    return miniature.collectives(small)


def _write(directory: pathlib.Path, texts: dict[str, str]):
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.txt"):
        path.unlink()
    for name, text in texts.items():
        (directory / f"{name}.txt").write_text(text, encoding="utf-8")
        print(directory / f"{name}.txt")


if __name__ == "__main__":
    app.run(main, _VALUES)
