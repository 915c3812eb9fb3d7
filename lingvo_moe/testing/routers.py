"""Shared by the tests of routers: logits to route, and comparisons of a `Routing` with a transcription."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lingvo_moe import tree
from lingvo_moe.layers.routers.base import Router
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.dispatch import DISPATCHES
from lingvo_moe.ops.routing import Routing
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

GROUPS, SIZE, EXPERTS, MODEL = 8, 16, 4, 4
MESHES = ("8", "4x2")
# A softmax over E, a sum over S tokens, and a quotient, in another order than the transcription's.
TOLERANCE = 32 * harness.FLOAT32_ROUNDING


def _random(spread: float = 2.0, padded: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    logits = random.normal(scale=spread, size=(GROUPS, SIZE, EXPERTS)).astype(np.float32)
    return logits, random.random((GROUPS, SIZE)) < padded


def _tied() -> tuple[np.ndarray, np.ndarray]:
    logits, paddings = _random()
    return np.round(logits), paddings


def _one_expert() -> tuple[np.ndarray, np.ndarray]:
    logits, paddings = _random(0.1)
    return logits + np.float32(5.0) * (np.arange(EXPERTS) == 2), paddings


def _padded_groups() -> tuple[np.ndarray, np.ndarray]:
    logits, paddings = _random()
    paddings[1], paddings[2, :3] = True, True
    return logits, paddings


CASES: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "random": _random,
    "tied": _tied,
    "all to one expert": _one_expert,
    "padded groups": _padded_groups,
    "all padded": lambda: _random(padded=1.1),
    "no paddings": lambda: _random(padded=0.0),
}


def gates(logits: np.ndarray) -> np.ndarray:
    """The softmax of `[..., E]`, float64 but rounded as the routers' own, so that ties and their order are the same."""
    return tf.nn.softmax(tf.constant(logits)).numpy().astype(np.float64)


def route(router: Router, logits: np.ndarray, paddings: np.ndarray, capacity: int, training: bool = False) -> Routing:
    """Routes eagerly."""
    context = Context(seed=tf.constant([1, 2])) if training else Context()
    return router(tf.constant(logits), tf.constant(paddings), capacity, context)


def assert_combine_weights(routing: Routing, expected: list[np.ndarray], capacity: int):
    """Compares Algorithm 2's `[G, S, E, C]` with that of each group."""
    found = routing.combine_weights(expected[0].shape[1], capacity).numpy()
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=1e-9)


def assert_metrics(router: Router, routing: Routing, expected: dict[str, float]):
    """Compares the metrics, which are those that the router declares."""
    assert set(routing.metrics) == set(router.metric_names) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(routing.metrics[name], value, rtol=TOLERANCE, atol=1e-9, err_msg=name)


def assert_gradients(router: Router, logits: np.ndarray, paddings: np.ndarray, capacity: int):
    """Compares the gradient of weights and auxiliary loss with respect to the logits with differences of values."""

    def value(logits: tf.Tensor) -> tf.Tensor:
        routing = router(logits, tf.constant(paddings), capacity, Context())
        scales = tf.reshape(tf.cos(tf.range(tf.size(routing.weights), dtype=tf.float32)), routing.weights.shape)
        return tf.reduce_sum(routing.weights * scales) + 10.0 * routing.metrics.get("aux_loss", 0.0)

    given = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(given)
        total = value(given)
    gradient, step = tape.gradient(total, given).numpy(), 1e-2
    assert np.abs(gradient).max() > 1e-2
    for index in [(0, 0, 0), (0, 1, 2), (3, 5, 1), (7, 15, 3)]:
        change = np.zeros_like(logits)
        change[index] = step
        difference = (value(given + change) - value(given - change)).numpy() / (2 * step)
        np.testing.assert_allclose(gradient[index], difference, rtol=1e-2, atol=2e-3)


def dispatched(router: Router, way: str, capacity: int, layout: Layout = Layout()) -> Callable[[dict], dict]:
    """Routes tokens, scales the buffers of each expert, and combines, with gradients; a function of `inputs()`."""

    def function(inputs: dict) -> dict:
        context = Context(layout, inputs["seed"])
        logits, paddings = context.annotate(inputs["logits"], "GSE"), context.annotate(inputs["paddings"], "GS")
        routing = router(logits, paddings, capacity, context)
        buffers = DISPATCHES[way](routing, EXPERTS, capacity, context)
        rows = buffers.dispatch(context.annotate(inputs["tokens"], "GSM"))
        rows = tf.einsum("GECM,EM->GECM", rows, inputs["scales"])
        return {"outputs": buffers.combine(context.annotate(rows, "GECM")), "metrics": routing.metrics}

    return harness.with_gradients(function)


def inputs() -> dict:
    """Logits, paddings, tokens, a scale for each expert, and the seed of random routing."""
    logits, paddings = _random()
    random = np.random.default_rng(1)
    return {
        "logits": logits,
        "paddings": paddings,
        "tokens": random.normal(size=(GROUPS, SIZE, MODEL)).astype(np.float32),
        "scales": random.normal(size=(EXPERTS, MODEL)).astype(np.float32),
        "seed": np.array([3, 4], np.int32),
    }


_LOGICAL_AXES = {"logits": "GSE", "paddings": "GS", "tokens": "GSM", "scales": "eM"}
_LOGICAL_AXES |= {f"gradients/{path}": axes for path, axes in _LOGICAL_AXES.items()} | {"values/outputs": "GSM"}


def assert_partitioned(router: Router, mesh: str, capacity: int):
    """Both dispatches on the mesh equal an einsum on one device, in value and gradient.

    On one mesh axis only sums cross devices: groups are routed where they are.
    """
    expected = harness.arrays(dispatched(router, "einsum", capacity)(tree.map_leaves(tf.constant, inputs())))
    layout = Layout.of(DeviceMesh.parse(mesh))
    for way in DISPATCHES:
        executable = harness.compile_for(dispatched(router, way, capacity, layout), inputs(), layout, _LOGICAL_AXES)
        if len(layout.mesh.shape) == 1:
            assert set(harness.collectives(executable)) == {"all-reduce"}, way
        found = harness.arrays(executable(inputs()))
        for path, value in expected.items():
            atol = TOLERANCE * max(np.abs(value).max(), 1e-9)
            np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=f"{way} {path}")
