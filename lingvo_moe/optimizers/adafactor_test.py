"""Adafactor is the paper's algorithm, applied to each expert and each stacked layer separately, on any mesh."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Weight
from lingvo_moe.lazy import tf
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

STEPS = 3
# Relative to the largest element, after three steps of means over at most 32 elements, roots and quotients.
TOLERANCE = 32 * harness.FLOAT32_ROUNDING
RATE = InverseSquareRoot(peak_value=0.2, decay_after=25)  # large enough to see

# Every kind of weight: E > M, so that the two largest dimensions are not the matrix; vectors; a matrix of several
# logical axes.
WEIGHTS = {
    "dense": Weight((8, 16), "MH", "M"),
    "query": Weight((8, 4, 2), "MND", "M"),
    "output": Weight((4, 2, 8), "NDM", "ND"),
    "expert": Weight((32, 8, 2), "EMH", "M"),
    "layer": {"wo": Weight((2, 8, 16, 4), "REHM", "H")},
    "table": Weight((16, 8), "VM", "V"),
    "scale": Weight((8,), "M"),
    "stacked_scale": Weight((3, 8), "RM"),
}


def trees() -> dict:
    """Returns weights and the gradients of each step, whose sizes differ so much that some updates are clipped."""
    random = np.random.default_rng(0)
    declared = tree.flatten(WEIGHTS)
    theta = {path: random.normal(size=weight.shape).astype(np.float32) for path, weight in declared.items()}
    gradients = {
        f"{step}/{path}": (
            10.0 ** random.integers(-4, 3, weight.shape[:1] + (1,) * (len(weight.shape) - 1))
            * random.normal(size=weight.shape)
        ).astype(np.float32)
        for step in range(STEPS)
        for path, weight in declared.items()
    }
    return {"theta": tree.unflatten(theta), "gradients": tree.unflatten(gradients)}


class OneMatrix:
    """Algorithm 4 (5 for a vector) of Shazeer and Stern 2018 for one matrix, with sums as in the paper."""

    def __init__(self, value: np.ndarray):
        self.value, self.row, self.column, self.moment = value.astype(np.float64), 0.0, 0.0, 0.0
        self.momentum = 0.0

    def step(self, gradient: np.ndarray, t: int, rate: float, scaled: bool, beta1: float):
        beta2 = min(0.99, 1 - t**-0.8)
        squared = gradient.astype(np.float64) ** 2 + 1e-30
        if squared.ndim == 2:
            self.row = beta2 * self.row + (1 - beta2) * squared.sum(axis=1)
            self.column = beta2 * self.column + (1 - beta2) * squared.sum(axis=0)
            self.moment = np.outer(self.row, self.column) / self.row.sum()
        else:
            self.moment = beta2 * self.moment + (1 - beta2) * squared
        update = gradient / np.sqrt(self.moment)
        update = update / max(1.0, root_mean_square(update) / 1.0)
        relative = max(1e-3, root_mean_square(self.value)) if scaled else 1.0
        self.momentum = beta1 * self.momentum + (1 - beta1) * relative * update
        self.value = self.value - rate * self.momentum


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def matrices_of(weight: Weight, values: np.ndarray) -> np.ndarray:
    """Returns `[matrices, rows, columns]` or `[vectors, elements]`, by logical axes alone, not by `Weight.rows`."""
    batch = [d for d, axis in enumerate(weight.logical_axes) if axis in "RE"]
    rows = [d for d, axis in enumerate(weight.logical_axes) if axis in weight.fan_in]
    columns = [d for d in range(values.ndim) if d not in batch + rows]
    parts = [batch, rows, columns] if rows else [batch, columns]
    return values.transpose([d for part in parts for d in part]).reshape(
        [int(np.prod([values.shape[d] for d in part])) for part in parts]
    )


def reference(case: dict, scaled: bool = True, beta1: float = 0.0) -> dict[str, np.ndarray]:
    """Returns the weights after all steps of the paper's algorithm, in the shapes of `matrices_of`."""
    results, values, gradients = {}, tree.flatten(case["theta"]), tree.flatten(case["gradients"])
    for path, weight in tree.flatten(WEIGHTS).items():
        matrices = [OneMatrix(value) for value in matrices_of(weight, values[path])]
        for step in range(STEPS):
            for matrix, gradient in zip(matrices, matrices_of(weight, gradients[f"{step}/{path}"])):
                matrix.step(gradient, step + 1, 0.2, scaled, beta1)
        results[path] = np.stack([matrix.value for matrix in matrices])
    return results


