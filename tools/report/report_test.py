"""Tests of the page: published rows beside plans, missing plans, plans that do not fit, invalid files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from html.parser import HTMLParser

import pytest

from lingvo_moe.analysis.plan import Memory, Plan
from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.testing.plans import GIB, training_plan
from tools import plan_zoo
from tools.report import __main__ as report
from tools.report import charts, links, measured, published, style, tables
from tools.report import plans as of_plans
from tools.report.measured import Measured, Time

ROWS = {row.plan: row for row in (*published.rows(), published.TRILLION)}
NAMES = tables.missing({})


def planned(name: str = "m4.MoE128E12L", **changes) -> Plan:
    """A plan for the cores of the published row, or for eight of fewer cores: no slice is smaller."""
    row = ROWS[".".join(name.split(".")[:2])]
    mesh = row.mesh.strip("()").replace(",", "x") if row.cores >= 8 else "8x1"
    return training_plan(row.plan, max(8, row.cores), mesh, **changes)


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
def full_page() -> str:
    """The page of all plans."""
    return report.page({name: planned(name) for name in NAMES}).decode()


class Tables(HTMLParser):
    """Rows of cells' texts, by the caption of their table."""

    def __init__(self, page: str):
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self._caption = self._text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag in ("caption", "td", "th"):
            self._text = ""
        elif tag == "tr":
            self.rows[self._caption].append([])

    def handle_data(self, data):
        self._text += data

    def handle_endtag(self, tag):
        if tag == "caption":
            self._caption = self._text
            self.rows[self._caption] = []
        elif tag in ("td", "th"):
            self.rows[self._caption][-1].append(self._text)


