"""The page has every published row beside its plan's figures, says what is missing or does not fit, and trusts no file."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from lingvo_moe.analysis.plan import CollectiveCost, Memory, Plan
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import v3_slice
from lingvo_moe.errors import UserError
from tools import plan_zoo
from tools.report import __main__ as report
from tools.report import charts, figures, published, reading, tables

GIB = 2**30
ROWS = {row.plan: row for row in (*published.rows(), published.TRILLION)}
NAMES = tables.missing({})


def planned(name: str = "m4.MoE128E12L", **changes) -> Plan:
    """A plan of plausible size, for the cores of the published row; `step` of 0.5 s, a fifth of it AllToAll."""
    model = ".".join(name.split(".")[:2])
    row = ROWS[model]
    values = dict(
        model=model,
        changes=(),
        program="train",
        topology=v3_slice(row.cores),
        mesh=row.mesh.strip("()").replace(",", "x"),
        cores=row.cores,
        weights=10**10,
        layout="auto",
        remat="keep_hidden",
        batch_size=64,
        num_groups=64,
        num_experts=0,
        num_layers=12,
        activation_dtype="float32",
        tokens=2**20,
        model_flops=0.25 * row.cores * 61.5e12,
        memory=Memory(2 * GIB, GIB, GIB // 64, GIB // 1024, 5 * GIB),
        collectives=(
            CollectiveCost("all-to-all", row.cores, 24, 2**28, 0.1),
            CollectiveCost("all-reduce", row.cores, 35, 2**30, 0.05),
        ),
        cycles=329_000_000,
        rematerialised_cycles=32_900_000,
        cycles_by_part={"experts": 200_000_000, "gating": 29_000_000, "other": 100_000_000},
        compute_seconds=0.35,
        unknown_loops=0,
        lower_seconds=1.0,
        compile_seconds=1.0,
    )
    return Plan(**values | changes)


def too_large(name: str = "m4.MoE128E12L") -> Plan:
    return planned(
        name,
        memory=Memory(2 * GIB, GIB, 0, 0, None, int(15.48 * GIB), int(18.2 * GIB)),
        collectives=(),
        cycles=None,
        rematerialised_cycles=None,
        cycles_by_part={},
        compute_seconds=None,
    )


@pytest.fixture(scope="module")
def whole() -> str:
    return report.page({name: planned(name) for name in NAMES}).decode()


class Tables(HTMLParser):
    """Rows of cells' texts, by the caption of their table."""

    def __init__(self, page: str):
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self._caption = None
        self._text = self._cells = None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag in ("caption", "td", "th"):
            self._text = ""
        elif tag == "tr":
            self._cells = []

    def handle_data(self, data):
        if self._text is not None:
            self._text += data

    def handle_endtag(self, tag):
        if tag == "caption":
            self._caption = self._text
            self.rows[self._caption] = []
        elif tag in ("td", "th"):
            self._cells.append(self._text)
        elif tag == "tr":
            self.rows[self._caption].append(self._cells)
        if tag in ("caption", "td", "th"):
            self._text = None


