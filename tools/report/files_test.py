"""Results of other tools that were edited by hand, cut off or made by another version are an error of one line."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from lingvo_moe.errors import UserError
from tools.report import layers, measured, searches
from tools.report.layers import LayerPair
from tools.report.measured import Measured, Time
from tools.report.searches import LayoutSearch

_SECONDS = {"gating": 0.5, "experts": 1.0}
_TIME = Time("AllToAll", 8, 1, 2, 0.5, 1.0)


def _layer_pairs(path: pathlib.Path):
    layers.save([LayerPair("m4.MoE128E12L", 128, 128, 2**18, _SECONDS, _SECONDS, {"all-to-all": 0.1})], path)


def _collective_times(path: pathlib.Path):
    measured.save(Measured("a processor", 2, 20, (_TIME,)), path)


def _layout_searches(path: pathlib.Path):
    searches.save([LayoutSearch("m4.Small", 10, 2, 1.5, 2.0, 1.0, ("mesh=8",))], path)


_FILES: dict[str, tuple[Callable[[pathlib.Path], None], Callable[[pathlib.Path], Any]]] = {
    "layer_pairs": (_layer_pairs, layers.load),
    "collective_times": (_collective_times, measured.load),
    "layout_searches": (_layout_searches, searches.load),
}
# By file, a field of its first record: of each other type, or no number.
_WRONG = {
    "layer_pairs": [
        *(("cores", value) for value in ("128", None, float("nan"), 0, -1, 1.5, True, 10**400, [])),
        *(("compute", value) for value in ({"gating": "x"}, {"gating": float("inf")}, {"gating": -1.0}, [], None)),
        ("collectives", {}),
        ("model", 3),
        ("more", 1),
    ],
    "collective_times": [
        *(("devices", value) for value in ("2", None, 0, float("inf"))),
        *(("wall_seconds", value) for value in ("1", None, 0.0, float("nan"), float("inf"), -1.0)),
        ("operation", "Divide"),
        ("operation", []),
        ("mebibytes", 7),
    ],
    "layout_searches": [
        *(("layouts", value) for value in ("10", None, float("nan"))),
        *(("own_seconds", value) for value in ("2", None, float("inf"))),
        *(("found", value) for value in ("mesh=8", [1], None, {})),
    ],
}


def _refused(name: str, path: pathlib.Path):
    with pytest.raises(
        UserError, match=rf"--{name}={re.escape(str(path))}: .*`python -m tools.partitioning.{name}` writes"
    ):
        _FILES[name][1](path)


@pytest.mark.parametrize("name, field, value", [(name, *pair) for name, pairs in _WRONG.items() for pair in pairs])
def test_a_field_of_another_type_is_an_error(tmp_path, name, field, value):
    """It would be a traceback, or a page with `nan`; the unchanged file is read."""
    path = tmp_path / "results.json"
    save, load = _FILES[name]
    save(path)
    assert load(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    (content["times"] if name == "collective_times" else content)[0][field] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    _refused(name, path)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "null", "3", "[1]", "[[]]", '{"times": []}', "[" * 100_000])
@pytest.mark.parametrize("name", _FILES)
def test_another_file_is_an_error(tmp_path, name, text):
    """Also one without results, which would leave a part of the page out in silence; and none."""
    _refused(name, tmp_path / "missing.json")
    (tmp_path / "other.json").write_text(text, encoding="utf-8")
    _refused(name, tmp_path / "other.json")
