"""Tests of ratios, of the checks of comparability, of the page and of the protocol; nothing is timed."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.models.translation import Translation
from tools.benchmarks import __main__ as benchmarks
from tools.benchmarks import comparisons, document, ours, profile, protocol, work
from tools.benchmarks.comparisons import COMPARISONS, Comparison, Result
from tools.benchmarks.environments import PeerMissingError
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
    print("message of a library")
    return {"doubled": 2 * work["size"]}, lambda times: [0.5] * times
protocol.serve(start, sys.argv[1:])
"""


def test_row_is_the_ratio_of_the_least_seconds():
    """Protects the statistics of a row, quartiles included."""
    row = comparisons.summary(TRANSLATION, [FACTS, FACTS], [[2.0, 1.0, 3.0, 4.0, 5.0], [4.0, 4.0, 4.0, 4.0, 4.0]])
    assert (row.ours, row.other, row.ratio) == (1.0, 4.0, 0.25)
    assert (row.low, row.high) == (0.5, 1.0)


def test_seconds_are_compared_per_token():
    """Protects `per`."""
    facts = [{"tokens": 1600}, {"tokens": 400}]
    row = comparisons.summary(BY_NAME["layer_256"], facts, [[8.0, 8.0], [2.0, 2.0]])
    assert (row.other, row.ratio) == (8.0, 1.0)


def test_time_at_the_peak():
    """The other side of a peak row is the time of our operations at the peak, or of the recorded ones."""
    facts = [{"flop": 3e9}, {"flop": 1e9}]
    assert comparisons.summary(BY_NAME["peak_8"], facts, [[6.0, 6.0], [1.0, 1.0]]).ratio == 2.0
    recorded = comparisons.summary(BY_NAME["language_model"], facts, [[6.0, 6.0], [1.0, 1.0]])
    assert recorded.other == pytest.approx(comparisons.LINGVO_FLOP / 1e9)


def test_different_work_is_an_error():
    """The error names the fact and both values."""
    comparisons.check_equal(TRANSLATION, [FACTS, FACTS])
    with pytest.raises(UserError, match="capacity 128 and 64"):
        comparisons.check_equal(TRANSLATION, [FACTS, {**FACTS, "capacity": 64}])


@pytest.mark.parametrize("theirs, fits", [(4096, True), (2622, True), (1000, False), (5000, False)])
def test_skipped_work_of_experts_is_an_error(theirs, fits):
    """Protects the bounds on the rows that experts compute."""
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
def test_losses_start_near_chance_and_fall(first, last, fits):
    """Other losses mean that a side does not train."""
    measured = [Measurement(1.0, (first, last))]
    if fits:
        assert comparisons.check_losses("row", work.TRANSLATION, {"first_loss": first}, measured) == (first, last)
    else:
        with pytest.raises(UserError, match="row"):
            comparisons.check_losses("row", work.TRANSLATION, {"first_loss": first}, measured)


def test_product_has_no_loss():
    """Work without a loss is not checked."""
    assert comparisons.check_losses("row", work.PRODUCT, {}, [Measurement(1.0, ())]) is None


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_both_sides_of_a_row_have_the_same_work(comparison: Comparison):
    """A peer gets our work; only our own other sides may differ."""
    assert comparison.goal > 0 and (comparison.by == comparisons.OURS or comparison.ours == comparison.other)
    peer = pathlib.Path(comparisons.__file__).parent / "peers" / comparison.by
    assert comparison.by == comparisons.OURS or (peer.with_suffix(".py").exists() and peer.with_suffix(".txt").exists())