def rows_of(page: str, caption: str) -> list[list[str]]:
    found = [rows for name, rows in Tables(page).rows.items() if name.startswith(caption)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("table", [published.GSHARD_3, *published.BENCHMARKS], ids=lambda table: table.source)
def test_every_published_row_stands_beside_its_plan(whole, table):
    """All printed values, and the plan's memory and step time."""
    rows = [row for row in rows_of(whole, table.title) if "attempt" not in row[0]][-len(table.rows) :]
    for row, cells in zip(table.rows, rows, strict=True):
        printed = [
            row.model,
            row.batch,
            row.steps_per_second,
            row.core_years,
            row.days,
            row.memory,
            row.seconds,
            row.utilisation and f"{row.utilisation} %",
            row.all_to_all and f"{row.all_to_all} %",
            row.kilotokens,
        ]
        assert {value for value in printed if value} <= set(cells)
        assert {"8.02", "0.500", "keep_hidden", "50.0 %"} <= set(cells)
        if row.step:
            assert f"{0.5 / row.step:.2f} ×" in cells


def test_published_values_are_as_the_papers_print_them():
    """Steps, core-years, days and tokens of GShard table 3 fit one another, as do steps and throughput."""
    for row in published.GSHARD_3.rows[:-1]:
        days = float(row.days)
        assert float(row.core_years) == pytest.approx(row.cores * days / 365.25, rel=0.05, abs=0.06)
        tokens = float(row.steps_per_second) * days * 86400 * {"4M": 2**22, "1M": 2**20}[row.batch]
        assert tokens == pytest.approx(1.05e12, rel=0.05)
    assert published.highest_utilisation().utilisation == "62.7"


def test_plans_that_are_missing_are_told_with_their_command(whole):
    page = report.page({"m4.MoE128E12L": planned()}).decode()
    assert "not planned" not in whole and "Not planned" not in whole
    for name in set(NAMES) - {"m4.MoE128E12L"}:
        assert f"not planned: <code>python -m tools.plan_zoo --only={name}</code>" in page
    assert set(NAMES) <= plan_zoo.plans().keys()


def test_each_plan_comes_with_the_command_that_makes_it():
    """Where `plan` chooses the slice and the mesh by itself, they are left out."""
    plans = {
        "m4.MoE128E12L": planned(changes=("model.remat=full",)),
        "m4.MoE128E12L.v5e": planned(topology="v5e:16x8", program="decode"),
    }
    commands = [row[-1] for row in rows_of(report.page(plans).decode(), "All plans")[1:]]
    assert commands == [
        "python -m lingvo_moe plan m4.MoE128E12L --set=model.remat=full",
        "python -m lingvo_moe plan m4.MoE128E12L --program=decode --topology=v5e:16x8 --mesh=128",
    ]


def test_a_plan_that_does_not_fit_shows_the_compilers_answer():
    page = report.page(
        {"m4.MoE2048E60L.replicated": too_large("m4.MoE2048E60L.replicated"), "m4.MoE128E12L": too_large()}
    ).decode()
    rows = rows_of(page, "Multilingual translation")
    assert rows[-2][-2:] == ["keep_hidden", "does not fit: needs 18.20 of 15.48 GiB [c]"]
    assert "15.48 available" in page and "and more: does not fit, needs 18.20" in page


def test_readings_are_the_published_speed_by_each_plans_operations():
    """A quarter of a second at peak: 2.16 steps/s are 54 %; twice the operations, 108 %, which no core has."""
    other = planned("m4.MoE128E12L.each_side", model_flops=0.5 * 128 * 61.5e12)
    page = report.page({"m4.MoE128E12L": planned(), "m4.MoE128E12L.each_side": other}).decode()
    assert (
        rows_of(page, "Two readings")[-1][1:3] == ["2.16", "54.0 %"]
        and "would need 108 % of the peak of 128 cores" in page
    )
    assert "together, 54 % [paper, p]" in page and "reports 62.7 % at the most [paper: GSPMD table 2]" in page


def test_memory_of_few_and_many_experts_is_compared(whole):
    """On 128 cores a sixteenth of the tokens of 2048."""
    few = planned("m4.MoE128E12L.tokens_per_core", tokens=2**16)
    many = planned("m4.MoE2048E12L.each_side", memory=Memory(2 * GIB, GIB, 0, 0, 5 * GIB))
    page = report.page({"m4.MoE128E12L.tokens_per_core": few, "m4.MoE2048E12L.each_side": many}).decode()
    assert rows_of(page, "What GShard's section 5 says")[2][3:] == ["constant", "-0.2 %, within 10 %", "[c, p]"]
    assert "8.00, -0.2 %" in page and "-0.2 %</dd>" in page
    assert "8.02, +0.0 %" not in whole and "(unlike: 8,192 and 512 tokens per core)" in whole


def test_plans_that_differ_in_more_than_experts_are_told():
    few = planned("m4.MoE128E12L.tokens_per_core", tokens=2**16)
    many = planned("m4.MoE2048E12L.each_side", memory=Memory(2 * GIB, GIB, 0, 0, 6 * GIB), remat="full")
    page = report.page({"m4.MoE128E12L.tokens_per_core": few, "m4.MoE2048E12L.each_side": many}).decode()
    cells = rows_of(page, "What GShard's section 5 says")[2]
    assert cells[3:] == ["constant", "+12.3 %, not within 10 % (unlike: remat keep_hidden and full)", "[c, p]"]
    assert "9.00, +" not in page and "+12.3 %</dd>" not in page


def test_claims_are_of_the_plans(whole):
    rows = rows_of(whole, "What GShard's section 5 says")
    found = {(row[0], row[2]): row[3:5] for row in rows}
    assert found["share of cycles that compute again", "MoE(2048E, 36L)"] == ["28 %", "10.0 %"]
    assert found["share of the roofline", "MoE(2048E, 12L)"] == ["48 %", "80.0 %"]
    assert found["share of AllToAll in the time", "MoE(128E, 36L)"] == ["16 %", "20.0 %"]
    assert found["share of gating in the time", "MoE(2048E, 36L)"] == ["< 10 %", "6.2 %"]
    assert found["time of AllToAll with 2048 partitions against 16", "any"] == ["9 ×", "8.0 ×"]


def test_time_by_part_loses_nothing():
    plan = planned(cycles_by_part={"experts": 94, "a_part_of_tomorrow": 846})
    assert reading.compute_by_part(plan)["other compute"] == pytest.approx(900e-9)
    assert sum(reading.collectives_by_kind(plan).values()) == pytest.approx(plan.collective_seconds)


def test_exchanges_grow_as_in_figure_9():
    """AllToAll about nine times, as sqrt(D) would eleven times; AllReduce not."""
    assert charts.collective_growth("all-to-all") == pytest.approx(9, rel=0.15)
    assert charts.collective_growth("all-reduce") == pytest.approx(1, rel=0.15)


def test_the_page_needs_nothing_else_and_is_one_document(whole):
    """No scripts and nothing that is loaded; every name is given once, and every reference has one."""
    assert not re.search(r"<script|<link|<img|@import|https?:|src=", whole)
    names = re.findall(r'\bid="([^"]*)"', whole)
    assert len(names) == len(set(names)) and set(re.findall(r'(?:href="#|url\(#)([\w-]+)', whole)) <= set(names)
    assert whole.count("<svg") == 3 and "<style" not in whole.partition("<body>")[2] and figures.INK not in whole


def test_same_plans_same_bytes(whole):
    assert report.page({name: planned(name) for name in NAMES}).decode() == whole


def test_hostile_text_is_shown_and_not_obeyed(tmp_path):
    model = "<img src=x onerror=alert(1)>&amp;"
    path = tmp_path / f"{model}.json"
    dataclasses.replace(planned(), model=model, changes=("</code><script>\ud800",)).save(path)
    page = report.page(reading.load(tmp_path)).decode()
    assert "<img" not in page and "<script" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;amp;" in page and "--set=&lt;/code&gt;&lt;script&gt;&#55296;" in page


def damaged(**changes) -> str:
    return json.dumps(dataclasses.asdict(planned()) | changes)


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "not a plan of this version"),
        ("[]", "not a plan of this version"),
        (damaged(memory={}), "not a plan of this version"),
        (damaged(cores="many"), "cores: not of the expected"),
        (damaged(cycles_by_part={"gating": "x"}), "cycles_by_part: not"),
        (damaged(model_flops=float("nan")), "model_flops: not"),
        (damaged(tokens=0), "not a whole plan"),
        (damaged(cycles=None), "not a whole plan"),
        (damaged(topology="v9:2x2x1"), "not a whole plan"),
        (damaged(topology="v5e:16x8"), "program train on v5e:16x8; what is published"),
        (damaged(model="m4.MoE512E12L"), "a plan of m4.MoE512E12L; its file's name"),
    ],
)
def test_a_file_that_is_no_fit_plan_is_named(tmp_path, text, said):
    path = tmp_path / "m4.MoE128E12L.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(str(path))) as error:
        reading.load(tmp_path)
    assert said in str(error.value)


