"""The buffers of a pipeline, run eagerly on one device: inverses are exact, and each stage reads its own weights."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.layers.pipeline_schedule import Schedule
from lingvo_moe.layers.stage_buffers import StageBuffers, select
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context

# Five repeats on two stages leave padding; four microbatches of three rows.
SCHEDULES = {name: Schedule.of(name, 2, 4, 5) for name in ("gpipe", "circular")}


@pytest.fixture(params=SCHEDULES)
def buffers(request) -> StageBuffers:
    return StageBuffers(SCHEDULES[request.param], Context())


def numbered(*shape: int) -> tf.Tensor:
    return tf.reshape(tf.range(1.0, np.prod(shape) + 1.0), shape)


def test_microbatches_take_rows_in_turn_and_join_to_the_batch(buffers):
    """Row b is in microbatch b modulo M: with contiguous rows each device would have to send its own."""
    batch = numbered(12, 2)
    microbatches = buffers.divide(batch, "BM")
    np.testing.assert_array_equal(microbatches[1], batch[1::4])
    np.testing.assert_array_equal(buffers.join(microbatches, "BM"), batch)


def test_only_the_first_stage_stores_microbatches(buffers):
    """`fetch` returns what was stored, even if bubbles have left something, NaN included, at other stages."""
    microbatches = buffers.divide(numbered(12, 2), "BM")
    stored = buffers.store(microbatches, "BM")
    assert stored.shape == (2, 4, 3, 2) and not np.any(stored[1])
    spoilt = tf.concat([stored[:1], np.nan * stored[1:]], axis=0)
    np.testing.assert_array_equal(buffers.fetch(spoilt, "BM"), microbatches)


@pytest.mark.parametrize("mask", [[True, False], [False, True], [False, False]])
def test_put_replaces_one_microbatch_of_the_chosen_stages(buffers, mask):
    """Other microbatches, and other stages, keep theirs."""
    stored, state = numbered(2, 4, 3, 2), -numbered(2, 3, 2)
    found = buffers.put(stored, tf.constant(2), tf.constant(mask), state)
    expected = stored.numpy()
    expected[mask, 2] = state.numpy()[mask]
    np.testing.assert_array_equal(found, expected)


def test_a_state_goes_to_the_next_stage_and_back():
    """The last stage passes to the first one."""
    buffers, state = StageBuffers(Schedule.of("gpipe", 3, 3, 3), Context()), numbered(3, 2)
    passed = buffers.pass_on(state, "B")
    np.testing.assert_array_equal(passed, state.numpy()[[2, 0, 1]])
    np.testing.assert_array_equal(buffers.pass_back(passed, "B"), state)


def test_weights_by_stage_pad_with_zeros_and_convert_back(buffers):
    """GPipe's stage has consecutive repeats, the circular schedule's every second one."""
    weight = numbered(5, 2)
    by_stage = buffers.by_stage(weight, "RM")
    repeats = [[0, 1, 2], [3, 4, 5]] if buffers.schedule.rounds == 1 else [[0, 2, 4], [1, 3, 5]]
    padded = np.concatenate([weight, np.zeros((1, 2))])
    np.testing.assert_array_equal(by_stage, padded[np.array(repeats)])
    np.testing.assert_array_equal(buffers.by_repeat(by_stage), weight)


def test_each_turn_reads_the_weight_of_the_repeat_that_the_schedule_computes(buffers):
    """In every iteration and stage that is no bubble; otherwise a layer would run with the weights of another one."""
    schedule = buffers.schedule
    repeats = buffers.by_stage(tf.range(schedule.repeats, dtype=tf.int32)[:, None], "RM")
    computed = 0
    for number in range(schedule.iterations):
        iteration = schedule.at(tf.constant(number))
        for j in range(schedule.repeats_per_iteration):
            found, expected = (
                buffers.stage_weight(repeats, iteration, tf.constant(j), "RM")[:, 0].numpy(),
                iteration.repeat(j).numpy(),
            )
            valid = iteration.stages.busy.numpy() & (expected < schedule.repeats)
            np.testing.assert_array_equal(found[valid], expected[valid])
            computed += int(valid.sum())
    assert computed == schedule.repeats * schedule.microbatches, "each microbatch passes each layer once"


def test_gradients_are_added_to_the_weight_that_was_read(buffers):
    """A gradient of another repeat would train the wrong layer; other weights stay as they are."""
    schedule, stacked = buffers.schedule, numbered(2, buffers.schedule.repeats_per_stage, 2)
    iteration, part = schedule.at(tf.constant(schedule.iterations // 2)), 100.0 * numbered(2, 2)
    found = buffers.add_to_stage_weight(stacked, iteration, tf.constant(0), part, "RM")
    expected = stacked.numpy()
    for stage, index in enumerate(iteration.index_in_stage(tf.constant(0)).numpy()):
        expected[stage, index] += part[stage]
    np.testing.assert_array_equal(found, expected)


def test_select_masks_values_that_are_not_finite():
    """What a bubble computes may be NaN; a product with a mask of 0 and 1 would pass it on."""
    found = select(tf.constant([True, False]), tf.constant([[1.0], [np.nan]]), 0)
    np.testing.assert_array_equal(found, [[1.0], [0.0]])