def all_steps(optimizer: Adafactor, context: Context = Context()):
    """Returns the function `{theta, gradients} -> {theta, optimizer_state}` of all steps."""

    def function(inputs: dict) -> dict:
        theta, optimizer_state = (
            inputs["theta"],
            tree.map_leaves(lambda entry: tf.zeros(entry.shape), optimizer.state(WEIGHTS)),
        )
        for step in range(STEPS):
            gradients = inputs["gradients"][str(step)]
            theta, optimizer_state = optimizer.update(
                WEIGHTS, theta, gradients, optimizer_state, tf.constant(step), tf.constant(True), context
            )
        return {"theta": theta, "optimizer_state": optimizer_state}

    return function


def eagerly(optimizer: Adafactor, platform: str = "") -> dict[str, np.ndarray]:
    return harness.arrays(all_steps(optimizer, Context(platform=platform))(tree.map_leaves(tf.constant, trees())))


def assert_close(actual: np.ndarray, expected: np.ndarray, path: str):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=path)


@pytest.fixture(scope="module")
def unpartitioned() -> dict:
    return eagerly(Adafactor(learning_rate=RATE, beta1=0.9))


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_equals_the_paper(platform):
    """Algorithms 4 and 5, on every kind of weight."""
    outputs = eagerly(Adafactor(learning_rate=RATE), platform)
    for path, expected in reference(trees()).items():
        assert_close(matrices_of(tree.flatten(WEIGHTS)[path], outputs[f"theta/{path}"]), expected, path)


def test_equals_the_paper_without_relative_steps():
    """`multiply_by_parameter_scale=False`."""
    outputs = eagerly(Adafactor(learning_rate=RATE, multiply_by_parameter_scale=False))
    for path, expected in reference(trees(), scaled=False).items():
        assert_close(matrices_of(tree.flatten(WEIGHTS)[path], outputs[f"theta/{path}"]), expected, path)


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_momentum_averages_the_updates(platform):
    """`beta1`: an exponential average of what would be subtracted; the optimizer state has its shape."""
    optimizer = Adafactor(learning_rate=RATE, beta1=0.9)
    outputs = eagerly(optimizer, platform)
    for path, expected in reference(trees(), beta1=0.9).items():
        assert_close(matrices_of(tree.flatten(WEIGHTS)[path], outputs[f"theta/{path}"]), expected, path)
    declared, flat = tree.flatten(optimizer.state(WEIGHTS)), tree.flatten(WEIGHTS)
    momentum = {path.removesuffix("/momentum"): entry for path, entry in declared.items() if path.endswith("momentum")}
    assert {path: (entry.shape, entry.logical_axes) for path, entry in momentum.items()} == {
        path: (weight.shape, weight.logical_axes) for path, weight in flat.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["", "cpu"])
@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_partitioned_equals_unpartitioned(mesh, platform, unpartitioned):
    """The layout changes summation order alone."""
    optimizer, layout = Adafactor(learning_rate=RATE, beta1=0.9), Layout.of(DeviceMesh.parse(mesh))
    declared = {f"theta/{path}": weight.logical_axes for path, weight in tree.flatten(WEIGHTS).items()}
    logical_axes = declared | {
        f"gradients/{step}/{path.removeprefix('theta/')}": name
        for path, name in declared.items()
        for step in range(STEPS)
    }
    logical_axes |= {
        f"optimizer_state/{path}": entry.logical_axes for path, entry in tree.flatten(optimizer.state(WEIGHTS)).items()
    }
    outputs = harness.run(all_steps(optimizer, Context(layout, platform=platform)), trees(), layout, logical_axes)
    for path, expected in unpartitioned.items():
        assert_close(outputs[path], expected, path)


def test_optimizer_state_is_a_row_and_a_column_of_every_matrix():
    """Also for E > M: second moments are never averaged over experts."""
    optimizer_state = tree.flatten(Adafactor().state(WEIGHTS))
    assert {path: (entry.shape, entry.logical_axes) for path, entry in optimizer_state.items()} == {
        "dense/row": ((8,), "M"),
        "dense/column": ((16,), "H"),
        "query/row": ((8,), "M"),
        "query/column": ((4, 2), "ND"),
        "output/row": ((4, 2), "ND"),
        "output/column": ((8,), "M"),
        "expert/row": ((32, 8), "EM"),
        "expert/column": ((32, 2), "EH"),
        "layer/wo/row": ((2, 8, 16), "REH"),
        "layer/wo/column": ((2, 8, 4), "REM"),
        "table/row": ((16,), "V"),
        "table/column": ((8,), "M"),
        "scale/moment": ((8,), "M"),
        "stacked_scale/moment": ((3, 8), "RM"),
    }
    assert all(entry.stddev == entry.mean == 0.0 for entry in optimizer_state.values())