def run(capsys, *arguments: str) -> tuple[int, str]:
    try:
        status = app.execute(report.main, ["report", *arguments], report._VALUES)
    finally:
        report._VALUES["plans"].value, report._VALUES["output"].value = "docs/plans", "docs/report.html"
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_the_command_writes_the_page_and_leaves_nothing_else(tmp_path, capsys):
    planned().save(tmp_path / "m4.MoE128E12L.json")
    output = tmp_path / "pages" / "report.html"
    status, said = run(capsys, f"--plans={tmp_path}", f"--output={output}")
    assert status == 0 and f"{output}: 1 plans, {len(NAMES) - 1} of the tables not planned" in said
    assert list(output.parent.iterdir()) == [output] and output.read_bytes() == report.page(
        {"m4.MoE128E12L": planned()}
    )


def test_without_a_plan_there_is_no_page(tmp_path, capsys):
    for directory in (tmp_path, tmp_path / "none"):
        status, said = run(capsys, f"--plans={directory}", f"--output={tmp_path / 'report.html'}")
        assert status == 2 and f"--plans={directory}: no plan is there" in said
    assert not pathlib.Path(tmp_path / "report.html").exists()


@pytest.mark.parametrize("output", ["", "/", "{tmp}", "/dev/null"])
def test_a_page_must_be_a_file(tmp_path, capsys, output):
    """A device above all: nothing may take its place."""
    planned().save(tmp_path / "m4.MoE128E12L.json")
    status, said = run(capsys, f"--plans={tmp_path}", f"--output={output.format(tmp=tmp_path)}")
    assert status == 2 and "expected the name of a file" in said


def test_bars_are_drawn_of_what_they_are_given():
    """One rectangle per value, in order and to scale, and the page's own colours."""
    with figures.settings():
        figure = figures.stacked(
            [("all", [("one", {"a": 1.0, "b": 3.0}, "four")])], {"a": "#aa0000", "b": "#00bb00"}, "s"
        )
        widths = [patch.get_width() for patch in figure.axes[0].patches]
        text = ElementTree.tostring(figures.svg(figure, "name", "said"), encoding="unicode")
    assert widths == [1.0, 3.0] and "#aa0000" in text and "currentColor" in text and ">four</text>" in text
