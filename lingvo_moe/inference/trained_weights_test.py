"""Protects what inference runs with: finite weights, read by the tokenizers that they were trained with."""

from __future__ import annotations

import contextlib
import pathlib

import jax
import numpy as np
import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.errors import UserError
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.steps import weight_specs
from lingvo_moe.training.checkpoint import Checkpoints

NAME = "m4.Quickstart"
SMALL = [f"model.{field}=8" for field in ("model_dim", "hidden_dim", "head_dim", "num_heads", "num_experts")]
CONFIG = experiment.get(NAME, [*SMALL, *(f"model.{side}_vocabulary=64" for side in ("source", "target"))])
SPECS = weight_specs(CONFIG.model.weights())


def _save(logdir: pathlib.Path, value: float, tokenizer_hashes: list[str] | None = None):
    """Saves weights of zeros, the last of one of them `value`."""
    theta = {path: np.zeros(spec.shape, spec.dtype) for path, spec in tree.flatten(SPECS).items()}
    theta["embedding/table"][-1, -1] = value
    with contextlib.closing(Checkpoints(logdir, keep=1)) as checkpoints:
        checkpoints.save_weights(4, NAME, tree.unflatten(theta), "a test", tokenizer_hashes)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    """With them, each line is translated into the same token; any of the devices may hold them."""
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("all",))
    rows, everywhere = (
        jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(*axes)) for axes in (("all",), ())
    )
    shardings = {path: rows if path == "embedding/table" else everywhere for path in tree.flatten(SPECS)}
    _save(tmp_path, value)
    refused = pytest.raises(UserError, match="checkpoints/4: embedding/table has values that are not finite; delete it")
    with trained_weights(NAME, CONFIG, tmp_path) as restore, refused:
        restore(tree.unflatten(shardings))


def test_weights_alone_are_not_read_by_other_tokenizers(tmp_path, monkeypatch):
    """An average or a converted file says which it was trained with, as training's checkpoints do."""
    _save(tmp_path, 0, ["x", "y"])
    monkeypatch.setattr(InputConfig, "fingerprints", lambda *_: ("x", "y"))
    with trained_weights(NAME, CONFIG, tmp_path):
        pass
    monkeypatch.setattr(InputConfig, "fingerprints", lambda *_: ("x", "z"))
    refused = pytest.raises(UserError, match=f"--tokenizers=.*: not the tokenizers that {tmp_path} was trained with")
    with refused, trained_weights(NAME, CONFIG, tmp_path):
        pass
