"""Top-1 routing follows a sequential transcription of Switch Transformers, section 2.1."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.layers.routers.base import make_router
from lingvo_moe.testing import routers as cases

ROUTER = make_router("switch")


def one_group(gates: np.ndarray, paddings: np.ndarray, capacity: int) -> tuple[np.ndarray, dict[str, float]]:
    """Equations 1 to 6 for one group, token by token: combine weights `[S, E, C]` and metrics."""
    size, num_experts = gates.shape
    combine, count = np.zeros((size, num_experts, capacity)), np.zeros(num_experts, int)
    tokens = [s for s in range(size) if not paddings[s]]
    for s in tokens:
        expert = int(np.argmax(gates[s]))
        if count[expert] < capacity:
            combine[s, expert, count[expert]] = gates[s, expert]  # equation 2
        count[expert] += 1
    fractions = count / max(len(tokens), 1)  # equation 5
    probabilities = gates[tokens].mean(axis=0) if tokens else np.zeros(num_experts)  # equation 6
    return combine, {"aux_loss": float(fractions @ probabilities) / num_experts, "count": count}


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("capacity", [1, 3, 16])
def test_follows_the_paper(case, capacity):
    """Weights, positions, auxiliary loss and metrics, with ties, paddings and full buffers."""
    logits, paddings = cases.CASES[case]()
    routing = cases.route(ROUTER, logits, paddings, capacity)
    gates = cases.gates(logits)
    expected = [one_group(*group, capacity) for group in zip(gates, paddings)]
    cases.assert_combine_weights(routing, [combine for combine, _ in expected], capacity)
    present = [metrics for (_, metrics), padded in zip(expected, paddings) if not padded.all()]
    aux_loss = np.mean([metrics["aux_loss"] for metrics in present]) if present else 0.0
    num_tokens, num_experts = max((~paddings).sum(), 1), gates.shape[-1]
    counts = sum(metrics["count"] for _, metrics in expected)
    dropped = (~paddings).sum() - sum((combine > 0).any(axis=(1, 2)).sum() for combine, _ in expected)
    metrics = {
        "aux_loss": aux_loss,
        "overflow": dropped / num_tokens,
        "expert_load": counts.max() * num_experts / num_tokens,
    }
    cases.assert_metrics(ROUTER, routing, metrics)


def test_gradients():
    """Those of the weight and of the auxiliary loss, with the choice and the counts constant."""
    logits, paddings = cases.CASES["random"]()
    cases.assert_gradients(ROUTER, logits, paddings, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", cases.MESHES)
def test_partitioned_equals_unpartitioned(mesh):
    """Value and gradient on 8 devices; groups are routed without communication of their tokens."""
    cases.assert_partitioned(ROUTER, mesh, capacity=3)


def test_one_expert_is_refused():
    with pytest.raises(UserError, match="num_experts is 1; router switch needs at least 2 experts"):
        ROUTER.check(1)


def test_capacity_and_experts_per_token():
    """The paper's capacity is factor * S / E; one expert computes a token."""
    assert ROUTER.capacity(1024, 128, 1.25) == 10
    assert ROUTER.experts_per_token(8) == 1.0