def update_one(
    weight: Weight, value, gradient, optimizer_state: dict, step: int, platform: str = "", **fields
) -> tuple[np.ndarray, dict]:
    """Makes one eager step of one weight."""
    optimizer = Adafactor(learning_rate=RATE, **fields)
    trees_of_one = (
        {"w": tf.constant(value, tf.float32)},
        {"w": tf.constant(gradient, tf.float32)},
        {"w": optimizer_state},
    )
    theta, optimizer_state = optimizer.update(
        {"w": weight}, *trees_of_one, tf.constant(step), tf.constant(True), Context(platform=platform)
    )
    return theta["w"].numpy(), harness.arrays(optimizer_state["w"])


@pytest.mark.parametrize(
    "step, beta2", [(0, 0.0), (1, 1 - 2**-0.8), (99, 1 - 100**-0.8), (315, 1 - 316**-0.8), (317, 0.99), (10_000, 0.99)]
)
def test_beta2_is_1_minus_t_to_the_minus_0_8_up_to_0_99(step, beta2):
    """The decay of Adafactor section 7.2, with GShard's cap of 0.99."""
    _, optimizer_state = update_one(Weight((2,), "M"), [1, 1], [3, 4], {"moment": tf.constant([100.0, 200.0])}, step)
    expected = beta2 * np.array([100, 200]) + (1 - beta2) * np.array([9, 16])
    np.testing.assert_allclose(optimizer_state["moment"], expected, rtol=1e-5)


def test_each_expert_is_clipped_and_scaled_separately():
    """A hundred times larger weights of one expert make its updates as much larger, and change no other expert's."""
    random = np.random.default_rng(1)
    value, gradient = random.normal(size=(2, 4, 4)), random.normal(size=(2, 4, 4))
    weight = Weight((2, 4, 4), "EMH", "M")
    optimizer_state = {"row": tf.ones((2, 4)), "column": tf.ones((2, 4))}

    def moves(scale_of_first: float, gradient_of_first: float) -> np.ndarray:
        factors = np.array([scale_of_first, 1.0])[:, None, None]
        before = np.float32(value * factors)
        after, _ = update_one(
            weight, before, gradient * np.array([gradient_of_first, 1.0])[:, None, None], optimizer_state, 100
        )
        return after - before

    plain, larger, steeper = moves(1, 1), moves(100, 1), moves(1, 1e4)
    np.testing.assert_array_equal(plain[1], larger[1])
    np.testing.assert_array_equal(plain[1], steeper[1])
    np.testing.assert_allclose(larger[0], 100 * plain[0], rtol=1e-3, atol=1e-3)
    relative = root_mean_square(steeper[0]) / root_mean_square(value[0].astype(np.float32))
    assert relative == pytest.approx(101**-0.5, rel=1e-3), "clipped to the learning rate of step 100"


def test_minimum_scale_applies_to_small_weights():
    """Weights of zero can move."""
    after, _ = update_one(Weight((2,), "M"), [0, 0], [1, -1], {"moment": tf.zeros(2)}, 0, minimum_scale=0.5)
    np.testing.assert_allclose(after, [-0.1, 0.1], rtol=TOLERANCE)


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_row_without_gradient_is_finite_beside_large_ones(platform):
    """Embedding rows of tokens that did not occur, at the first step, while other gradients are huge."""
    gradient = np.full((4, 8), 1e6, np.float32)
    gradient[1] = 0
    value = np.ones((4, 8), np.float32)
    after, optimizer_state = update_one(
        Weight((4, 8), "VM", "V"), value, gradient, {"row": tf.zeros(4), "column": tf.zeros(8)}, 0, platform
    )
    np.testing.assert_array_equal(after[1], value[1])
    assert (
        np.isfinite(after).all()
        and (after[[0, 2, 3]] < 1).all()
        and all(np.isfinite(entry).all() for entry in optimizer_state.values())
    )


def test_zero_gradients_change_nothing_and_are_finite():
    """The weights of an expert without tokens stay as they are."""
    value = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(np.float32)
    weight, optimizer_state = Weight((2, 3, 4), "EMH", "M"), {"row": tf.zeros((2, 3)), "column": tf.zeros((2, 4))}
    for step in (0, 500):
        after, new_state = update_one(weight, value, np.zeros((2, 3, 4)), optimizer_state, step)
        np.testing.assert_array_equal(after, value)
        assert all(np.isfinite(entry).all() for entry in new_state.values())


