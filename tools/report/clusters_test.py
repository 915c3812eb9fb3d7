"""Protects the tables of clusters: docs/planning.md agrees with docs/plans, and what has no time is not given one."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from lingvo_moe.analysis.hardware import hardware_of
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.testing.plans import training_plan
from tools import markdown, plan_zoo
from tools.report import __main__ as report
from tools.report import clusters

_DOCS = pathlib.Path(__file__).parents[2] / "docs"
_YEAR = 365.25 * 24 * 3600
_PAGE = """# A
<!-- clusters: begin -->
old
<!-- clusters: end -->
B
<!-- meshes: begin -->
<!-- meshes: end -->
C
"""


def moved(topology: str, devices: int, **changes) -> Plan:
    """A plan of MoE(128E, 12L) on other devices."""
    made = training_plan("m4.MoE128E12L", 128)
    return dataclasses.replace(made, topology=topology, devices=devices, mesh=str(devices), **changes)


def rows_of(page: str, name: str) -> list[list[str]]:
    """The cells of a table of a page, below its heads."""
    lines = page.partition(f"<!-- {name}: begin -->\n")[2].partition(f"<!-- {name}: end -->")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def read(name: str) -> dict:
    """A plan as JSON, and its step's seconds, without the code that the tables are made with."""
    plan = json.loads((_DOCS / "plans" / f"{name}.json").read_text())
    plan["links"] = sum(cost["seconds"] for cost in plan["collectives"])
    plan["step"] = plan["compute_seconds"] and plan["compute_seconds"] + plan["links"]
    kinds = ("replicated_weights", "distributed_weights", "optimizer_state", "inputs", "temporaries")
    plan["gib"] = sum(plan["memory"][kind] or 0 for kind in kinds) / 2**30
    return plan


def test_the_documented_table_has_the_figures_of_every_plan():
    """Each plan of `plan_zoo.clusters` that was made has a row, with figures computed here from its JSON."""
    rows = {f"{row[0]}.{row[1].replace(':', '-')}": row[4:] for row in rows_of(_page(), "clusters")}
    assert list(rows) and set(rows) == {name for name in plan_zoo.clusters() if _exists(name)}
    for name, (memory, compute, links, _, speed, share, years) in rows.items():
        plan = read(name)
        if "does not fit" in memory:
            assert f"{plan['memory']['needed'] / 2**30:.2f}" in memory
            continue
        assert float(memory) == pytest.approx(plan["gib"], abs=0.006)
        assert float(links) == pytest.approx(plan["links"], abs=0.006)
        if plan["step"] is None:
            assert {compute, speed, share, years} == {"–"}
            continue
        assert float(compute) == pytest.approx(plan["compute_seconds"], abs=0.006)
        assert float(speed.replace(",", "")) == pytest.approx(plan["tokens"] / plan["step"] / 1000, abs=0.6)
        peak = plan["devices"] * hardware_of(plan["topology"]).peak_flops
        assert float(share.removesuffix(" %")) == pytest.approx(
            plan["model_flops"] / plan["step"] / peak * 100, abs=0.1
        )
        expected = 1e12 / plan["tokens"] * plan["step"] * plan["devices"] / _YEAR
        assert float(years) == pytest.approx(expected, abs=0.006)


def test_the_documented_meshes_are_those_of_plans():
    """Every variant on a cluster has a row, beside the model as it is registered; kinds of collectives add up."""
    rows = rows_of(_page(), "meshes")
    variants = [name for name in plan_zoo.meshes() if _exists(name)]
    registered = {name.rpartition(".")[0] for name in variants}
    assert len(rows) == len(variants) + len(registered)
    found = {(row[0], row[2], row[3]): row[5:] for row in rows}
    for name in (*variants, *registered):
        plan = read(name)
        cells = found[plan["model"], plan["mesh"], plan["layout"]]
        if "does not fit" not in cells[0]:
            assert float(cells[0]) == pytest.approx(plan["gib"], abs=0.006)
            assert sum(map(float, cells[2:5])) == pytest.approx(plan["links"], abs=0.006)
            assert sum(map(float, cells[1:5])) == pytest.approx(float(cells[5]), abs=0.01)


def _page() -> str:
    return (_DOCS / "planning.md").read_text(encoding="utf-8")


def _exists(name: str) -> bool:
    return (_DOCS / "plans" / f"{name}.json").exists()


def test_devices_without_a_clock_have_no_time():
    """The clock of tpu7x is not published: memory and collectives are known, speed and cost are not."""
    plans = {"m4.MoE128E12L.tpu7x-4x2x2": moved("tpu7x:4x2x2", 32, compute_seconds=None)}
    row = clusters.table(plans).rows[0]
    assert row[4:] == ["8.02", "–", "0.150", "–", "–", "–", "–"]


def test_other_plans_are_left_out():
    """TPU v3 is in the tables of the papers, decoding has no training tokens, and variants are in a table of meshes."""
    inside = moved("h100:4x8", 32, layout="BG:x,EHNV:y")
    plans = {
        "m4.MoE128E12L": training_plan("m4.MoE128E12L", 128),
        "m4.MoE128E12L.h100-4x8.decode": moved("h100:4x8", 32, program="decode"),
        "m4.MoE128E12L.h100-4x8": moved("h100:4x8", 32),
        "m4.MoE128E12L.h100-4x8.inside": inside,
        "m4.MoE128E12L.v6e-8x8": moved("v6e:8x8", 64),
    }
    assert [row[1] for row in clusters.table(plans).rows] == ["h100:4x8", "v6e:8x8"]
    # The registered layout comes first; 0.1 s of AllToAll and 0.05 s of AllReduce.
    rows = clusters.meshes(plans).rows
    assert [row[3] for row in rows] == ["auto", "BG:x,EHNV:y"]
    assert rows[1][5:] == ["8.02", "0.350", "0.100", "0.050", "0.000", "0.500", "–"]


def write_tables(page: pathlib.Path, plans: dict[str, Plan]):
    for name, text in clusters.texts(plans).items():
        markdown.replace(page, name, text)


def test_tables_replace_what_is_between_their_markers(tmp_path):
    """The rest of the page stays as it is, and writing it twice changes nothing."""
    plans, path = {"m4.MoE128E12L.h100-4x8": moved("h100:4x8", 32)}, tmp_path / "page.md"
    path.write_text(_PAGE, encoding="utf-8")
    write_tables(path, plans)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("# A\n<!-- clusters: begin -->\n| model |") and page.endswith("C\n") and "old" not in page
    assert rows_of(page, "clusters")[0][:5] == ["m4.MoE128E12L", "h100:4x8", "32", "keep_hidden", "8.02"]
    write_tables(path, plans)
    assert path.read_text(encoding="utf-8") == page


def test_a_page_without_markers_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("# A\n", encoding="utf-8")
    with pytest.raises(UserError, match="the markers `<!-- clusters: begin -->` and .* are missing"):
        write_tables(tmp_path / "page.md", {})


def test_a_missing_page_is_refused(tmp_path, capsys):
    """`--planning` names the page that is to be rewritten, so a new one is a mistake."""
    training_plan("m4.MoE128E12L", 128).save(tmp_path / "m4.MoE128E12L.json")
    arguments = [f"--plans={tmp_path}", f"--output={tmp_path}/page.html", f"--planning={tmp_path}/none.md"]
    try:
        assert app.execute(report.main, ["report", *arguments], report._VALUES) == 2
    finally:
        report._VALUES.unparse_flags()
    printed = capsys.readouterr()
    assert "none.md: No such file or directory; expected a page with the markers" in printed.err and not printed.out
    assert not (tmp_path / "page.html").exists()
