"""Protects the comparison of predicted and compiled layouts: rank correlation, the choice of layouts, the report."""

from __future__ import annotations

import itertools
import json

import pytest

from lingvo_moe import experiment
from lingvo_moe.errors import UserError
from tools.partitioning import rank_layouts


def test_the_same_seed_chooses_the_same_layouts():
    """An interrupted comparison continues with the next layout. None is chosen twice, and in the end there is none."""
    import params.dense_lm  # noqa: F401  (registers the model)

    config = experiment.unchecked("dense_lm.Small")
    first, again, other = (list(itertools.islice(rank_layouts.choose(config, 8, seed), 20)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({candidate.mesh.shape for candidate in first}) > 3
    everything = list(rank_layouts.choose(config, 8, 1))
    assert everything[:20] == first and len({str(candidate) for candidate in everything}) == len(everything) > 100


def test_results_of_other_flags_are_refused(tmp_path):
    """They would be counted as this comparison's, although the layouts that are drawn may be the same."""
    file, settings = tmp_path / "results.json", {"model": "dense_lm.Small", "topology": "v3:4x4x1"}
    file.write_text(json.dumps({**settings, "results": [_FITTING]}), encoding="utf-8")
    assert rank_layouts.read(file, settings) == [_FITTING]
    with pytest.raises(UserError, match="has results of --topology=v3:4x4x1, not of v5e:8x4"):
        rank_layouts.read(file, settings | {"topology": "v5e:8x4"})


_FITTING = {"fits": True, "predicted_seconds": 1.0, "seconds": 1.1, "predicted_bytes": 1, "bytes": 2}
_BROKEN = (
    3,
    [1],
    [{}],
    [_FITTING | {"fits": 1}],
    *([_FITTING | {"seconds": value}] for value in (None, "1", 0, True, float("nan"), float("inf"))),
    [_FITTING | {"fits": False, "bytes": []}],
)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", "[[", "null", "[" * 100_000, *(json.dumps({"results": results}) for results in _BROKEN)]
)
def test_another_file_is_not_overwritten(text, tmp_path):
    """Nor is it continued: broken results would be a traceback after hours of compiling."""
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="results.json is not a file of this tool"):
        rank_layouts.read(tmp_path / "results.json", {})


def test_report():
    """Layouts that do not fit count for memory alone."""
    results = [
        {"fits": True, "predicted_seconds": 1.0, "seconds": 1.1, "predicted_bytes": 1, "bytes": 2},
        {"fits": True, "predicted_seconds": 2.0, "seconds": 1.0, "predicted_bytes": 2, "bytes": 3},
        {"fits": True, "predicted_seconds": 3.0, "seconds": 3.0, "predicted_bytes": 3, "bytes": 4},
        {"fits": False, "predicted_seconds": 9.0, "predicted_bytes": 9, "bytes": 9},
        {"fits": False, "predicted_seconds": 9.0, "predicted_bytes": 9, "refusal": "why"},
    ]
    text = rank_layouts.report(results)
    assert "5 random layouts: 3 fit, 1 refused" in text
    with pytest.raises(UserError, match="1 of 3 layouts fit, and a comparison needs two"):
        rank_layouts.report(results[2:])
    assert "step times: not defined: all predicted are equal" in rank_layouts.report([_FITTING] * 2)
    assert "step times: 0.500" in text and "memory: 1.000" in text and "takes 1.10 of the fastest" in text