def rows_of(page: str, caption: str) -> list[list[str]]:
    found = [rows for name, rows in Tables(page).rows.items() if name.startswith(caption)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("table", [published.GSHARD_3, *published.BENCHMARKS], ids=lambda table: table.source)
def test_published_rows_beside_plans(full_page, table):
    """Protects every printed value, and the plan's memory and step time in the same row."""
    rows = [row for row in rows_of(full_page, table.title) if "attempt" not in row[0]][-len(table.rows) :]
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


def test_published_values_are_consistent():
    """Protects the transcription: steps, core-years, days and tokens of GShard table 3 must agree with each other."""
    for row in published.GSHARD_3.rows[:-1]:
        assert row.days and row.core_years and row.steps_per_second
        days = float(row.days)
        assert float(row.core_years) == pytest.approx(row.cores * days / 365.25, rel=0.05, abs=0.06)
        tokens = float(row.steps_per_second) * days * 86400 * {"4M": 2**22, "1M": 2**20}[row.batch]
        assert tokens == pytest.approx(1.05e12, rel=0.05)
    assert published.highest_utilisation() == ("62.7", "GSPMD table 2")


def test_missing_plans_show_their_command(full_page):
    """A missing plan is shown with a command of plan_zoo that exists."""
    page = report.page({"m4.MoE128E12L": planned()}).decode()
    assert "not planned" not in full_page and "Not planned" not in full_page
    for name in set(NAMES) - {"m4.MoE128E12L"}:
        assert f"not planned: <code>python -m tools.plan_zoo --only={name}</code>" in page
    assert set(NAMES) <= plan_zoo.plans().keys()


def test_command_of_each_plan():
    """The command leaves out the slice and the mesh where they are the defaults of `plan`."""
    plans = {
        "m4.MoE128E12L": planned(changes=("model.remat=full",)),
        "m4.MoE128E12L.v5e": planned(topology="v5e:16x8", program="decode"),
        "unet.Volume128Mesh1x1": planned("unet.Volume128Mesh1x1", compiler_options=("a=b",)),
        "unet.Volume128Mesh1x1.found": planned("unet.Volume128Mesh1x1", changes=("mesh=8x1",)),
    }
    commands = [row[-1] for row in rows_of(report.page(plans).decode(), "All plans")[1:]]
    assert commands == [
        "python -m lingvo_moe plan m4.MoE128E12L --set=model.remat=full",
        "python -m lingvo_moe plan m4.MoE128E12L --program=decode --topology=v5e:16x8 --mesh=128",
        "python -m lingvo_moe plan unet.Volume128Mesh1x1 --topology=v3:2x2x1 --mesh=8x1 --compiler_option=a=b",
        "python -m lingvo_moe plan unet.Volume128Mesh1x1 --topology=v3:2x2x1 --set=mesh=8x1",
    ]


def test_plans_of_clusters_are_sorted_and_show_their_figures():
    """By model and GPU; the page without such plans has no table of them."""

    def moved(plan: Plan, topology: str, gpus: int) -> Plan:
        return dataclasses.replace(plan, topology=topology, devices=gpus, mesh=str(gpus))

    timed = planned(scheduled_seconds=0.75)
    plans = {
        "m4.MoE128E12L.h200-2x8": moved(timed, "h200:2x8", 16),
        "m4.MoE128E12L.h100-4x8": moved(timed, "h100:4x8", 32),
        "m4.MoE128E12L.h100-1x8": moved(too_large(), "h100:1x8", 8),
    }
    rows = rows_of(report.page(plans).decode(), "Models of the papers on clusters of GPUs and slices")[1:]
    assert [row[1] for row in rows] == ["h100:4x8", "h100:1x8", "h200:2x8"]
    # 2^20 tokens in half a second, a quarter second's operations of 128 TPUs; 953,674 steps of half a second.
    assert rows[2][4:] == [
        "8.02",
        "0.350",
        "0.150",
        "0.750",
        "2,097",
        f"{0.25 * 128 * 61.5 / (0.5 * 16 * 989.4) * 100:.1f} %",
        f"{953_674.3 * 0.5 * 16 / 31_557_600:.2f}",
    ]
    assert "does not fit" in rows[1][4]
    assert "GPU clusters and newer TPUs" not in report.page({"m4.MoE128E12L": planned()}).decode()


def test_plan_that_does_not_fit_shows_the_compilers_answer():
    """The needed and the available memory replace the figures, in the table and in the figure."""
    plans = {"m4.MoE2048E60L.replicated": too_large("m4.MoE2048E60L.replicated"), "m4.MoE128E12L": too_large()}
    rows = rows_of(report.page(plans).decode(), "Multilingual translation")
    assert rows[-2][-2:] == ["keep_hidden", "does not fit: needs 18.20 of 15.48 GiB [c]"]
    text = style.svg(charts.memory(plans)).decode()
    assert "15.48 available" in text and "and more: does not fit, needs 18.20" in text


def test_utilisation_implied_by_published_speed():
    """0.25 s at peak and 2.16 steps/s are 54 %; with twice the operations 108 %, which no core reaches."""
    twice = planned("m4.MoE128E12L", model_flops=0.5 * 128 * 61.5e12)
    page = report.page({"m4.MoE128E12L": twice, "m4.MoE128E12L.both_sides": planned("m4.MoE128E12L")}).decode()
    assert rows_of(page, "Two readings")[-1][1:3] == ["2.16", "108.0 %"]
    assert "of 128 cores then need 108 % of their peak" in page and "together they would need 54 % [paper, p]" in page
    assert "reports 62.7 % at most [paper: GSPMD table 2]" in page


def test_memory_of_128_and_2048_experts_is_compared(full_page):
    """Protects the comparison of plans with equal tokens per core, and that others are not compared."""
    few = planned("m4.MoE128E12L.tokens_per_core", tokens=2**16)  # on 128 cores a sixteenth of the tokens of 2048
    many = planned("m4.MoE2048E12L", memory=Memory(2 * GIB, GIB, 0, 0, 5 * GIB))
    plans = {"m4.MoE128E12L.tokens_per_core": few, "m4.MoE2048E12L": many}
    page = report.page(plans).decode()
    assert rows_of(page, "What GShard's section 5 claims")[2][3:] == ["constant", "-0.2 %, within 10 %", "[c, p]"]
    assert "8.00, -0.2 %" in style.svg(charts.memory(plans)).decode() and "-0.2 %</dd>" in page
    assert "%</dd>" not in full_page and "(unlike: 8,192 and 512 tokens per core)" in full_page


def test_other_differences_of_compared_plans_are_named():
    """A comparison of plans that differ in more than the experts says so, and is not a highlight."""
    few = planned("m4.MoE128E12L.tokens_per_core", tokens=2**16)
    many = planned("m4.MoE2048E12L", memory=Memory(2 * GIB, GIB, 0, 0, 6 * GIB), remat="full")
    page = report.page({"m4.MoE128E12L.tokens_per_core": few, "m4.MoE2048E12L": many}).decode()
    cells = rows_of(page, "What GShard's section 5 claims")[2]
    assert cells[3:] == ["constant", "+12.3 %, not within 10 % (unlike: remat keep_hidden and full)", "[c, p]"]
    assert "+12.3 %</dd>" not in page


def test_claims_are_computed_from_the_plans(full_page):
    """Protects the quantities beside GShard's section 5, computed by hand for these plans."""
    rows = rows_of(full_page, "What GShard's section 5 claims")
    found = {(row[0], row[2]): row[3:5] for row in rows}
    assert found["share of cycles that recompute activations", "MoE(2048E, 36L)"] == ["28 %", "10.0 %"]
    assert found["time of AllToAll with 2048 partitions against 16", "any"] == ["9 ×", "8.0 ×"]


def test_time_by_part_is_complete():
    """Unknown parts and kinds of collectives count in the last group."""
    plan = planned(cycles_by_part={"experts": 94, "unknown_part": 846})
    assert of_plans.compute_by_part(plan)["other compute"] == pytest.approx(900e-9)
    assert sum(of_plans.collectives_by_kind(plan).values()) == pytest.approx(plan.collective_seconds)


def test_collectives_grow_as_in_figure_9():
    """Protects the model of the links: AllToAll grows about 9 times (sqrt(D) would be 11), AllReduce does not."""
    assert links.growth("all-to-all") == pytest.approx(9, rel=0.15)
    assert links.growth("all-reduce") == pytest.approx(1, rel=0.15)


def test_growth_of_measured_collectives_is_of_one_process():
    """And missing where one number of devices was measured there: the page then says nothing about it."""

    def of(*shapes: tuple[int, int]) -> Measured:
        times = [Time(name, 32, *shape, 1.0, 0.1 * shape[1]) for shape in shapes for name in measured.OPERATIONS]
        return Measured("a processor", 2, 3, tuple(times))

    assert measured.growth(of((1, 2), (1, 8), (16, 16))) == (2, 8, pytest.approx(dict.fromkeys(measured.OPERATIONS, 4)))
    assert measured.growth(of((1, 2), (2, 2))) is None and measured.growth(of((2, 2), (4, 4))) is None


def test_page_is_self_contained(full_page):
    """The page loads nothing, ids are unique, and every link inside it has a target."""
    assert not re.search(r"<script|<link|@import|https?:", full_page)
    assert re.findall(r'src="([^,]*)', full_page) == ["data:image/svg+xml;base64"] * 4
    ids = re.findall(r'\bid="([^"]*)"', full_page)
    assert len(ids) == len(set(ids)) and set(re.findall(r'href="#([\w-]+)', full_page)) == set(ids)


def test_same_plans_same_bytes(full_page):
    """The page is reproducible, figures included."""
    assert report.page({name: planned(name) for name in NAMES}).decode() == full_page


def test_hostile_text_is_escaped(tmp_path):
    """Names and settings come from files; markup in them must stay text."""
    model = "<img src=x onerror=alert(1)>&amp;"
    path = tmp_path / f"{model}.json"
    dataclasses.replace(planned(), model=model, changes=("</code><script>\ud800",)).save(path)
    page = report.page(of_plans.load(tmp_path)).decode()
    assert "<img src=x" not in page and "<script" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;amp;" in page and "--set=&lt;/code&gt;&lt;script&gt;&#55296;" in page


def invalid(**changes) -> str:
    return json.dumps({"version": 4} | dataclasses.asdict(planned()) | changes)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not a plan of version 4"),
        ("[]", "not a plan of version 4"),
        (invalid(memory={}), "not a plan of version 4"),
        (invalid(devices="many"), "not a valid plan (wrong type of devices)"),
        (invalid(cycles_by_part={"gating": "x"}), "wrong type of cycles_by_part"),
        (invalid(model_flops=float("nan")), "wrong type of model_flops"),
        (invalid(tokens=0), "not a complete plan"),
        (invalid(cycles=None), "not a complete plan"),
        (invalid(model_flops=None), "not a complete plan"),
        (invalid(topology="v9:2x2x1"), "not a complete plan"),
        (invalid(topology="v5e:16x8"), "program train on v5e:16x8, but the published"),
        (invalid(model="m4.MoE512E12L"), "a plan of m4.MoE512E12L; the file's name"),
    ],
)
def test_invalid_file_is_named(tmp_path, text, message):
    """Protects the one-line error for every kind of invalid plan."""
    path = tmp_path / "m4.MoE128E12L.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(str(path))) as error:
        of_plans.load(tmp_path)
    assert message in str(error.value)


