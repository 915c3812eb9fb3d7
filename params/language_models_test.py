"""The language models are the papers': GSPMD tables 2, 3, 6 and 7, GShard (ICLR 2021) table 3; and their small siblings learn."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe import experiment, testing
from lingvo_moe.layout import DeviceMesh, Layout

_BINARY_BILLION = 2**30
# Published weights are whole numbers of binary billions; embeddings are counted here, too (0.8 % of 64B).
_ROUNDING = 0.02

# Weights in binary billions, layers, M, H, N, experts, mesh, batch in sequences.
ROWS = {
    "dense_lm.Dense64BMesh8x16": (64, 32, 8192, 65_536, 128, 0, "8x16", 64),  # GSPMD table 2
    "dense_lm.Dense64BMesh16x32": (64, 32, 8192, 65_536, 128, 0, "16x32", 256),
    "dense_lm.Dense64BMesh32x64": (64, 32, 8192, 65_536, 128, 0, "32x64", 1024),
    "dense_lm.Dense128B": (128, 64, 8192, 65_536, 128, 0, "32x64", 512),
    "dense_lm.Dense256B": (256, 128, 8192, 65_536, 128, 0, "32x64", 256),
    "dense_lm.Dense512B": (512, 256, 8192, 65_536, 128, 0, "32x64", 128),
    "dense_lm.Dense1T": (1024, 128, 16_384, 131_072, 256, 0, "32x64", 128),
    "dense_lm.Dense64B": (64, 32, 8192, 65_536, 128, 0, "32x64", 512),  # GShard (ICLR) table 3
    "dense_lm.Dense4T": (4096, 128, 32_768, 262_144, 512, 0, "32x64", 32),
    "dense_lm.Narrow16BMesh4x16": (16, 64, 4096, 16_384, 64, 0, "4x16", 48),  # GSPMD table 3
    "dense_lm.Narrow16BMesh8x16": (16, 64, 4096, 16_384, 64, 0, "8x16", 96),
    "dense_lm.Narrow16BMesh8x32": (16, 64, 4096, 16_384, 64, 0, "8x32", 192),
    "dense_lm.Narrow16BMesh16x4": (16, 64, 4096, 16_384, 64, 0, "16x4", 48),
    "dense_lm.Narrow16BMesh16x8": (16, 64, 4096, 16_384, 64, 0, "16x8", 96),
    "dense_lm.Narrow16BMesh32x8": (16, 64, 4096, 16_384, 64, 0, "32x8", 192),
    "sparse_lm.MoE10B32E": (9.6, 36, 1024, 8192, 16, 32, "32", 128),  # GSPMD table 6
    "sparse_lm.MoE37B128E": (37, 36, 1024, 8192, 16, 128, "128", 512),
    "sparse_lm.MoE145B512E": (145, 36, 1024, 8192, 16, 512, "512", 2048),
    "sparse_lm.MoE577B2048E": (577, 36, 1024, 8192, 16, 2048, "2048", 8192),
    "hybrid_lm.MoE33B8E": (33, 12, 8192, 32_768, 128, 8, "8x4", 32),  # GSPMD table 7
    "hybrid_lm.MoE57B16E": (57, 12, 8192, 32_768, 128, 16, "16x8", 128),
    "hybrid_lm.MoE420B32E": (420, 12, 8192, 131_072, 512, 32, "32x16", 128),
    "hybrid_lm.MoE804B64E": (804, 12, 8192, 131_072, 512, 64, "64x32", 512),
}
SMALL = {"dense_lm.Small": "4x2", "sparse_lm.Small": "8", "hybrid_lm.Small": "4x2"}
# What tests of training make smaller still: the structure stays.
_TINY = ["model.model_dim=32", "model.hidden_dim=64", "model.num_heads=2", "model.head_dim=16", "model.target_vocabulary=64",
         "input.target_length=16"]
# As in translation_test: rounding of sums in another order, amplified by four steps of Adafactor.
_TRAINED_TOLERANCE = 1e-5


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_the_papers(name):
    """A wrong dimension anywhere in a model would show in its number of weights."""
    weights, layers, model_dim, hidden_dim, heads, experts, mesh, batch = ROWS[name]
    config = experiment.get(name)
    model = config.model
    assert model.num_weights() == pytest.approx(weights * _BINARY_BILLION, rel=_ROUNDING)
    assert (model.num_layers, model.model_dim, model.hidden_dim, model.num_heads) == (layers, model_dim, hidden_dim, heads)
    assert (model.num_experts, str(config.mesh), config.input.batch_size) == (experts, mesh, batch)
    assert (config.input.target_length, model.activation_dtype, model.target_vocabulary) == (1024, "bfloat16", 32_000)


@pytest.mark.parametrize("name, letters", [
    ("dense_lm.Dense64B", {"BTM": "x,_,y", "BTND": "x,_,y,_", "BTH": "x,_,y", "MND": "x,y,_", "NDM": "y,_,x", "MH": "x,y",
                           "HM": "y,x"}),
    ("hybrid_lm.MoE804B64E", {"BTM": "x,_,y", "EMH": "x,_,y", "EHM": "x,y,_", "EGCM": "x,_,_,y", "EGCH": "x,_,_,y",
                              "GECM": "x,_,_,y", "GSEC": "x,_,_,_", "MH": "x,y"}),
    ("sparse_lm.MoE577B2048E", {"BTM": "x,_,_", "EMH": "x,_,_", "GECM": "x,_,_,_", "EGCM": "x,_,_,_", "MH": "_,_"})])
def test_tensors_lie_as_the_papers_figures_say(name, letters):
    """GSPMD table 1, "2D finalized", and figure 8."""
    layout = experiment.get(name).steps.layout
    assert {key: ",".join(axis or "_" for axis in layout.axes(key)) for key in letters} == letters


def batches(config: experiment.Experiment, step: int) -> dict:
    """Texts that count upwards by one from a random number: soon predictable."""
    shape = (config.input.batch_size, config.input.target_length)
    starts = np.random.default_rng(step).integers(0, 40, (shape[0], 1))
    labels = (4 + (starts + np.arange(shape[1])) % 40).astype(np.int32)
    ids = np.concatenate([np.full((shape[0], 1), 2, np.int32), labels[:, :-1]], axis=1)
    return {"target": {"ids": ids, "labels": labels, "segment_ids": np.ones(shape, np.int32),
                       "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))}}


def train(config: experiment.Experiment, steps: int) -> list[float]:
    """The losses of the first steps, on virtual devices."""
    own = testing.engine(Layout.of(config.mesh))
    init, step = own.load(config.steps.init()), own.load(config.steps.train(config.batch_specs()))
    state, losses = init({"seed": np.int32([0, 7])})["state"], []
    for number in range(steps):
        outputs = step({"state": state, "batch": batches(config, number)})
        state = outputs["state"]
        losses.append(float(outputs["metrics"]["loss"]))
    return losses


@pytest.mark.parametrize("name", SMALL)
def test_a_small_sibling_trains_alike_on_its_mesh_and_on_one_device(name):
    config = experiment.get(name, _TINY)
    assert str(config.mesh) == SMALL[name]
    many, one = train(config, 4), train(experiment.get(name, _TINY, DeviceMesh((1,))), 4)
    np.testing.assert_allclose(many, one, rtol=_TRAINED_TOLERANCE)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_sibling_learns(name):
    """From the logarithm of the vocabulary to the one continuation that counting has."""
    config = experiment.get(name, [*_TINY, "model.residual_dropout=0", "optimizer.learning_rate.warmup_steps=5"], DeviceMesh((1,)))
    losses = train(config, 60)
    assert losses[0] > 3.5 and np.mean(losses[-5:]) < losses[0] / 2
