"""Every registered model is what its golden text says, and no text is left without a model."""

from __future__ import annotations

import pathlib

import pytest

from lingvo_moe import experiment, registry

_GOLDEN = pathlib.Path(__file__).parent.parent / "testdata" / "golden"


@pytest.mark.parametrize("name", registry.names())
def test_golden_text(name):
    """No hyperparameter of a registered model changes unnoticed; `make golden` rewrites the texts on purpose."""
    golden = _GOLDEN / f"{name}.txt"
    assert golden.read_text(encoding="utf-8") == experiment.text(name, experiment.get(name)), (
        f"{name} is no longer what {golden.name} says; if that is meant, run `make golden` and commit the difference."
    )


def test_no_golden_text_without_a_model():
    """A model that was renamed or dropped leaves nothing behind."""
    assert {path.stem for path in _GOLDEN.glob("*.txt")} == set(registry.names())
