"""Protects what a study concludes from: trend line, tokens to a loss, specialisation, tables and figures by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import xml.etree.ElementTree

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.inference.evaluation import LanguageScore
from tools.report import style
from tools.study import charts, results, tables
from tools.study.results import Results, Routing, RunResult

_CURVE = [(10, 1000, 60.0, 5.0, 0.1), (20, 2000, 120.0, 4.0, 0.5), (30, 3000, 180.0, 3.8, 0.9)]
_PAIRS = {"fr": 900, "ca": 90, "nn": 9}


def _run(model: str, bleu: dict[str, float], language: str = "", seed: int = 0, experts: int = 0) -> RunResult:
    shares = {"fr": [1.0, 0.0], "ca": [0.0, 1.0], "nn": [0.5, 0.5]}
    return RunResult(
        model=model,
        language=language,
        seed=seed,
        assignments=["model.num_experts=2"],
        weights=1_500_000,
        experts=experts,
        steps=30,
        cpu_seconds=180.0,
        tokens=3000,
        curve=_CURVE,
        overflow=[(10, 0.2), (30, 0.015)] if experts else [],
        scores=[LanguageScore(name, _PAIRS[name], 50, score, 30.0, 2.0, 9.0) for name, score in bleu.items()],
        cross_entropy=3.9,
        source_gain=0.8,
        routing={"encoder/2": Routing(shares, 2 / 3, 0.1)} if experts else {},
    )


@pytest.fixture
def study() -> Results:
    """Three languages with a bilingual model each, a dense model, and one with experts and two seeds."""
    alone = {"fr": 20.0, "ca": 10.0, "nn": 4.0}
    return Results(
        3.0,
        [4.5, 3.9, 3.0],
        [
            *(_run(f"bilingual {language}", {language: bleu}, language) for language, bleu in alone.items()),
            _run("dense", {"fr": 15.0, "ca": 11.0, "nn": 8.0}),
            _run("2 experts", {"nn": 7.0, "fr": 18.0, "ca": 12.0}, experts=2),
            _run("2 experts", {"nn": 9.0, "fr": 19.0, "ca": 12.0}, seed=1, experts=2),
        ],
        ["64_experts"],
    )


def test_trend_is_a_moving_average():
    """Over ten values, five before and four after; at the ends over those that there are."""
    values = [float(i) for i in range(20)]
    found = results.trend(values)
    assert found[10] == sum(range(5, 15)) / 10 and found[5] == sum(range(10)) / 10
    assert found[0] == sum(range(5)) / 5 and found[19] == sum(range(14, 20)) / 6
    assert results.trend([3.0], 10) == [3.0] and results.trend([1.0, 4.0], 1) == [1.0, 4.0] and results.trend([]) == []


@pytest.mark.parametrize(
    ("loss", "reached"),
    [(4.5, (1500, 90.0)), (4.0, (2000, 120.0)), (6.0, (1000, 60.0)), (3.9, (2500, 150.0)), (3, None)],
)
def test_tokens_to_a_loss(loss, reached):
    """On a straight line between two evaluations; never, where the loss is not reached."""
    found = _run("dense", {}).reached(loss)
    assert found is None if reached is None else found == pytest.approx(reached)


def test_a_loss_that_rises_again_was_reached():
    curve = [(1, 10, 1.0, 4.0, 0.0), (2, 20, 2.0, 5.0, 0.0), (3, 30, 3.0, 3.0, 0.0)]
    assert dataclasses.replace(_run("dense", {}), curve=curve).reached(4.0) == (10, 1.0)


def test_a_loss_that_is_not_finite_is_left_out():
    """A point of the curve before it and one after it are still on a straight line."""
    curve = [(1, 10, 1.0, 5.0, 0.0), (2, 20, 2.0, math.nan, 0.0), (3, 30, 3.0, 3.0, 0.0)]
    assert dataclasses.replace(_run("dense", {}), curve=curve).reached(4.0) == (20, 2.0)


def test_choices_are_counted_by_language_and_layer():
    """Two lines of fr, one of ca in two parts: fr goes to experts 0 and 1, ca to expert 3 alone."""
    lines = [
        {"line": 1, "part": 1, "source": ["a"], "translation": ["b"], "encoder/2": [[[0, 0.6], [1, 0.4]], [[0, 1.0]]]},
        {"line": 2, "part": 1, "encoder/2": [[[1, 1.0]]]},
        {"line": 3, "part": 1, "encoder/2": [[[3, 1.0]]], "decoder/2": [[[2, 1.0]]]},
        {"line": 3, "part": 2, "encoder/2": [[[3, 1.0]], []]},
    ]
    found = results.routing(map(json.dumps, lines), ["fr", "fr", "ca"], 4)
    assert list(found) == ["encoder/2", "decoder/2"]
    assert found["encoder/2"].shares == {"fr": [0.5, 0.5, 0.0, 0.0], "ca": [0.0, 0.0, 0.0, 1.0]}
    assert found["encoder/2"].load == [1.0, 1.0, 0.0, 2.0]
    # The expert identifies one of two languages.
    assert found["encoder/2"].information == pytest.approx(1.0) and found["decoder/2"].information == 0.0


def test_experts_that_take_all_languages_alike_have_no_information():
    """One that a third language prefers has a little: by the definition, over all pairs."""
    lines = [{"line": i, "encoder/2": [[[0, 0.5], [1, 0.5]]]} for i in (1, 2)]
    assert results.routing(map(json.dumps, lines), ["fr", "ca"], 2)["encoder/2"].information == 0.0
    lines.append({"line": 3, "encoder/2": [[[0, 1.0]]]})
    p = {("fr", 0): 1 / 6, ("fr", 1): 1 / 6, ("ca", 0): 1 / 6, ("ca", 1): 1 / 6, ("nn", 0): 1 / 3}
    of_expert = {expert: sum(q for (_, e), q in p.items() if e == expert) for expert in (0, 1)}
    expected = sum(q * math.log2(q / (of_expert[e] / 3)) for (_, e), q in p.items())
    found = results.routing(map(json.dumps, lines), ["fr", "ca", "nn"], 2)
    assert found["encoder/2"].information == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("preference", [0.0, 0.3])
def test_chance_is_what_few_choices_show_of_experts_that_take_all_languages_alike(preference):
    """30 choices of 64 experts for each of 20 sentences; a language prefers an expert of its own, or none."""
    random, languages = np.random.default_rng(1), [name for name in ("fr", "ca", "nn", "it", "es") for _ in range(20)]
    lines = []
    for number, language in enumerate(languages, 1):
        chosen = random.integers(64, size=30)
        chosen[random.random(30) < preference] = ["fr", "ca", "nn", "it", "es"].index(language)
        lines.append(json.dumps({"line": number, "encoder/2": [[[int(expert), 1.0]] for expert in chosen]}))
    found = results.routing(lines, languages, 64)["encoder/2"]
    own, other = preference + (1 - preference) / 64, (1 - preference) / 64
    of_all = (own + 4 * other) / 5
    expected = own * math.log2(own / of_all) + 4 * other * math.log2(other / of_all)
    assert found.chance > 0.02 and found.information - found.chance == pytest.approx(expected, abs=0.02)


def test_results_are_read_as_they_were_written(study, tmp_path):
    study.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == study


def test_numbers_that_are_missing_are_null(study, tmp_path):
    """NaN is not JSON: other readers refuse it."""
    run = dataclasses.replace(study.runs[0], curve=[(10, 1000, 60.0, 5.0, math.nan)], source_gain=math.nan)
    dataclasses.replace(study, runs=[run]).save(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    assert "NaN" not in text and '"source_gain": null' in text and "[10, 1000, 60.0, 5.0, null]" in text
    (found,) = Results.load(tmp_path / "results.json").runs
    assert math.isnan(found.source_gain) and math.isnan(found.curve[0][4]) and found.curve[0][:4] == (10, 1000, 60, 5)


def test_a_line_separator_in_a_text_does_not_end_a_line(tmp_path):
    """`translate --explain` writes it as it is."""
    (tmp_path / "experts.jsonl").write_text('{"source": "a\u2028b\x85"}\n{"line": 2}\n', encoding="utf-8")
    assert [json.loads(line) for line in results._lines(tmp_path / "experts.jsonl")] == [
        {"source": "a\u2028b\x85"},
        {"line": 2},
    ]


_ROUTING_LIST = json.dumps(
    {
        "version": 1,
        "minutes": 1.0,
        "losses": [],
        "missing": [],
        "runs": [dataclasses.asdict(_run("a", {})) | {"routing": []}],
    }
)


@pytest.mark.parametrize(
    "field, value",
    [("minutes", "x"), ("missing", 3), ("losses", [""]), ("steps", "3"), ("curve", [[1, "x", 2, 3, 4]]), ("bleu", [])],
)
def test_wrong_types_are_an_error(field, value, study, tmp_path):
    """At any depth; they would end the drawing."""

    def replaced(content):
        if isinstance(content, list):
            return [replaced(item) for item in content]
        if isinstance(content, dict):
            return {name: value if name == field else replaced(item) for name, item in content.items()}
        return content

    study.save(tmp_path / "results.json")
    content = replaced(json.loads((tmp_path / "results.json").read_text(encoding="utf-8")))
    (tmp_path / "results.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=rf"results\.json: not the results.json of a study \(wrong type of {field}\)"):
        Results.load(tmp_path / "results.json")


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "5",
        "null",
        '"x"',
        '{"version": 9}',
        '{"version": 1, "runs": [{}]}',
        "not JSON",
        None,
        _ROUTING_LIST,
    ],
)
def test_other_files_are_an_error(content, tmp_path):
    if content is not None:
        (tmp_path / "results.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"results\.json"):
        Results.load(tmp_path / "results.json")


def test_languages_are_ordered_by_resource(study):
    """However a run lists them."""
    assert study.languages == _PAIRS and list(study.languages) == ["fr", "ca", "nn"]
    assert study.baselines == {"fr": 20.0, "ca": 10.0, "nn": 4.0}
    assert study.bleu("2 experts") == {"fr": [18.0, 19.0], "ca": [12.0, 12.0], "nn": [7.0, 9.0]}


def test_tables_show_gains_by_resource_and_what_is_missing(study):
    text = tables.text(study)
    assert "**Not measured: 64_experts.**" in text
    # The seeds differ: fr -2 and -1, ca +2, nn +3 and +5; groups of one language each.
    row = "| 2 experts | 0 | 1.5M | 30 | 0.00M | 3.0 | 3.900 | 3.800 | 0.800 | 12.3 | 2.0 | +1.0 | -2.0 | +2.0 | +3.0 |"
    assert row in text and "| 13.3 | 2.0 | +2.0 | -1.0 | +2.0 | +5.0 |" in text
    assert "| fr | 900 | 50 | 2.0 | 20.0 | 15.0 | 18.5 |" in text
    assert "| low resource | 9 | 50 | 2.0 | 4.0 | 8.0 | 8.0 |" in text
    assert "| dense | 0 | 0.00 (1.5) | 0.00 (2.5) | not reached |" in text
    assert "| 2 experts | 1 | 1.50 % | encoder/2 | 1.00 | 0 of 2 | 0.667 |" in text


def test_tables_of_nothing_say_so():
    """Before the first run is finished."""
    text = tables.text(Results(60.0, [], [], ["dense", "16_experts"]))
    assert "0 runs. **Not measured: dense, 16_experts.**" in text


@pytest.mark.slow
def test_figures_show_all_models_and_languages(study):
    """As SVG with texts as texts; the same numbers give the same bytes."""
    drawn = {name: style.svg(figure) for name, figure in charts.figures(study).items()}
    assert set(drawn) == {"gain", "efficiency", "experts", "languages_2_experts"}
    again = {name: style.svg(figure) for name, figure in charts.figures(study).items()}
    assert drawn == again
    for name, svg in drawn.items():
        xml.etree.ElementTree.fromstring(svg)
        assert b"2 experts" in svg and (b">dense<" in svg) == (name in ("gain", "efficiency")) and len(svg) < 100_000
    for language in _PAIRS:
        assert f">{language}<".encode() in drawn["gain"] and f">{language}<".encode() in drawn["languages_2_experts"]


def test_the_trend_of_a_model_is_drawn_above_the_bilingual_models(study):
    """The means over seeds minus the baselines: -1.5, +2 and +4."""
    axes = charts.gain(study).axes[0]
    points = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert list(points["2 experts"]) == pytest.approx([1.5] * 3)  # all three are in one window
    markers = next(line for line in axes.lines if line.get_marker() == "o" and line.get_ydata()[0] == -1.5)
    assert list(markers.get_ydata()) == [-1.5, 2.0, 4.0]


@pytest.mark.slow
def test_a_study_without_baselines_or_experts_can_be_drawn(study):
    """The first run to finish may be any."""
    for runs in ([], study.runs[:1], study.runs[3:4], study.runs[4:5]):
        part = dataclasses.replace(study, runs=runs)
        assert all(style.svg(figure) for figure in charts.figures(part).values())
        assert "### Models" in tables.text(part)
