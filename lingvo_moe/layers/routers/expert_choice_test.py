"""Expert-choice routing follows a sequential transcription of Zhou et al. 2022, section 3.2."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.layers.routers.base import make_router
from lingvo_moe.testing import routers as cases

ROUTER = make_router("expert_choice")


def one_group(gates: np.ndarray, paddings: np.ndarray, capacity: int) -> np.ndarray:
    """One group, expert by expert: combine weights `[S, E, C]`, position c being the expert's c-th best token."""
    size, num_experts = gates.shape
    combine = np.zeros((size, num_experts, capacity))
    tokens = [s for s in range(size) if not paddings[s]]
    for expert in range(num_experts):
        best = sorted(tokens, key=lambda s: (-gates[s, expert], s))[:capacity]
        for position, s in enumerate(best):
            combine[s, expert, position] = gates[s, expert]
    return combine


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("capacity", [1, 3, 8, 16])
def test_follows_the_paper(case, capacity):
    """Each expert takes its best tokens, and paddings only where there are no others; they weigh nothing."""
    logits, paddings = cases.CASES[case]()
    routing = cases.route(ROUTER, logits, paddings, capacity)
    expected = [one_group(*group, capacity) for group in zip(cases.gates(logits), paddings)]
    cases.assert_combine_weights(routing, expected, capacity)
    taken = np.array([(combine > 0).any(axis=(1, 2)) for combine in expected])
    dropped = (~paddings & ~taken).sum() / max((~paddings).sum(), 1)
    cases.assert_metrics(ROUTER, routing, {"overflow": dropped})


def test_a_token_that_weighs_nothing_is_dropped():
    """The third expert takes the first token, by a gate that has underflowed to 0: it is not dispatched."""
    logits, paddings = np.float32([[[199, 200, 0], [200, 0, 0], [0, 200, 0]]]), np.zeros((1, 3), bool)
    routing = cases.route(ROUTER, logits, paddings, 1)
    np.testing.assert_array_equal(routing.weights, [[[0, 0, 0], [1, 0, 0], [0, 1, 0]]])
    assert float(routing.metrics["overflow"]) == pytest.approx(1 / 3)


def test_load_is_balanced():
    """Every expert has exactly C tokens, so there is nothing for an auxiliary loss to balance."""
    logits, paddings = cases.CASES["no paddings"]()
    weights = cases.route(ROUTER, logits, paddings, 5).weights.numpy()
    assert (np.count_nonzero(weights, axis=1) == 5).all()
    assert "aux_loss" not in ROUTER.metric_names


def test_a_later_token_changes_the_experts_of_an_earlier_one():
    """Why decoders refuse this router."""
    logits, paddings = cases.CASES["no paddings"]()
    before = cases.route(ROUTER, logits, paddings, 4).weights.numpy()
    logits[:, -1] = 9.0 * (np.arange(cases.EXPERTS) == 0)
    after = cases.route(ROUTER, logits, paddings, 4).weights.numpy()
    assert (before[:, :-1, 0] != after[:, :-1, 0]).any() and not ROUTER.is_causal


def test_gradients():
    """Those of the weights, with the choice constant."""
    logits, paddings = cases.CASES["random"]()
    cases.assert_gradients(ROUTER, logits, paddings, 8)


@pytest.mark.parametrize("mesh", cases.MESHES)
def test_partitioned_equals_unpartitioned(mesh):
    """Value and gradient on 8 devices, with both dispatches; the selection is sharded by group."""
    cases.assert_partitioned(ROUTER, mesh, capacity=8)


def test_capacity_is_its_own():
    """C = c * S / E in training and inference, whatever the model's factors are."""
    router = make_router("expert_choice:choices_per_token=3")
    assert router.capacity(64, 8, None) == router.capacity(64, 8, 1.0) == 24
    assert router.experts_per_token(8) == 3.0 and ROUTER.experts_per_token(8) == 2.0


@pytest.mark.parametrize("choices", ["0.0", "nan", "inf"])
def test_impossible_settings_are_errors(choices):
    """Infinity and NaN too: no capacity can be computed from them."""
    with pytest.raises(
        UserError, match=f"router expert_choice: choices_per_token is {choices}; expected a number above 0"
    ):
        make_router(f"expert_choice:choices_per_token={choices}")
    with pytest.raises(UserError, match="num_experts is 1; router expert_choice needs at least 2"):
        ROUTER.check(1)
