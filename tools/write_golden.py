"""Rewrites testdata/golden after an intended change (`make golden`): hyperparameters and collectives of the models.

NAME.txt holds every hyperparameter of a registered model; collectives/NAME.txt the collectives of its miniature
(lingvo_moe.analysis.miniature), for models that are made for a slice.
"""

from __future__ import annotations

import functools
import pathlib

from absl import flags

from lingvo_moe import experiment, registry
from lingvo_moe.analysis import miniature, plan
from lingvo_moe.cli import app
from lingvo_moe.utils import output_files, progress
from tools import plan_zoo

DIRECTORY = pathlib.Path(__file__).parent.parent / "testdata" / "golden"
_VALUES = flags.FlagValues()
flags.DEFINE_boolean("collectives", True, "also write the collectives, which takes minutes", flag_values=_VALUES)


def main(arguments: list[str]):
    """Writes the texts of all registered models and removes those of removed ones."""
    app.no_arguments(arguments[1:])
    _write(DIRECTORY, {name: experiment.text(name, experiment.get(name)) for name in registry.names()})
    if _VALUES.collectives:
        _write(
            DIRECTORY / "collectives",
            {name: collectives(name) for name in progress.track(plan_zoo.large_models(), "compiling miniatures")},
        )


def collectives(name: str) -> str:
    """Returns the collectives of a model's miniature."""
    return miniature.collectives(planned(name))


def planned(name: str) -> plan.Plan:
    """Returns the plan of a model's miniature; models of one structure share it, and it is compiled once."""
    return _planned(miniature.of(name))


def golden_collectives(name: str) -> str:
    """Returns the golden text of `collectives`."""
    return (DIRECTORY / "collectives" / f"{name}.txt").read_text(encoding="utf-8")


@functools.cache
def _planned(small: experiment.Experiment) -> plan.Plan:
    return miniature.make_plan(small)


def _write(directory: pathlib.Path, texts: dict[str, str]):
    """Writes the texts, then removes others: an interruption or a full disk leaves old texts, but no gap."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = directory / f"{name}.txt"
        with output_files.atomic_writer(str(path)) as file:
            file.write(text)
        print(path)
    for path in directory.glob("*.txt"):
        if path.stem not in texts:
            path.unlink()


if __name__ == "__main__":
    app.run(main, _VALUES)
