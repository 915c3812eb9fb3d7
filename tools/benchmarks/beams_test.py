"""Tests that both beam searches find the same translations, and of the table of their speeds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Spec
from tools.benchmarks import beams, reordering
from tools.benchmarks.comparisons import Result

pytestmark = pytest.mark.slow

BATCH, LENGTH = 3, 5
# Sums of at most seven float32 log-probabilities; attention adds over a cache of another length, in another order.
TOLERANCE = 2e-5
_PAGE = "docs/performance.md"


_T5 = (
    "model.num_experts=0",
    "model.layer_pattern=dense:activation=gelu:gated=true",
    "model.norm=rms",
    "model.relative_buckets=8",
    "model.relative_distance=6",
)


@pytest.fixture(scope="module", params=[(), _T5], ids=["experts", "relative"])
def programs(request) -> tuple:
    """Returns (flat program, reordering program, inputs), with a softmax sharp enough for hypotheses to differ.

    Both stacks have a dense layer and one with experts, so the decoder has caches of two kinds of layers. Or attention
    has relative positions: of K hypotheses that share a cache, and of one.
    """
    own = experiment.get(
        "m4.Quickstart",
        [
            "model.num_layers=4",
            "model.model_dim=16",
            "model.hidden_dim=32",
            "model.num_heads=2",
            "model.head_dim=8",
            "model.num_experts=4",
            "model.source_vocabulary=16",
            "model.target_vocabulary=12",
            "model.tied_embeddings=false",
            "model.twin_keys=false",
            "platform=cpu",
            "matmul_precision=default",  # rounded operands would differ where sums do
            *request.param,
        ],
        DeviceMesh(),
    )
    search = BeamSearch(beam_size=3, max_length=7)
    specs = {name: Spec((BATCH, LENGTH), "int32", "BS") for name in ("ids", "segment_ids", "positions")}
    theta = tree.map_leaves(
        np.array, Engine(1).compile(own.steps.init())({"seed": np.array([0, 3], np.int32)})["state"]["theta"]
    )
    theta["softmax"]["projection"] *= 2.5
    random = np.random.default_rng(0)
    source = {
        "ids": random.integers(4, 16, (BATCH, LENGTH)).astype(np.int32),
        "segment_ids": np.ones((BATCH, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1)),
    }
    prepared = Engine(1).compile(own.steps.prepare_decoding())({"theta": theta})["theta"]
    return (
        own.steps.decode_prepared(specs, search),
        reordering.decode(own.steps, specs, search),
        {"theta": prepared, "source": source},
    )


def test_both_find_the_same_translations(programs):
    """Ids and lengths are equal, scores up to rounding."""
    flat, reordered, inputs = programs
    one, other = (tree.map_leaves(np.asarray, Engine(1).compile(program)(inputs)) for program in (flat, reordered))
    np.testing.assert_array_equal(one["ids"], other["ids"])
    np.testing.assert_array_equal(one["lengths"], other["lengths"])
    np.testing.assert_allclose(one["scores"], other["scores"], rtol=0, atol=TOLERANCE)
    assert len({tuple(ids) for ids in one["ids"].reshape(-1, 7)}) > 1, "the hypotheses differ"


def test_both_sides_have_the_same_search():
    """The two works differ in their kind alone."""
    case = beams.comparison(4, 64)
    assert (case.ours.beam_size, case.ours.max_length, case.ours.kind, case.other.kind) == (4, 64, "decode", "reorder")
    assert dataclasses.replace(case.other, kind="decode") == case.ours


def test_table_of_beams_and_lengths():
    """A row for each beam size, a column for each length."""
    results = {(beam, length): Result("", ours=1.0, other=2.0, ratio=0.5) for beam in (1, 4) for length in (16, 64)}
    lines = beams.table(results).splitlines()
    assert lines[0] == "| hypotheses | 16 tokens | 64 tokens |" and len(lines) == 4
    assert lines[3] == "| 4 | 0.50 (1.000 s against 2.000 s) | 0.50 (1.000 s against 2.000 s) |"


@pytest.mark.parametrize(
    "given, written",
    [([], True), (["--rounds=2"], False), (["--beams=1"], False), (["--rounds=2", f"--output={_PAGE}"], True)],
)
def test_a_trial_does_not_replace_the_published_numbers(given, written, tmp_path, monkeypatch, capsys):
    """Only the default measurements do, or --output; the table is printed in any case."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(beams.comparisons, "run", lambda *arguments: Result("", ours=1.0, other=2.0, ratio=0.5))
    page = tmp_path / _PAGE
    page.parent.mkdir()
    page.write_text("<!-- beams: begin -->\npublished\n<!-- beams: end -->\n", encoding="utf-8")
    values = beams._VALUES
    for name in ("beams", "lengths", "rounds", "output"):
        values[name].unparse()
    values(["beams", *given])
    beams.main(["beams"])
    assert ("published" not in page.read_text(encoding="utf-8")) == written
    assert "| hypotheses |" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["0", "4,-1", "four", "4,", ""])
def test_invalid_numbers(given):
    """The error names the flag and the value."""
    values = beams._VALUES
    values(["beams", f"--beams={given}"])
    with pytest.raises(UserError, match=f"--beams={given}: expected whole numbers above 0"):
        beams._numbers("beams")
