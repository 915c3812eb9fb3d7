"""Protects the tables of confidence and quality: shares by hand, and a run from a corpus to the tables."""

from __future__ import annotations

import json

import pytest

from lingvo_moe.cli import app, main
from lingvo_moe.testing import experiments as tiny
from tools.quality import altered_lines, confidence, lost_placeholders
from tools.quality.confidence import Scored

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


def _scored(value: float, chrf: float, translation: str = "other") -> Scored:
    return Scored("de", "Hallo", translation, "Hello", value, value - 1, chrf)


# The lowest six of 20 are poor, and the highest two are the reference.
_FOUND = [_scored(0.05 * n, 20.0 if n < 6 else 60.0, "hello" if n >= 18 else "other") for n in range(20)]


def test_bands_are_tenths_by_confidence():
    """Each with its mean, the share of references, whatever their case, and the share of poor translations."""
    _, _, *rows = confidence.bands(_FOUND).splitlines()
    assert len(rows) == 10
    assert rows[0] == "| 0.00 to 0.05 | 2 | 20.0 | 0 % | 100 % |"
    assert rows[-1] == "| 0.90 to 0.95 | 2 | 60.0 | 100 % | 0 % |"


def test_few_sentences_have_fewer_bands():
    """No row is empty."""
    assert len(confidence.bands(_FOUND[:3]).splitlines()) == 5


def test_thresholds_count_lines_and_poor_ones():
    """Below 0.4 are eight lines, all six poor ones among them; without a poor line there is no share of them."""
    rows = confidence.thresholds(_FOUND).splitlines()
    assert "| 0.4 | 40 % | 75 % | 100 % |" in rows
    assert "| 0.4 | 0 % | - | - |" in confidence.thresholds(_FOUND[18:]).splitlines()


def test_rank_correlation_is_spearmans():
    """Of equal ranks 1 whatever the values; of opposite ranks -1; equal values share their mean rank."""
    values = (0.1, 0.2, 0.9)
    rising = [_scored(value, chrf) for value, chrf in zip(values, (1.0, 50.0, 51.0))]
    falling = [_scored(value, chrf) for value, chrf in zip(values, (51.0, 50.0, 1.0))]
    ties = [_scored(value, chrf) for value, chrf in zip(values, (1.0, 2.0, 2.0))]
    assert "confidence 1.00, score 1.00" in confidence.correlations(rising)
    assert "confidence -1.00" in confidence.correlations(falling)
    assert "confidence 0.87" in confidence.correlations(ties)  # sqrt(3) / 2
    equal = [_scored(value, 30.0) for value in values]
    for found in (equal, equal[:1]):
        assert "confidence not defined: all chrF are equal, score not" in confidence.correlations(found)
    assert "confidence not defined: all values are" in confidence.correlations([_scored(0.5, c) for c in (1.0, 2.0)])


def test_a_corpus_is_measured(data, tmp_path, capsys):
    """With the flags of `eval`; every sentence is written, from the least confidence on."""
    flags = [*tiny.settings(), f"--tokenizers={data.tokenizers}", f"--logdir={tmp_path / 'log'}"]
    corpus, output = f"--corpus={data.corpus}", tmp_path / "found.json"
    trained = main.main(["lingvo_moe", "train", *flags, corpus, "--steps=2", "--set=training.evaluate_every=0"])
    assert trained == 0
    arguments = ["confidence", *flags, corpus, "--max_pairs=6", f"--json={output}"]
    capsys.readouterr()
    assert app.execute(confidence.main, arguments, confidence.FLAGS) == 0
    printed = capsys.readouterr().out
    assert app.execute(confidence.main, [*arguments[:-1], "--json=-"], confidence.FLAGS) == 0
    again = capsys.readouterr()
    found = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(again.out) == found and printed in again.err
    assert len(found) == 12 and {row["language"] for row in found} == {"de", "fr"}
    values = [row["confidence"] for row in found]
    assert values == sorted(values) and all(0 < value < 1 for value in values)
    assert printed.count("\n| 0.") >= 10 and "rank correlation with chrF" in printed


def test_a_missing_corpus_is_named(capsys):
    """Before anything is loaded."""
    assert app.execute(confidence.main, ["confidence"], confidence.FLAGS) == 2
    assert "--corpus is missing" in capsys.readouterr().err


@pytest.mark.parametrize("tool", [confidence, altered_lines, lost_placeholders])
def test_modules_of_a_user_are_imported_first(tool, capsys):
    """They may register the model; the flag was accepted and ignored."""
    assert app.execute(tool.main, ["tool", "--import=missing.py", "--logdir=missing"], tool.FLAGS) == 2
    assert "--import=missing.py: no such file" in capsys.readouterr().err
