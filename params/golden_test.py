"""Every registered model equals its golden text, and every golden text has a model."""

from __future__ import annotations

import pathlib

import pytest

from lingvo_moe import experiment, registry

_GOLDEN = pathlib.Path(__file__).parent.parent / "testdata" / "golden"


@pytest.mark.parametrize("name", registry.names())
def test_golden_text(name):
    """No hyperparameter of a registered model changes by accident; `make golden` rewrites the texts."""
    golden = _GOLDEN / f"{name}.txt"
    assert golden.read_text(encoding="utf-8") == experiment.text(name, experiment.get(name)), (
        f"{name} differs from {golden.name}; if that is intended, run `make golden` and commit the difference."
    )


def test_no_golden_text_without_a_model():
    """A model that is renamed or removed takes its golden text with it."""
    assert {path.stem for path in _GOLDEN.glob("*.txt")} == set(registry.names())
