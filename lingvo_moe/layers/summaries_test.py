"""Summaries of activations and routers equal numpy's, also where numbers or their squares are not finite."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.layers import summaries
from lingvo_moe.layers.base import Context
from lingvo_moe.testing import harness

# A mean over some dozens of float32 numbers, summed in another order.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING


def test_magnitudes_equal_numpys():
    """Also of rows whose squares overflow float32; NaN and infinity stay in their rows."""
    rows = np.random.default_rng(0).normal(size=(6, 5, 7)).astype(np.float32)
    rows[1] *= 1e25
    rows[2] *= 1e-25
    rows[3] = 0.0
    rows[4, 2, 3], rows[5, 0, 1] = np.nan, -np.inf

    def function(inputs: dict) -> dict:
        return {
            measure.__name__: measure(inputs["rows"], (1, 2))
            for measure in (summaries.largest_magnitude, summaries.norm, summaries.root_mean_square)
        }

    found, wide = harness.run(function, {"rows": rows}), rows.astype(np.float64)
    squares = np.square(wide[:4])
    np.testing.assert_array_equal(found["largest_magnitude"][:4], np.abs(rows[:4]).max(axis=(1, 2)))
    np.testing.assert_allclose(found["norm"][:4], np.sqrt(squares.sum(axis=(1, 2))), rtol=TOLERANCE)
    np.testing.assert_allclose(found["root_mean_square"][:4], np.sqrt(squares.mean(axis=(1, 2))), rtol=TOLERANCE)
    for values in found.values():
        assert np.isnan(values[4]) and values[5] == np.inf


def test_the_larger_of_two_keeps_nan():
    """A microbatch with NaN is the one that `diagnose` looks for, whatever the compiler makes of a maximum with it."""
    first, second = np.float32([[1, np.nan, 3, np.nan]]), np.float32([[2], [np.nan]])
    found = harness.run(lambda i: {"y": summaries.larger(i["a"], i["b"])}, {"a": first, "b": second})["y"]
    np.testing.assert_array_equal(found, [[2, np.nan, 3, np.nan], [np.nan] * 4])


def test_entropies_equal_numpys_without_paddings():
    random = np.random.default_rng(1)
    logits, paddings = 3 * random.normal(size=(3, 8, 5)), random.uniform(size=(3, 8)) < 0.4
    gates = (np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)).astype(np.float32)
    gates[0, 0], paddings[0, 0] = [1, 0, 0, 0, 0], False
    gates[paddings] = np.nan  # not read
    found = harness.run(
        lambda inputs: summaries.router_entropy(inputs["gates"], inputs["paddings"]),
        {"gates": gates, "paddings": paddings},
    )
    present = gates[~paddings].astype(np.float64)

    def entropy(shares):
        return -np.sum(shares * np.log(np.where(shares > 0, shares, 1)), axis=-1)

    np.testing.assert_allclose(found["router_entropy"], entropy(present).mean(), rtol=TOLERANCE)
    np.testing.assert_allclose(found["load_entropy"], entropy(present.mean(axis=0)), rtol=TOLERANCE)


def test_summaries_carry_the_scope_and_are_computed_only_where_collected():
    """A second summary of the same name would hide the first."""

    def never():
        raise AssertionError("computed without a collector")

    Context().fold("decoder").summarize("softmax", never)
    add_summary = summaries.SummaryCollector()
    context = Context(add_summary=add_summary).fold("decoder").named("layer_1")
    context.summarize("self_attention", lambda: {"rms": 1.0, "max": 2.0})
    context.summarize("", lambda: {"own": 3.0})
    assert {name: float(value) for name, value in add_summary.values.items()} == {
        "decoder/layer_1/self_attention/rms": 1.0,
        "decoder/layer_1/self_attention/max": 2.0,
        "decoder/layer_1/own": 3.0,
    }
    with pytest.raises(ValueError, match="summary decoder/layer_1/own is added twice"):
        context.summarize("", lambda: {"own": 4.0})