def run(capsys, *arguments: str) -> tuple[int, str]:
    try:
        status = app.execute(
            report.main,
            ["report", "--layer_pairs=", "--collective_times=", "--layout_searches=", *arguments],
            report._VALUES,
        )
    finally:
        report._VALUES.unparse_flags()
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.parametrize("flag", ["layer_pairs", "collective_times", "layout_searches"])
def test_missing_results_are_one_line(tmp_path, capsys, flag):
    """A typo must not leave figure 8 or the measured figure 9 out in silence."""
    planned().save(tmp_path / "m4.MoE128E12L.json")
    status, printed = run(capsys, f"--plans={tmp_path}", f"--{flag}=typo.json", f"--output={tmp_path}/x.html")
    assert status == 2
    assert f"--{flag}=typo.json: No such file or directory; `python -m tools.partitioning.{flag}`" in printed
    assert not (tmp_path / "x.html").exists()


def test_a_mistake_in_a_later_flag_is_found_before_the_page_is_written(tmp_path, capsys):
    """The page would be new, and the command have failed."""
    planned().save(tmp_path / "m4.MoE128E12L.json")
    for flag, message in (("--figures", "is not a directory; expected"), ("--planning", "the markers")):
        path = tmp_path / "m4.MoE128E12L.json"
        status, printed = run(capsys, f"--plans={tmp_path}", f"--{flag[2:]}={path}", f"--output={tmp_path}/x.html")
        assert status == 2 and message in printed and not (tmp_path / "x.html").exists()


