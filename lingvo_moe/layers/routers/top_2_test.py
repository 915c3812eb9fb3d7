"""Routing is Algorithm 1 of GShard: checked against a sequential transcription of it, and by its invariants."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of

from lingvo_moe.errors import UserError
from lingvo_moe.layers.routers.base import expert_capacity, make_router
from lingvo_moe.layers.routers.top_2 import Top2, route
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.testing import harness

# A combine weight is one sum and one quotient of gates, and the 1e-9 that keeps it finite: three roundings.
WEIGHT_TOLERANCE = 4 * harness.FLOAT32_ROUNDING
# The auxiliary loss is a sum of E products of means over S tokens, in another order than the transcription's.
AUX_TOLERANCE = 1e-6


def algorithm_1(
    gates: np.ndarray, paddings: np.ndarray, capacity: int, draws: np.ndarray | None
) -> tuple[np.ndarray, float, np.ndarray]:
    """Algorithm 1 for one group, line by line: (combine weights [S, E, C], l_aux, decisions c_E).

    Paddings are left out, as if the group were shorter. `draws [S]` are line 17's; without them line 19 checks for a
    free buffer position.
    """
    size, num_experts = gates.shape
    combine = np.zeros((size, num_experts, capacity))
    count = np.zeros(num_experts, int)  # line 1
    tokens = [s for s in range(size) if not paddings[s]]
    mean_gates = np.mean(gates[tokens], axis=0) if tokens else np.zeros(num_experts)  # line 3
    for s in tokens:  # line 4
        (g1, e1), (g2, e2) = two_largest(gates[s])  # line 5
        position = count[e1]  # line 7
        if position < capacity:  # line 8
            combine[s, e1, position] = g1 / (g1 + g2)  # lines 6 and 9
        count[e1] = position + 1  # line 11
    aux = sum(count[e] / max(len(tokens), 1) * mean_gates[e] for e in range(num_experts)) / num_experts  # line 13
    for s in tokens:  # line 14
        (g1, e1), (g2, e2) = two_largest(gates[s])  # line 15
        g2 = g2 / (g1 + g2)  # line 16
        position = count[e2]  # line 18
        if position < capacity and (draws is None or 2 * g2 > draws[s]):  # line 19
            combine[s, e2, position] = g2  # line 20
        count[e2] = position + 1  # line 22
    return combine, aux, count


def two_largest(gates: np.ndarray) -> list[tuple[float, int]]:
    """The two largest gates and their experts; of equal gates, the lower expert's first."""
    best = sorted(range(len(gates)), key=lambda e: (-gates[e], e))[:2]
    return [(float(gates[e]), e) for e in best]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Gates `[..., E] float32`."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


def context_of(seed: int | None) -> Context:
    """A context of training under `seed`, or of evaluation."""
    return Context() if seed is None else Context(seed=tf.constant([seed, 7]))


def draws_of(context: Context, groups: int, size: int) -> np.ndarray | None:
    """The random numbers of line 17 that `route` draws in this context, `[G, S]`."""
    return context.uniform((groups, size), "second_expert").numpy() if context.training else None


def check(gates: np.ndarray, paddings: np.ndarray, capacity: int, seed: int | None):
    """Compares `route` with the transcription, group by group."""
    groups, size, num_experts = gates.shape
    context = context_of(seed)
    routing = route(tf.constant(gates), tf.constant(paddings), capacity, context)
    combine = routing.combine_weights(num_experts, capacity).numpy()
    draws = draws_of(context, groups, size)
    expected = [
        algorithm_1(gates[g], paddings[g], capacity, None if draws is None else draws[g]) for g in range(groups)
    ]
    np.testing.assert_allclose(combine, [c for c, _, _ in expected], rtol=WEIGHT_TOLERANCE, atol=1e-9)
    losses = [aux for g, (_, aux, _) in enumerate(expected) if not paddings[g].all()]
    np.testing.assert_allclose(
        routing.metrics["aux_loss"].numpy(), np.mean(losses) if losses else 0.0, rtol=AUX_TOLERANCE
    )


