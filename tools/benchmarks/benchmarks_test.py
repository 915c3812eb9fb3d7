"""Ratios, their spread, what makes one meaningless, the page's markers, lines between us and a worker. Nothing is timed."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys

import pytest

from lingvo_moe.errors import UserError
from tools.benchmarks import comparisons, document, ours, profile, protocol, work
from tools.benchmarks.comparisons import COMPARISONS, Comparison, Result
from tools.benchmarks.worker import Measurement, Worker

pytestmark = pytest.mark.slow

BY_NAME = {comparison.name: comparison for comparison in COMPARISONS}
TRANSLATION = BY_NAME["translation_8"]
FACTS = {
    "layers": 8,
    "expert_layers": 4,
    "experts": 8,
    "capacity": 128,
    "tokens": 512,
    "batch": "0",
    "weights": 10,
    "versions": {"jax": "1"},
}
FAKE = """
import sys
from tools.benchmarks import protocol
def start(work):
    print("what a library says")
    return {"doubled": 2 * work["size"]}, lambda times: [0.5] * times
protocol.serve(start, sys.argv[1:])
"""


def test_a_row_is_the_ratio_of_the_least_seconds_and_the_quartiles_of_rounds():
    row = comparisons.summary(TRANSLATION, [FACTS, FACTS], [[2.0, 1.0, 3.0, 4.0, 5.0], [4.0, 4.0, 4.0, 4.0, 4.0]])
    assert (row.ours, row.other, row.ratio) == (1.0, 4.0, 0.25)
    assert (row.low, row.high) == (0.5, 1.0)


def test_seconds_are_compared_for_each_token():
    facts = [{"tokens": 1600}, {"tokens": 400}]
    row = comparisons.summary(BY_NAME["layer_256"], facts, [[8.0, 8.0], [2.0, 2.0]])
    assert (row.other, row.ratio) == (8.0, 1.0)


def test_the_peak_is_what_our_operations_would_take_at_it():
    facts = [{"flop": 3e9}, {"flop": 1e9}]
    assert comparisons.summary(BY_NAME["peak_8"], facts, [[6.0, 6.0], [1.0, 1.0]]).ratio == 2.0
    recorded = comparisons.summary(BY_NAME["language_model"], facts, [[6.0, 6.0], [1.0, 1.0]])
    assert recorded.other == pytest.approx(comparisons.LINGVO_FLOP / 1e9)


def test_sides_that_made_different_things_are_told():
    comparisons.check_equal(TRANSLATION, [FACTS, FACTS])
    with pytest.raises(UserError, match="capacity 128 and 64"):
        comparisons.check_equal(TRANSLATION, [FACTS, {**FACTS, "capacity": 64}])


@pytest.mark.parametrize("theirs, fits", [(4096, True), (2622, True), (1000, False), (5000, False)])
def test_a_side_that_skips_the_experts_work_is_told(theirs, fits):
    facts = [{**FACTS, "expert_rows": 4096}, {**FACTS, "expert_rows": theirs}]
    if fits:
        comparisons.check_equal(TRANSLATION, facts)
    else:
        with pytest.raises(UserError, match="skips work"):
            comparisons.check_equal(TRANSLATION, facts)


@pytest.mark.parametrize(
    "first, last, fits",
    [
        (9.0, 8.5, True),
        (9.5, 4.0, True),
        (9.0, 9.0, False),
        (12.0, 8.0, False),
        (5.0, 4.0, False),
        (9.0, math.nan, False),
    ],
)
def test_losses_begin_near_chance_and_fall(first, last, fits):
    measured = [Measurement(1.0, (first, last))]
    if fits:
        assert comparisons.check_losses("row", work.TRANSLATION, {"first_loss": first}, measured) == (first, last)
    else:
        with pytest.raises(UserError, match="row"):
            comparisons.check_losses("row", work.TRANSLATION, {"first_loss": first}, measured)


def test_a_product_has_no_loss():
    assert comparisons.check_losses("row", work.PRODUCT, {}, [Measurement(1.0, ())]) is None


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_both_sides_of_a_row_are_asked_for_the_same_work(comparison: Comparison):
    assert comparison.goal > 0 and (comparison.by == comparisons.OURS or comparison.ours == comparison.other)
    assert comparison.by == comparisons.OURS or (pathlib.Path(comparisons.__file__).parent / "peers").is_dir()


@pytest.mark.parametrize("experts", [8, 64, 256])
def test_a_wider_layer_has_as_much_room_for_each_token(experts):
    layer = work.wide_layer(experts)
    assert layer.groups * layer.capacity * layer.experts == 2 * layer.tokens == 128 * experts


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_what_grows_with_devices_is_the_work_of_one(mesh):
    """Each of eight groups has the tokens, and each expert the room for them, that the one of the translation has."""
    grown, one = BY_NAME[f"grown_{mesh}"].ours, work.TRANSLATION
    assert (grown.tokens // grown.groups, grown.capacity) == (one.tokens, one.capacity)
    assert BY_NAME[f"cut_{mesh}"].ours.tokens == one.tokens and grown.groups == 8


def test_the_model_has_the_works_dimensions():
    own = ours.experiment_of(work.TRANSLATION)
    assert (own.model.num_layers, own.model.num_experts, own.model.target_vocabulary) == (8, 8, 8000)
    assert own.input.tokens == 2 * work.TRANSLATION.tokens
    facts = ours._facts(own, work.TRANSLATION)
    assert (facts["layers"], facts["expert_layers"], facts["experts"], facts["expert_rows"]) == (8, 4, 8, 4 * 1024)


def test_everyone_draws_the_same_batch():
    ids = protocol.token_ids(vars(work.TRANSLATION))
    assert protocol.digest(ids) == protocol.digest(protocol.token_ids(vars(work.TRANSLATION)))
    assert ids["labels"][0][:-1] == ids["inputs"][0][1:]
    assert min(map(min, ids["source"])) >= 4


def test_a_worker_tells_facts_seconds_and_losses_whatever_it_prints(tmp_path):
    with Worker("fake", [sys.executable, "-c", FAKE], {"size": 21}, tmp_path) as worker:
        assert worker.facts == {"doubled": 42}
        measured = worker.run(3)
    assert measured.losses == (0.5, 0.5, 0.5) and measured.seconds >= 0
    assert "what a library says" in (tmp_path / "fake.log").read_text(encoding="utf-8")


def test_a_worker_that_ends_early_is_quoted(tmp_path):
    with pytest.raises(UserError, match="no such layer"):
        Worker("fake", [sys.executable, "-c", "raise SystemExit('no such layer')"], {}, tmp_path)


def test_the_page_keeps_its_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n", encoding="utf-8")
    document.put(page, "measured", "new")
    assert page.read_text(encoding="utf-8") == "before\n<!-- measured: begin -->\nnew\n<!-- measured: end -->\nafter\n"
    with pytest.raises(UserError, match="markers"):
        document.put(page, "profiled", "new")


def test_a_row_that_was_not_measured_is_empty():
    missed = Result("translation_8", ours=3.0, other=2.0, ratio=1.5, low=1.4, high=1.6, facts=(FACTS, FACTS))
    cells = document.rows([missed, Result("decoding", missing="no such package")])
    assert cells[0][1:] == ("3.0000", "2.0000", "1.50", "1.40-1.60", "0.75", "no")
    assert cells[1][1:] == ("", "", "", "", "0.40", "not measured")
    assert document.rows([dataclasses.replace(missed, name="cut_8")])[0][-2:] == ("", "")  # has no goal
    assert "no such package" in document.for_screen([missed, Result("decoding", missing="no such package")])


def test_a_part_of_the_model_has_the_shortest_of_its_instructions_runs():
    events = [("dot.1", 0.2), ("dot.1", 0.1), ("fusion.2", 0.3), ("fusion.2", 0.3), ("of another module", 9.0)]
    names = {"dot.1": "call/decoder/feed_forward/experts/einsum", "fusion.2": "call/optimizer/decoder_softmax/mul"}
    assert profile.by_part(events, names, steps=2) == {"optimizer": 0.3, "experts": 0.1}