@pytest.mark.slow
def test_command_writes_page_and_figures(tmp_path, capsys):
    """The command creates the directories, writes complete files, and leaves no partial file."""
    planned().save(tmp_path / "m4.MoE128E12L.json")
    output = tmp_path / "pages" / "report.html"
    status, printed = run(capsys, f"--plans={tmp_path}", f"--output={output}", f"--figures={tmp_path}/figures")
    assert status == 0 and f"{output}: 1 plan, {len(NAMES) - 1} of the tables not planned" in printed
    names = ["collectives.svg", "memory.svg", "pipelines.svg", "time.svg"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == names
    assert list(output.parent.iterdir()) == [output] and output.read_bytes() == report.page(
        {"m4.MoE128E12L": planned()}
    )


def test_no_plan_is_an_error(tmp_path, capsys):
    """An empty or missing directory gives status 2 and no page."""
    for directory in (tmp_path, tmp_path / "none"):
        status, printed = run(capsys, f"--plans={directory}", f"--output={tmp_path / 'report.html'}")
        assert status == 2 and f"--plans={directory}: no plan (NAME.json) found" in printed
    assert not pathlib.Path(tmp_path / "report.html").exists()


@pytest.mark.parametrize("output", ["/", "{tmp}", "/dev/null"])
def test_output_must_be_a_file(tmp_path, capsys, output):
    """Protects directories and devices from being replaced."""
    planned().save(tmp_path / "m4.MoE128E12L.json")
    status, printed = run(capsys, f"--plans={tmp_path}", f"--output={output.format(tmp=tmp_path)}")
    assert status == 2 and "expected the name of a file" in printed
    assert run(capsys, f"--plans={tmp_path}", "--output=") == (
        2,
        "error: --output=: expected a value; give it one, or leave the flag out.\n",
    )


def test_bars_show_their_values():
    """Protects the scale of the bars: one rectangle per value, in order, in the value's colour."""
    bar = charts.Bar("one", {"a": 1.0, "b": 3.0}, "four")
    figure = charts.stacked({"all": [bar]}, {"a": "#aa0000", "b": "#00bb00"}, "s")
    boxes = [patch.get_extents().transformed(figure.axes[0].transData.inverted()) for patch in figure.axes[0].patches]
    assert [(box.x0, box.width) for box in boxes] == [pytest.approx((0, 1)), pytest.approx((1, 3))]
    text = style.svg(figure).decode()
    assert "#aa0000" in text and "#00bb00" in text and ">four</text>" in text