def no_paddings(gates: np.ndarray) -> np.ndarray:
    return np.zeros(gates.shape[:2], bool)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    "groups, size, num_experts, capacity",
    [
        (1, 8, 2, 4),
        (2, 16, 4, 8),
        (3, 64, 8, 16),
        (2, 16, 4, 1),
        (2, 4, 16, 1),
        (4, 6, 32, 2),
        (1, 1, 2, 1),
        (2, 32, 4, 32),
    ],
)
def test_random_gates_follow_algorithm_1(groups, size, num_experts, capacity, seed):
    random = np.random.default_rng(groups * size + num_experts)
    gates = softmax(2.0 * random.normal(size=(groups, size, num_experts)))
    check(gates, random.random((groups, size)) < 0.2, capacity, seed)


def test_training_draws_the_second_expert_in_proportion_to_its_weight():
    """2 * g2 > uniform: of tokens whose second gate is g2 = 0.2, four in ten get it; g2 = 0.5 always does."""
    size = 4000
    gates = np.tile(np.float32([[0.8, 0.2]]), (1, size, 1))
    routing = route(tf.constant(gates), tf.constant(no_paddings(gates)), 2 * size, context_of(3))
    deviation = np.sqrt(0.4 * 0.6 / size)
    assert abs(routing.metrics["second_expert"] - 0.4) < 5 * deviation
    halves = np.full((1, size, 2), 0.5, np.float32)
    routing = route(tf.constant(halves), tf.constant(no_paddings(halves)), 2 * size, context_of(3))
    assert routing.metrics["second_expert"] == 1.0


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("capacity", [1, 2, 5, 12])
@pytest.mark.parametrize(
    "case", ["all tied", "two tied", "all to one expert", "one certain", "certain and tied", "zeros but one"]
)
def test_adversarial_gates_follow_algorithm_1(case, capacity, seed):
    """Ties go to the lower expert; gates of exactly 0 and 1 dispatch nothing that weighs nothing."""
    size, num_experts = 12, 6
    rows = {
        "all tied": np.full(num_experts, 1 / num_experts),
        "two tied": [0.1, 0.3, 0.1, 0.3, 0.1, 0.1],
        "all to one expert": [0.05, 0.05, 0.05, 0.05, 0.7, 0.1],
        "one certain": [0, 0, 1, 0, 0, 0],
        "certain and tied": [0, 0.5, 0, 0, 0, 0.5],
        "zeros but one": [1, 0, 0, 0, 0, 0],
    }
    gates = np.tile(np.float32(rows[case]), (2, size, 1))
    paddings = no_paddings(gates)
    paddings[1, ::3] = True
    check(gates, paddings, capacity, seed)


@pytest.mark.parametrize("where", ["everywhere", "one group", "front", "back", "alternate"])
def test_paddings_take_no_position_and_count_nowhere(where):
    random = np.random.default_rng(5)
    gates = softmax(random.normal(size=(3, 10, 4)))
    paddings = no_paddings(gates)
    chosen = {
        "everywhere": np.s_[:],
        "one group": np.s_[1],
        "front": np.s_[:, :4],
        "back": np.s_[:, 4:],
        "alternate": np.s_[:, ::2],
    }[where]
    paddings[chosen] = True
    check(gates, paddings, 2, seed=4)
    other = np.where(paddings[..., None], softmax(5.0 * random.normal(size=gates.shape)), gates)
    first, second = (route(tf.constant(g), tf.constant(paddings), 2, context_of(4)) for g in (gates, other))
    np.testing.assert_array_equal(first.weights, second.weights)
    assert first.metrics["aux_loss"] == second.metrics["aux_loss"]
    assert not first.weights.numpy()[paddings].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_tokens_than_bfloat16_can_count(dtype):
    """bfloat16 counts to 256: positions must not be counted in the dtype of activations."""
    size = 600
    gates = np.tile(np.float32([0.7, 0.2, 0.1]), (1, size, 1))
    context = Context(dtype=dtype)
    routing = route(tf.constant(gates), tf.constant(no_paddings(gates)), size, context)
    np.testing.assert_array_equal(routing.positions[0, :, 0], np.arange(size))
    np.testing.assert_array_equal(routing.positions[0, :, 1], np.arange(size))
    combine = routing.combine_weights(3, size).numpy()
    assert (combine != 0).sum(axis=1).max() == 1


