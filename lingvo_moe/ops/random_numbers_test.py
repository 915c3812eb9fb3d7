"""Random numbers: the published generator, no element twice, and every device makes its own part alone."""

from __future__ import annotations

import math
import resource
from unittest import mock

import numpy as np
import pytest

from lingvo_moe.lazy import tf
from lingvo_moe.ops import random_numbers
from lingvo_moe.ops.random_numbers import fold_seed, uniform
from lingvo_moe.program import lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.testing import harness

SEED = np.int32([1, -2])
SAMPLES = 250_000


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0xFD36D048, 0x2D17272C)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_the_hash_is_threefry_of_13_rounds(key, counter, expected):
    """The known answers that the authors publish with the generator."""
    words = random_numbers._threefry(*(tf.constant(words, tf.uint32) for words in (key, counter[0], counter[1])))
    assert tuple(int(word) for word in words) == expected


def test_numbers_are_uniform_and_independent_of_their_neighbours():
    """Within five standard deviations of what independent uniform numbers give."""
    numbers = uniform(tf.constant(SEED), (500, 500)).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    chi_square = ((counts - SAMPLES / 100) ** 2 / (SAMPLES / 100)).sum()
    assert abs(chi_square - 99) < 5 * math.sqrt(2 * 99)
    for shift, axis in ((1, 0), (1, 1), (2, 1), (250, 0)):
        correlation = np.corrcoef(numbers.ravel(), np.roll(numbers, shift, axis).ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(SAMPLES)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4, 5), (1, 4, 5)])
@pytest.mark.parametrize("word", [2**32, 64, 20])
def test_no_two_elements_share_a_counter(shape, word):
    """With a word of few values in place of 2^32: large models have weights of more elements than a word can count."""
    with (
        mock.patch.object(random_numbers, "_WORD", word),
        mock.patch.object(random_numbers, "_constant", wraps=random_numbers._constant) as constant,
    ):
        words = [np.broadcast_to(counters.numpy(), shape).ravel() for counters in random_numbers._counters(shape)]
    assert all(call.args[0] < word for call in constant.call_args_list), "a stride that a word cannot hold"
    assert len(set(zip(*words))) == math.prod(shape)
    assert words[0].max() < word


@pytest.mark.parametrize("word", [2**32, 20])
def test_some_rows_have_the_numbers_of_the_whole_tensor(word):
    """Devices that compute their rows separately draw the dropout masks of one that computes all of them."""
    with mock.patch.object(random_numbers, "_WORD", word):
        whole = uniform(tf.constant(SEED), (6, 3, 5))
        rows = uniform(tf.constant(SEED), (2, 3, 5), random_numbers.Rows(tf.constant(2), 6))
    np.testing.assert_array_equal(rows, whole[2:4])


def test_every_name_and_number_has_a_seed_of_its_own():
    keys = ["a", "b", "train", 0, 1, 2, 2**31 - 1]
    seeds = {tuple(fold_seed(tf.constant(seed), key).numpy()) for seed in ([1, 2], [2, 1], [1, 3]) for key in keys}
    assert len(seeds) == 3 * len(keys)


def test_a_number_and_a_tensor_of_it_fold_alike():
    """A loop's counter is a tensor, an unrolled loop's is a number; both draw the same."""
    np.testing.assert_array_equal(fold_seed(tf.constant(SEED), 3), fold_seed(tf.constant(SEED), tf.constant(3)))


@pytest.mark.parametrize("mesh", ["2", "8", "4x2"])
def test_the_same_bits_on_any_number_of_devices_and_each_makes_its_own(mesh):
    """A device that made them all would need memory for them all."""

    def function(layout):
        return lambda inputs: {"y": layout.annotate(uniform(inputs["seed"], (16, 4, 64)), "EMH")}

    layout = Layout.of(DeviceMesh.parse(mesh))
    one = harness.run(function(Layout()), {"seed": SEED})["y"]
    executable = harness.compile_for(function(layout), {"seed": SEED}, layout, {"y": "EMH"})
    np.testing.assert_array_equal(one, harness.arrays(executable({"seed": SEED}))["y"])
    memory = executable.memory()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= one.nbytes / layout.mesh.size + 1024
    assert not harness.collectives(executable)


def test_lowering_makes_no_numbers_on_the_host():
    """A program of a model that no host could hold is lowered from its shapes alone; here, of 2 GiB of numbers."""
    shape = (2**14, 2**15)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seed = {"seed": Spec((2,), "int32", "s")}
    lower("drawn", lambda inputs: {"sum": tf.reduce_sum(uniform(inputs["seed"], shape))}, seed, {}, Layout())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_each_row_has_the_numbers_of_its_own_seed():
    """Whatever the other rows are; a row's are uniform, and those of each number are others."""
    seeds = tf.constant([[1, 2], [3, 4], [1, 2]], tf.int32)
    rows = random_numbers.uniform_by_row(seeds, (200, 50), tf.constant(7))
    alone = random_numbers.uniform_by_row(seeds[1:2], (200, 50), tf.constant(7))
    np.testing.assert_array_equal(rows[0], rows[2])
    np.testing.assert_array_equal(rows[1], alone[0])
    others = random_numbers.uniform_by_row(seeds, (200, 50), tf.constant(8))
    for one, other in ((rows[0], rows[1]), (rows[0], others[0])):
        assert abs(np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]) < 5 / math.sqrt(10_000)
    counts, _ = np.histogram(rows[:2], bins=50, range=(0, 1))
    assert abs(((counts - 400) ** 2 / 400).sum() - 49) < 5 * math.sqrt(2 * 49)
