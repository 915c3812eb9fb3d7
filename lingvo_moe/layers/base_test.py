"""Declarations of weights, and random numbers that depend on their key alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer, Weight, initial_value, matrix
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

SEED = np.int32([1, 2])
SAMPLES = 10_000


def training() -> Context:
    return Context(seed=tf.constant(SEED))


@pytest.mark.parametrize(
    "logical_axes, fan_in, rows, columns",
    [
        ("MND", "M", (0,), (1, 2)),
        ("NDM", "ND", (0, 1), (2,)),
        ("EMH", "M", (1,), (2,)),
        ("EHM", "H", (1,), (2,)),
        ("REMH", "M", (2,), (3,)),
        ("RMND", "M", (1,), (2, 3)),
        ("VM", "V", (0,), (1,)),
        ("me", "m", (0,), (1,)),
        ("M", "", (), (0,)),
        ("RM", "", (), (1,)),
    ],
)
def test_rows_are_contracted_and_columns_are_the_other_axes(logical_axes, fan_in, rows, columns):
    weight = Weight((2,) * len(logical_axes), logical_axes, fan_in)
    assert (weight.rows, weight.columns) == (rows, columns)


def test_weight_needs_one_size_per_logical_axis():
    with pytest.raises(ValueError, match=r"'MH' has shape \(3,\)"):
        Weight((3,), "MH")


def test_repeated_adds_a_leading_axis():
    weight = matrix("MND", fan_in="M", M=4, N=2, D=3)
    stacked = weight.repeated(5)
    assert stacked == dataclasses.replace(weight, shape=(5, 4, 2, 3), logical_axes="RMND")
    assert stacked.size == 5 * weight.size == 120


def test_zeros_declare_state_that_is_sharded_as_the_weight():
    """Of a weight, and of its factors; whatever its own initial value is."""
    weight = matrix("EMH", fan_in="M", E=4, M=2, H=3)
    assert weight.zeros() == Weight((4, 2, 3), "EMH") and weight.zeros(weight.columns) == Weight((4, 2), "EM")
    assert not initial_value(Weight((2,), "M", mean=1.0).zeros(), "scale", tf.constant(SEED)).numpy().any()


def test_matrix_keeps_the_variance_of_unit_inputs():
    assert matrix("NDM", fan_in="ND", N=4, D=16, M=7).stddev == 1 / 8
    assert matrix("me", fan_in="m", gain=3.0, M=9, E=2) == Weight((9, 2), "me", "m", stddev=1.0)


def test_initial_values_have_the_declared_distribution():
    value = initial_value(Weight((100, 100), "MH", "M", stddev=0.5, mean=2.0), "theta/wi", tf.constant(SEED)).numpy()
    # Five standard deviations of the estimates of a mean and of a standard deviation from 10,000 samples, at most.
    assert abs(value.mean() - 2.0) < 5 * 0.5 / np.sqrt(SAMPLES)
    assert abs(value.std() - 0.5) < 5 * 0.5 / np.sqrt(2 * SAMPLES)
    assert abs(value - 2.0).max() <= 0.5 * np.sqrt(3)
    constant = initial_value(Weight((3,), "M", mean=1.0), "scale", tf.constant(SEED))
    np.testing.assert_array_equal(constant, np.ones(3, np.float32))


def test_initial_values_depend_on_seed_and_path_alone():
    weight = matrix("MH", fan_in="M", M=8, H=8)
    value, same, other_path, other_seed = (
        initial_value(weight, path, tf.constant(seed)).numpy()
        for path, seed in (("a/wi", [1, 2]), ("a/wi", [1, 2]), ("b/wi", [1, 2]), ("a/wi", [1, 3]))
    )
    np.testing.assert_array_equal(value, same)
    for other in (other_path, other_seed):
        assert abs(np.corrcoef(value.ravel(), other.ravel())[0, 1]) < 0.6 and (value != other).all()


def test_fold_gives_every_use_its_own_random_numbers():
    context = training()
    keys = ["a", "b", 0, 1, 2]
    draws = [context.fold(key).uniform((50,), "x").numpy() for key in keys] + [
        context.uniform((50,), "x").numpy(),
        context.uniform((50,), "y").numpy(),
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_random_numbers_are_sharded(mesh):
    """Neither those of a weight's initial value, nor those of dropout, forward and backward."""
    weight = matrix("EMH", fan_in="M", E=8, M=64, H=64)

    def function(layout):
        def dropped(inputs):
            context = Context(layout, inputs["seed"])
            start = layout.annotate(initial_value(weight, "w", inputs["seed"]), "EMH")
            return {"y": layout.annotate(context.dropout(start * inputs["scale"], 0.5, "key", "EMH"), "EMH")}

        return harness.with_gradients(dropped)

    layout = Layout.of(DeviceMesh.parse(mesh))
    inputs = {"seed": SEED, "scale": np.float32(1)}
    memory = harness.compile_for(function(layout), inputs, layout, {"values/y": "EMH"}).memory()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < weight.size * 4  # one unsharded tensor


def test_dropout_zeroes_the_rate_and_scales_the_rest():
    rate = 0.25
    dropped = training().dropout(tf.ones((100, 100)), rate, "key", "BM").numpy()
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / (1 - rate))}
    assert abs((dropped == 0).mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / SAMPLES)


def test_dropout_scales_bfloat16_by_the_exact_factor():
    """Rounded once: 1 - 0.1 is 0.898 in bfloat16, which would scale by 0.17 % too much."""
    ones = tf.ones((64, 64), tf.bfloat16)
    dropped = tf.cast(training().dropout(ones, 0.1, "key", "BM"), tf.float32).numpy()
    (_, scaled) = np.unique(dropped)
    assert scaled == tf.cast(tf.cast(1 / 0.9, tf.bfloat16), tf.float32).numpy()


@pytest.mark.parametrize("context, rate", [(Context(), 0.5), (None, 0.0)])
def test_dropout_is_for_training_and_for_rates_above_zero(context, rate):
    tensor = tf.ones((2, 3))
    assert (context or training()).dropout(tensor, rate, "key", "BM") is tensor


@pytest.mark.parametrize("seed", [0, tf.constant(0), np.int64([0, 1])])
def test_a_seed_is_two_words(seed):
    """Others would fail inside of a hash."""
    with pytest.raises(UserError, match=r"the seed of a context is an int.*; expected an int32 \[2\]"):
        Context(seed=seed)


def test_evaluation_has_no_seed_to_fold():
    assert Context().fold(1) == Context() and not Context().training
    assert Context().fold("layer") == Context(scope="layer/")


def test_cast_is_to_the_dtype_of_activations():
    assert Context(dtype="bfloat16").cast(tf.ones(1)).dtype == tf.bfloat16


def test_num_weights_counts_all_leaves():

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Two(Layer):
        def weights(self) -> dict:
            return {"a": Weight((2, 3), "MH"), "nested": {"b": Weight((4,), "M")}}

    assert Two().num_weights() == 10
    with pytest.raises(NotImplementedError):
        Layer().weights()