@strategies.composite
def routed(draw):
    """(gates with many ties, paddings, capacity, seed) of any small shape."""
    integers = strategies.integers
    groups, size, num_experts = draw(integers(1, 3)), draw(integers(1, 12)), draw(integers(2, 9))
    logits = draw(arrays_of.arrays(np.float64, (groups, size, num_experts), elements=integers(-3, 3)))
    paddings = draw(arrays_of.arrays(bool, (groups, size)))
    return softmax(logits), paddings, draw(integers(1, size)), draw(strategies.none() | integers(0, 99))


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(routed())
def test_any_gates_follow_algorithm_1(case):
    check(*case)


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(routed())
def test_invariants(case):
    """No position holds two tokens; a token has at most two, of two experts; its weights sum to at most 1."""
    gates, paddings, capacity, seed = case
    context = context_of(seed)
    routing = route(tf.constant(gates), tf.constant(paddings), capacity, context)
    combine = routing.combine_weights(gates.shape[-1], capacity).numpy()
    taken = combine > 0
    assert taken.sum(axis=1).max() <= 1
    assert taken.sum(axis=(2, 3)).max() <= 2
    assert taken.sum(axis=3).max() <= 1
    assert combine.min() >= 0 and combine.sum(axis=(2, 3)).max() <= 1 + WEIGHT_TOLERANCE
    positions, weights = routing.positions.numpy(), routing.weights.numpy()
    assert positions.min() >= 0 and (positions[weights > 0] < capacity).all()
    assert (routing.experts[..., 0] != routing.experts[..., 1]).numpy().all()


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(routed())
def test_first_choices_win_over_second_ones(case):
    """In an expert's buffer first choices stand before second ones, and inside both the order is the tokens'."""
    gates, paddings, capacity, seed = case
    routing = route(tf.constant(gates), tf.constant(paddings), capacity, context_of(seed))
    experts, positions, weights = (t.numpy() for t in (routing.experts, routing.positions, routing.weights))
    for g in range(gates.shape[0]):
        for e in range(gates.shape[-1]):
            queue = [
                (choice, s)
                for choice in (0, 1)
                for s in range(gates.shape[1])
                if experts[g, s, choice] == e and not paddings[g, s]
            ]
            assert [positions[g, s, choice] for choice, s in queue] == list(range(len(queue)))
            firsts = [s for choice, s in queue if choice == 0]
            assert all((weights[g, s, 0] > 0) == (position < capacity) for position, s in enumerate(firsts))


def aux_loss(gates: np.ndarray, capacity: int) -> float:
    return float(route(tf.constant(gates), tf.constant(no_paddings(gates)), capacity, Context()).metrics["aux_loss"])


def test_aux_loss_of_perfect_balance_and_of_collapse():
    """1/E^2 where every expert gets its share; 1/E where one expert gets everything with certainty."""
    num_experts = 4
    balanced = np.tile(np.eye(num_experts, dtype=np.float32), (1, 3, 1))
    collapsed = np.tile(np.eye(num_experts, dtype=np.float32)[:1], (1, 12, 1))
    losses = [aux_loss(gates, 6) for gates in (balanced, collapsed)]
    np.testing.assert_allclose(losses, [1 / num_experts**2, 1 / num_experts], rtol=AUX_TOLERANCE)


def test_aux_loss_counts_first_choices_before_capacity_cuts():
    random = np.random.default_rng(1)
    gates = softmax(3.0 * random.normal(size=(2, 16, 4)))
    assert aux_loss(gates, 1) == aux_loss(gates, 16)


