"""Rewrites testdata/golden: one text per registered model, every hyperparameter of it (`make golden`)."""

from __future__ import annotations

import pathlib

from absl import flags

from lingvo_moe import cli, experiment, registry

_DIRECTORY = pathlib.Path(__file__).parent.parent / "testdata" / "golden"


def main(arguments: list[str]):
    """Writes the texts of all models in the zoo and removes those of models that are gone."""
    del arguments
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    for path in _DIRECTORY.glob("*.txt"):
        path.unlink()
    for name in registry.names():
        (_DIRECTORY / f"{name}.txt").write_text(experiment.text(name, experiment.get(name)), encoding="utf-8")
        print(_DIRECTORY / f"{name}.txt")


if __name__ == "__main__":
    cli.run(main, flags.FlagValues())