@pytest.mark.parametrize("experts", [8, 64, 256])
def test_wide_layers_have_equal_capacity_per_token(experts):
    """Protects the scaling of `wide_layer`."""
    layer = work.wide_layer(experts)
    assert layer.groups * layer.capacity * layer.experts == 2 * layer.tokens == 128 * experts


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_weak_scaling_has_the_work_of_one_device_on_each(mesh):
    """Each of eight groups has the tokens and the capacity of the single one."""
    weak, one = BY_NAME[f"weak_scaling_{mesh}"].ours, work.TRANSLATION
    assert (weak.tokens // weak.groups, weak.capacity) == (one.tokens, one.capacity)
    assert BY_NAME[f"strong_scaling_{mesh}"].ours.tokens == one.tokens and weak.groups == 8


def test_model_has_the_dimensions_of_the_work():
    """The facts are counted in the model, so they show what was built."""
    own = ours.experiment_of(work.TRANSLATION)
    assert isinstance(own.model, Translation)
    assert (own.model.num_layers, own.model.num_experts, own.model.target_vocabulary) == (8, 8, 8000)
    assert own.input.tokens == 2 * work.TRANSLATION.tokens
    facts = ours._facts(own, work.TRANSLATION)
    assert (facts["layers"], facts["expert_layers"], facts["experts"], facts["expert_rows"]) == (8, 4, 8, 4 * 1024)


def test_all_workers_draw_the_same_batch():
    """The batch is a function of the work; labels are shifted inputs."""
    ids = protocol.token_ids(vars(work.TRANSLATION))
    assert protocol.digest(ids) == protocol.digest(protocol.token_ids(vars(work.TRANSLATION)))
    assert ids["labels"][0][:-1] == ids["inputs"][0][1:]
    assert min(map(min, ids["source"])) >= 4


@pytest.mark.parametrize("arguments", [[], ["--help"], ["[]"], ["{}", "{}"]])
def test_a_worker_that_a_user_starts_says_what_does(arguments, capsys):
    """It has no flags: `python -m tools.benchmarks.ours --help` is no traceback."""
    with pytest.raises(SystemExit, match="2"):
        protocol.serve(pytest.fail, arguments)
    assert capsys.readouterr().err.startswith("error: expected the work as JSON; `python -m tools.benchmarks` starts")


def test_worker_protocol_survives_printing(tmp_path):
    """What a library prints goes to the log and not between the answers."""
    with Worker("fake", [sys.executable, "-c", FAKE], {"size": 21}, tmp_path) as worker:
        assert worker.facts == {"doubled": 42}
        measured = worker.run(3)
    assert measured.losses == (0.5, 0.5, 0.5) and measured.seconds >= 0
    assert "message of a library" in (tmp_path / "fake.log").read_text(encoding="utf-8")


def test_worker_that_ends_early_is_quoted(tmp_path):
    """The error holds the last lines of the log."""
    with pytest.raises(UserError, match="no such layer"):
        Worker("fake", [sys.executable, "-c", "raise SystemExit('no such layer')"], {}, tmp_path)


@pytest.mark.parametrize("error, is_failure", [(PeerMissingError("no pip"), False), (UserError("ended"), True)])
def test_only_a_peer_that_cannot_be_installed_is_no_failure(error, is_failure, monkeypatch):
    """A crash of our own worker is not a row that was not measured here."""

    def fail(*_):
        raise error

    monkeypatch.setattr(comparisons, "run", fail)
    found = benchmarks._measure(COMPARISONS[0], 2, comparisons.Directories(pathlib.Path(), pathlib.Path()), None)
    assert found.missing == str(error) and found.is_failure == is_failure


def test_facts_are_of_the_model_that_was_built():
    """They are compared with a peer's: copies of the work would be equal whatever the model does."""
    half = dataclasses.replace(work.TRANSLATION, capacity_factor=1.0)
    found = [ours._facts(ours.experiment_of(each), each) for each in (work.TRANSLATION, half)]
    assert [facts["capacity"] for facts in found] == [128, 64]
    other = ours.experiment_of(dataclasses.replace(half, rows=4))
    assert ours._facts(other, half)["tokens"] == 256 and ours._facts(other, half)["capacity"] == 32


def test_row_that_was_not_measured_is_empty():
    """A missing peer leaves the row without numbers, and its reason below the table."""
    missed = Result("translation_8", ours=3.0, other=2.0, ratio=1.5, low=1.4, high=1.6, facts=(FACTS, FACTS))
    cells = document.rows([missed, Result("decoding", missing="no such package")])
    assert cells[0][1:] == ("3.0000", "2.0000", "1.50", "1.40-1.60", "0.75", "no")
    assert cells[1][1:] == ("", "", "", "", "0.40", "not measured")
    assert document.rows([dataclasses.replace(missed, name="strong_scaling_8")])[0][-2:] == ("", "")  # has no goal
    assert "no such package" in document.for_screen([missed, Result("decoding", missing="no such package")])


def test_profile_counts_the_shortest_run_of_an_instruction():
    """Interrupted runs are longer; events of other modules do not count."""
    events = [("dot.1", 0.2), ("dot.1", 0.1), ("fusion.2", 0.3), ("fusion.2", 0.3), ("of another module", 9.0)]
    names = {"dot.1": "call/decoder/feed_forward/experts/einsum", "fusion.2": "call/optimizer/decoder_softmax/mul"}
    assert profile.by_part(events, names, steps=2) == {"optimizer": 0.3, "experts": 0.1}


def test_the_page_names_the_peak_and_the_processor():
    """A step that takes 0.5 s and has 2e10 operations, which take 0.2 s at the peak: 100 GFLOP/s."""
    peak = Result("peak_8", ours=0.5, other=0.2, ratio=2.5, low=2.4, high=2.6, facts=({**FACTS, "flop": 2e10}, FACTS))
    run = {"date": "2026-11-25", "machine": "A Processor", "flags": ["avx2", "fma"], "rounds": 2, "command": "measure"}
    page = document.for_page({**run, "results": [dataclasses.asdict(peak)]})
    assert "A Processor, one core with a peak of 100 GFLOP/s in float32, 2 rounds" in page
    assert "avx2, fma" in page