def test_metrics():
    """Four tokens for expert 0, one position each: the first token gets both experts, three overflow."""
    gates = np.tile(np.float32([0.6, 0.4]), (1, 4, 1))
    routing = route(tf.constant(gates), tf.constant(no_paddings(gates)), 1, Context())
    metrics = {name: float(value) for name, value in routing.metrics.items()}
    assert metrics.pop("aux_loss") == pytest.approx(0.3)
    assert metrics == {"overflow": 0.75, "second_expert": 0.25, "expert_load": 2.0}
    assert set(routing.metrics) == set(Top2().metric_names)
    nothing = route(tf.constant(gates), tf.ones((1, 4), tf.bool), 1, Context())
    assert [float(value) for value in nothing.metrics.values()] == [0.0, 0.0, 0.0, 0.0]


def test_metrics_count_what_is_dispatched():
    """A gate that has underflowed to 0 weighs nothing: tokens without another expert are dropped."""
    gates = np.tile(np.float32([1.0, 0.0]), (1, 4, 1))
    routing = route(tf.constant(gates), tf.constant(no_paddings(gates)), 1, Context())
    assert np.count_nonzero(routing.weights) == 1
    assert (routing.metrics["overflow"], routing.metrics["second_expert"]) == (0.75, 0.0)


def test_gradients_reach_the_gate_weights():
    """Both through the auxiliary loss and through each of the two combine weights: they are what training steers by."""
    random = np.random.default_rng(2)
    tokens, gate = (tf.constant(random.normal(size=shape), tf.float32) for shape in ((2, 8, 4), (4, 3)))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(gate)
        gates = tf.nn.softmax(tf.einsum("GSM,ME->GSE", tokens, gate))
        routing = route(gates, tf.zeros((2, 8), tf.bool), 8, Context())
        objectives = (routing.metrics["aux_loss"], routing.weights[0, 0, 0], routing.weights[0, 0, 1])
    of_aux, of_first, of_second = (tape.gradient(objective, gate).numpy() for objective in objectives)
    assert np.abs(of_aux).max() > 1e-4 and np.abs(of_first).max() > 1e-4
    # The two weights of a token sum to 1, so what one gains the other loses.
    np.testing.assert_allclose(of_first, -of_second, rtol=1e-5, atol=1e-6)


def test_the_aux_loss_gradient_is_that_of_the_mean_gates():
    """Counts are constants: d l_aux / d g_se = c_e / (S^2 E)."""
    gates = tf.constant(softmax(np.random.default_rng(3).normal(size=(1, 6, 3))))
    with tf.GradientTape() as tape:
        tape.watch(gates)
        loss = route(gates, tf.zeros((1, 6), tf.bool), 6, Context()).metrics["aux_loss"]
    counts = np.bincount(gates.numpy()[0].argmax(axis=-1), minlength=3)
    np.testing.assert_allclose(tape.gradient(loss, gates)[0], np.tile(counts / (6**2 * 3), (6, 1)), rtol=AUX_TOLERANCE)


@pytest.mark.parametrize(
    "tokens, experts, factor, capacity",
    [
        (1024, 128, 2.0, 16),
        (8, 2048, 2.0, 1),
        (10, 4, 1.0, 2),
        (10, 4, 2.0, 5),
        (4, 2, 8.0, 4),
        (7, 3, None, 7),
        (100, 4, 1.16, 29),
        (100, 4, 1e308, 100),
    ],
)
def test_capacity_is_2n_by_ge_at_least_one_at_most_all(tokens, experts, factor, capacity):
    """Of the factor as it is written: its nearest float would round 29 down to 28, and overflow at the largest."""
    assert expert_capacity(tokens, experts, factor) == capacity


def test_one_expert_is_refused():
    with pytest.raises(UserError, match="num_experts is 1; router top2 needs at least 2 experts"):
        make_router("top2").check(1)
