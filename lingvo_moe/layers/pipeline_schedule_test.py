"""Schedules: every stage computes every microbatch once per round, after the stage before it, and bubbles are few."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.layers.pipeline_schedule import Schedule
from lingvo_moe.lazy import tf

# One microbatch of a stack of layers, in the order in which a schedule computes it.
Visit = tuple[int, int, int]  # iteration, stage, repeat


def visits(schedule: Schedule) -> dict[int, list[Visit]]:
    """By microbatch, what the stages compute that is not masked; checks the indices and the masks on the way."""
    found: dict[int, list[Visit]] = {m: [] for m in range(schedule.microbatches)}
    held: dict[tuple[int, int], int] = {}
    for number in range(schedule.iterations):
        iteration = schedule.at(tf.constant(number))
        assert int(iteration.first.microbatch) == iteration.stages.microbatch[0]
        assert int(iteration.last.microbatch) == iteration.stages.microbatch[-1]
        for mask, stage in ((iteration.starts, iteration.first), (iteration.ends, iteration.last)):
            np.testing.assert_array_equal(mask, [bool(stage.busy), *[False] * (schedule.stages - 1)])
        for j in range(schedule.repeats_per_iteration):
            for stage in np.flatnonzero(iteration.active(j).numpy()):
                repeat, index = int(iteration.repeat(j)[stage]), int(iteration.index_in_stage(j)[stage])
                found[int(iteration.stages.microbatch[stage])].append((number, int(stage), repeat))
                assert held.setdefault((int(stage), index), repeat) == repeat and index < schedule.repeats_per_stage
    return found


@hypothesis.given(
    pipeline=st.sampled_from(["none", "gpipe", "circular"]),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 6),
    repeats=st.integers(1, 9),
)
def test_every_microbatch_passes_all_layers_in_order(pipeline, stages, microbatches, repeats):
    """One stage after another without a pause; between rounds it may wait in the first stage's storage."""
    hypothesis.assume(stages <= repeats)
    schedule = Schedule.of(pipeline, stages, microbatches, repeats)
    for found in visits(schedule).values():
        assert [repeat for _, _, repeat in found] == list(range(repeats))
        for (before, stage, _), (after, following, _) in itertools.pairwise(found):
            if following == stage:
                assert after == before or schedule.stages == 1
            else:
                assert following == (stage + 1) % schedule.stages
                assert after == before + 1 if following else after > before


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 16])
def test_bubbles_of_gpipe_are_the_papers(stages, microbatches):
    """GPipe's share is (L - 1) / (microbatches + L - 1), of a microbatch's pass through a stage."""
    schedule = Schedule.of("gpipe", stages, microbatches, repeats=16)
    assert schedule.iterations == microbatches + stages - 1
    assert schedule.bubble_share == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_circular_schedule_has_fewer_bubbles():
    """With as many rounds as a stage has layers, the bubbles are of one layer instead of all of a stage."""
    gpipe, circular = (Schedule.of(name, 4, 8, repeats=16) for name in ("gpipe", "circular"))
    assert (gpipe.rounds, gpipe.repeats_per_iteration, circular.rounds, circular.repeats_per_iteration) == (1, 4, 4, 1)
    assert circular.bubble_share == pytest.approx(3 / (4 * 8 + 3)) and circular.bubble_share < gpipe.bubble_share / 3


def test_without_a_pipeline_one_stage_has_all_layers():
    """Whatever the number of stages would be with one."""
    assert Schedule.of("none", 4, 8, repeats=16) == Schedule(1, 1, 16, 16, 8)


@pytest.mark.parametrize("pipeline", ["gpipe", "circular"])
def test_a_stage_holds_its_share_of_the_layers_rounded_up(pipeline):
    """Stages are of equal size. An operator's scope says in how many iterations it is no bubble, for `analysis`."""
    schedule = Schedule.of(pipeline, 4, 8, repeats=10)
    assert schedule.repeats_per_stage == 3
    assert (
        schedule.scope
        == {
            "gpipe": "pipeline_8_of_11_iterations",
            "circular": "pipeline_24_of_27_iterations",
        }[pipeline]
    )


def test_few_microbatches_wait_for_all_stages_in_a_circular_schedule():
    """A microbatch cannot start its second round before it has passed the last stage."""
    schedule = Schedule.of("circular", 4, 2, repeats=8)
    assert (schedule.iterations_per_round, schedule.iterations) == (4, 4 + 2 + 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("pipe", 2, 2, 4), "pipeline is 'pipe'; use one of none, gpipe, circular"),
        (("gpipe", 0, 2, 4), "stages is 0; it must be at least 1"),
        (("gpipe", 2, 0, 4), "microbatches is 0; it must be at least 1"),
        (("circular", 8, 2, 4), "stages is 8, but a stack repeats its pattern of layers 4 times.*with N up to 4"),
    ],
)
def test_impossible_schedules_are_errors_with_a_remedy(arguments, message):
    """The message has the numbers that would do."""
    with pytest.raises(UserError, match=message):
        Schedule.of(*arguments)
