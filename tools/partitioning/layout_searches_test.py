"""Protects the table of found layouts: what a search predicts, which plans stand beside it, and its file."""

from __future__ import annotations

import pathlib

import pytest

from lingvo_moe.testing.plans import training_plan
from tools.partitioning import layout_searches
from tools.report import __main__ as report
from tools.report import searches
from tools.report.searches import LayoutSearch

_SAVED = pathlib.Path(__file__).parents[2] / "docs" / "layout_searches.json"
_MODEL = "dense_lm.Narrow16BMesh32x8"
_FOUND = ("layout=BG:x,NHV:y,M~x/y", "mesh=64x4")
_SEARCH = LayoutSearch(_MODEL, 95_716, 22, 14.26, 2.268, 2.13, _FOUND)


@pytest.mark.slow
def test_a_search_tells_the_models_own_layout_from_a_faster_one():
    """There are settings for the found layout if, and only if, its step is shorter than the model's own."""
    found = layout_searches.search("dense_lm.Small")
    assert found.layouts > found.faster >= 0 and found.own_seconds >= found.found_seconds > 0
    assert bool(found.found) == (found.found_seconds < found.own_seconds * (1 - 1e-3))


def test_compiled_plans_are_those_of_the_same_settings():
    """In any order of the changes; without a plan the cell says so, and a plan of other settings is not used."""
    own = training_plan(_MODEL, 256, "32x8")
    best = training_plan(_MODEL, 256, "64x4", changes=tuple(reversed(_FOUND)), compute_seconds=0.5)
    other = training_plan(_MODEL, 256, "64x4", changes=("mesh=64x4",), compute_seconds=0.25)
    cells = searches.table([_SEARCH], {_MODEL: own, "other": other, "best": best}).rows[0]
    assert cells[:3] == [_MODEL, "95,716", "14"] and cells[6] == " ".join(_FOUND)
    assert own.step_seconds and best.step_seconds
    assert cells[-1] == f"{best.step_seconds / own.step_seconds:.2f} ×"
    cells = searches.table([_SEARCH], {_MODEL: own, "other": other}).rows[0]
    assert cells[-2:] == ["not compiled", ""]


def test_the_saved_searches_are_in_the_page(tmp_path):
    """docs/layout_searches.json has a row for each model of the tool, and reading inverts writing."""
    saved = searches.load(_SAVED)
    assert tuple(search.model for search in saved) == layout_searches.MODELS
    searches.save(saved, tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_text() == _SAVED.read_text()
    page = report.page({}, found=saved).decode()
    assert all(f"{search.layouts:,}" in page for search in saved) and 'id="searches"' in page
    assert 'id="searches"' not in report.page({}).decode()