def test_no_accepted_epsilon_vanishes():
    """A second moment of 0 would make NaN of a gradient of 0, in a step whose gradients are finite."""
    with pytest.raises(UserError, match="optimizer.epsilon is 1e-39; expected at least 1.17549e-36"):
        Adafactor(epsilon=1e-39)
    for cap in (0.5, 0.99):
        for step in (0, 10**6):
            after, new_state = update_one(
                Weight((2,), "M"),
                np.ones(2),
                np.zeros(2),
                {"moment": tf.zeros(2)},
                step,
                beta2_cap=cap,
                epsilon=1.1755e-38 / (1.0 - cap),
            )
            assert (after == 1.0).all() and (new_state["moment"] > 0.0).all(), (cap, step)


@pytest.mark.parametrize("platform", ["", "cpu"])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_a_step_that_is_not_finite_changes_nothing(platform, beta1):
    """Weights, momentum and second moments, of every kind of weight, compiled; the same gradients count if it is."""
    optimizer, context = Adafactor(learning_rate=RATE, beta1=beta1), Context(platform=platform)

    def function(inputs: dict) -> dict:
        is_finite = tf.reduce_all(inputs["is_finite"])
        before = inputs["theta"], inputs["gradients"], inputs["state"]
        theta, optimizer_state = optimizer.update(WEIGHTS, *before, tf.constant(3), is_finite, context)
        return {"theta": theta, "state": optimizer_state}

    theta, random = trees()["theta"], np.random.default_rng(4)
    state = tree.map_leaves(lambda e: random.uniform(1, 2, e.shape).astype(np.float32), optimizer.state(WEIGHTS))
    inputs = {"theta": theta, "state": state, "gradients": tree.map_leaves(lambda w: w * np.float32(np.nan), theta)}
    kept = harness.run(function, {**inputs, "is_finite": np.array([True, False])})
    for path, value in tree.flatten({"theta": theta, "state": state}).items():
        np.testing.assert_array_equal(kept[path], value, err_msg=path)
    changed = harness.run(function, {**inputs, "is_finite": np.array([True, True])})
    assert all(np.isnan(value).all() for value in changed.values())


@pytest.mark.parametrize(
    "field, value", [("beta1", 1.0), ("beta2_cap", -0.1), ("clipping_threshold", 0.0), ("epsilon", math.nan)]
)
def test_numbers_out_of_range(field, value):
    """Found when a command starts, not by a loss that is not finite."""
    with pytest.raises(UserError, match=rf"optimizer\.{field} is {value}; expected"):
        Adafactor(**{field: value})


@pytest.mark.parametrize("devices", [1, 2])
def test_a_cpu_writes_a_matrix_twice(devices):
    """The new momentum and the new weights, but no squares, no update and no copy: each is a pass over memory.

    On two devices each of them has half of the columns.
    """
    layout = Layout.of(DeviceMesh((devices,)), "M:x")
    weight, optimizer = Weight((256, 64), "VM", "V"), Adafactor(learning_rate=RATE, beta1=0.9)

    def function(inputs: dict) -> dict:
        theta, optimizer_state = optimizer.update(
            {"w": weight},
            *({"w": tensors} for tensors in (inputs["state"]["theta"], inputs["gradient"], inputs["state"]["factors"])),
            tf.constant(3),
            tf.reduce_all(inputs["is_finite"]),
            Context(layout, platform="cpu"),
        )
        return {"state": {"theta": theta["w"], "factors": optimizer_state["w"]}}

    matrix = np.zeros(weight.shape, np.float32)
    factors = {"row": matrix[:, 0], "column": matrix[0], "momentum": matrix}
    inputs = {"state": {"theta": matrix, "factors": factors}, "gradient": matrix, "is_finite": np.ones(1, bool)}
    logical_axes = {
        **dict.fromkeys(("state/theta", "state/factors/momentum", "gradient"), "VM"),
        "state/factors/row": "V",
        "state/factors/column": "M",
    }
    program = harness.lower_for(function, inputs, layout, logical_axes, donated=("state",))
    entry = harness.engine(layout).compile(program).hlo().partition("\nENTRY")[2]
    written = re.findall(rf"%\S+ = f32\[256,{64 // devices}\]\S* (?!parameter)([a-z\-]+)\(", entry)
    assert written == ["fusion", "fusion"]
