"""Top-k routing without dropped tokens follows a sequential transcription; with k = 2 its choices are Algorithm 1's."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.layers.routers.base import make_router
from lingvo_moe.testing import routers as cases


def one_group(gates: np.ndarray, paddings: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, float]:
    """One group, choice by choice: combine weights `[S, E, S]`, the choices of each expert, and the auxiliary loss."""
    size, num_experts = gates.shape
    combine, count = np.zeros((size, num_experts, size)), np.zeros(num_experts, int)
    tokens = [s for s in range(size) if not paddings[s]]
    best = {s: sorted(range(num_experts), key=lambda e: (-gates[s, e], e))[:k] for s in tokens}
    for choice in range(k):
        for s in tokens:
            expert = best[s][choice]
            combine[s, expert, count[expert]] = gates[s, expert] / gates[s, best[s]].sum()
            count[expert] += 1
    probabilities = gates[tokens].mean(axis=0) if tokens else np.zeros(num_experts)
    return combine, count, float(count / (k * max(len(tokens), 1)) @ probabilities) / num_experts


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_follows_the_transcription(case, k):
    """Every present token has k experts, whatever the others choose."""
    router = make_router(f"top_k:k={k}")
    logits, paddings = cases.CASES[case]()
    routing = cases.route(router, logits, paddings, cases.SIZE)
    expected = [one_group(*group, k) for group in zip(cases.gates(logits), paddings)]
    cases.assert_combine_weights(routing, [combine for combine, _, _ in expected], cases.SIZE)
    assert (np.count_nonzero(routing.weights.numpy(), axis=-1) == np.where(paddings, 0, k)).all()
    losses = [loss for (_, _, loss), padded in zip(expected, paddings) if not padded.all()]
    load = sum(count for _, count, _ in expected).max() * cases.EXPERTS / (k * max((~paddings).sum(), 1))
    cases.assert_metrics(router, routing, {"aux_loss": np.mean(losses) if losses else 0.0, "expert_load": load})


def test_two_of_k_is_top_2_with_room_for_all():
    """Outside training, where Algorithm 1 draws nothing."""
    logits, paddings = cases.CASES["random"]()
    found, expected = (cases.route(make_router(name), logits, paddings, cases.SIZE) for name in ("top_k:k=2", "top2"))
    np.testing.assert_array_equal(found.experts, expected.experts)
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=cases.TOLERANCE)


def test_gradients():
    """Those of the weights and of the auxiliary loss, with choices and counts constant."""
    logits, paddings = cases.CASES["random"]()
    cases.assert_gradients(make_router("top_k:k=3"), logits, paddings, cases.SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", cases.MESHES)
def test_partitioned_equals_unpartitioned(mesh):
    """Value and gradient on 8 devices, with both dispatches and three choices per token."""
    cases.assert_partitioned(make_router("top_k:k=3"), mesh, cases.SIZE)


def test_no_capacity_cuts_a_token():
    """Whatever the model's factor is."""
    assert make_router("top_k:k=3").capacity(100, 8, 1.0) == 100
    assert make_router("top_k:k=3").experts_per_token(8) == 3.0


@pytest.mark.parametrize(
    ("choice", "num_experts", "message"),
    [
        ("top_k:k=0", 8, "k is 0; it must be at least 1"),
        ("top_k:k=4", 3, "num_experts is 3; router top_k with k=4 needs at least 4 experts"),
    ],
)
def test_impossible_k_is_an_error(choice, num_experts, message):
    with pytest.raises(UserError, match=message):
        make_router(choice).check(num_experts)
