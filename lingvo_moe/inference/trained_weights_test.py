"""Protects what inference runs with: weights are read by the tokenizers that they were trained with."""

from __future__ import annotations

import contextlib
import pathlib

import numpy as np
import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.data.batching import InputConfig, Readers
from lingvo_moe.errors import UserError
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.steps import weight_specs
from lingvo_moe.training.checkpoint import Checkpoints

NAME = "m4.Quickstart"
SMALL = [f"model.{field}=8" for field in ("model_dim", "hidden_dim", "head_dim", "num_heads", "num_experts")]
CONFIG = experiment.get(NAME, [*SMALL, *(f"model.{side}_vocabulary=64" for side in ("source", "target"))])
SPECS = weight_specs(CONFIG.model.weights())


def _save(logdir: pathlib.Path, value: float, readers: list[str] | None = None):
    """Saves weights of zeros, the last of one of them `value`."""
    theta = {path: np.zeros(spec.shape, spec.dtype) for path, spec in tree.flatten(SPECS).items()}
    theta["embedding/table"][-1, -1] = value
    with contextlib.closing(Checkpoints(logdir, keep=1)) as checkpoints:
        checkpoints.save_weights(4, NAME, tree.unflatten(theta), "a test", readers)


def test_weights_alone_are_not_read_by_other_tokenizers(tmp_path, monkeypatch):
    """An average or a converted file says which it was trained with, as training's checkpoints do."""
    _save(tmp_path, 0, ["x", "y"])
    for identities in (("x", "y"), ("x", "z")):
        monkeypatch.setattr(InputConfig, "open_readers", lambda *_, found=identities: Readers({}, found))
        expected = pytest.raises(
            UserError, match=f"--tokenizers=.*: not the tokenizers that {tmp_path} was trained with"
        )
        with (
            expected if identities == ("x", "z") else contextlib.nullcontext(),
            trained_weights(NAME, CONFIG, tmp_path),
        ):
            pass
