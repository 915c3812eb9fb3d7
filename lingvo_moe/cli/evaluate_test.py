"""Eval prints scores beside their baselines, and writes them as JSON."""

from __future__ import annotations

import itertools
import json
import math
import types

import pytest
import sacrebleu

from lingvo_moe.cli import evaluate, main
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.inference import held_out_loss
from lingvo_moe.testing import experiments as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", *arguments])


def test_eval_prints_and_writes_scores_beside_the_copy_baseline(trained, data, tmp_path, capsys):
    """Each language has a row; the average is the mean of the rows; unknown languages are named."""
    flags = [*trained, f"--corpus={data.corpus}", "--max_pairs=3", f"--json={tmp_path / 'scores.json'}"]
    assert _run("eval", *flags, f"--translations={tmp_path / 'translations.tsv'}") == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    scores, loss = written["scores"], written["loss"]
    assert [row["language"] for row in scores] == ["de", "fr"] and all(row["test_pairs"] == 3 for row in scores)
    lines = (tmp_path / "translations.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    assert [row[0] for row in rows] == ["de"] * 3 + ["fr"] * 3 and all(0 < float(row[1]) < 1 for row in rows)
    pairs = set(itertools.chain(*(Corpus.open(data.corpus).pairs("test", language) for language in ("de", "fr"))))
    assert {(row[2], row[4]) for row in rows} <= pairs
    for score in scores:  # of the translations that were written
        own = [row for row in rows if row[0] == score["language"]]
        chrf = sacrebleu.corpus_chrf([row[3] for row in own], [[row[4] for row in own]]).score
        assert chrf == pytest.approx(score["chrf"])
    average = sum(row["copy_chrf"] for row in scores) / 2
    *_, averages, last = out.splitlines()
    assert averages.startswith("average of 2") and averages.endswith(f"{average:.1f}")
    assert last == (
        f"cross-entropy {loss['cross_entropy']:.3f} nats per target token of the test split (step {written['step']}); "
        f"{loss['shuffled_cross_entropy']:.3f} with the sources of other sentences: source gain "
        f"{loss['shuffled_cross_entropy'] - loss['cross_entropy']:.3f}"
    )
    for flag in ("--translations", "--json"):
        assert _run("eval", *flags, f"{flag}={data.corpus}/test/de.tsv") == 2
        assert f"{flag}={data.corpus}/test/de.tsv is inside of --corpus=" in capsys.readouterr().err
    assert _run("eval", *flags, "--languages=dee") == 2
    assert "Did you mean de" in capsys.readouterr().err


def test_eval_scores_one_checkpoint(trained, data, monkeypatch, capsys):
    """The loss is of the checkpoint that translates, though training saves others; it is computed before them."""
    calls = []

    def loss(*arguments) -> held_out_loss.HeldOutLoss:
        calls.append(("loss", arguments[-1]))
        return held_out_loss.HeldOutLoss(arguments[-1], 9, 1.0, 2.0, 0)

    def translated(translator, *arguments):
        calls.append(("translate", translator.step))
        return [], 0

    monkeypatch.setattr(evaluate, "Translator", lambda *_: types.SimpleNamespace(step=3))
    monkeypatch.setattr(held_out_loss, "compute", loss)
    monkeypatch.setattr(evaluate, "translate_held_out", translated)
    monkeypatch.setattr(evaluate, "score", lambda *_: [])
    monkeypatch.setattr(evaluate, "table", lambda *_, **__: "")
    assert _run("eval", *trained, f"--corpus={data.corpus}") == 0
    assert calls == [("loss", 3), ("translate", 3)] and "of the test split (step 3);" in capsys.readouterr().out


def test_a_language_model_is_trained_and_evaluated(data, tmp_path, capsys):
    """By the commands; its perplexity is printed and written."""
    shared = [
        *tiny.language_model_settings(),
        f"--tokenizers={data.tokenizers}",
        f"--logdir={tmp_path / 'log'}",
        f"--corpus={data.corpus}",
    ]
    assert _run("train", *shared, "--steps=2", "--set=training.evaluate_every=0") == 0
    assert _run("eval", *shared, f"--json={tmp_path / 'found.json'}") == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert capsys.readouterr().out == (
        f"{found['cross_entropy']:.4f} nats per token, perplexity {found['perplexity']:.2f}, over {found['tokens']:,} "
        f"tokens of the test split, after 2 steps\n"
    )
    assert (found["model"], found["split"], found["step"]) == (tiny.LANGUAGE_MODEL, "test", 2) and found["tokens"] > 100
    assert found["perplexity"] == math.exp(found["cross_entropy"])


def test_eval_of_a_diverged_language_model_writes_json(tmp_path, monkeypatch, capsys):
    """Its perplexity is beyond the range of floats, and JSON has no infinity."""
    file = tmp_path / "found.json"
    monkeypatch.setattr(evaluate.run_setup, "set_up", lambda *_: (tiny.LANGUAGE_MODEL, None, None))
    monkeypatch.setattr(held_out_loss, "compute", lambda *_: held_out_loss.HeldOutLoss(2, 9, 800.0, None, 0))
    assert _run("eval", f"--model={tiny.LANGUAGE_MODEL}", f"--logdir={tmp_path}", f"--json={file}") == 0
    assert "800.0000 nats per token, perplexity inf, over 9 tokens" in capsys.readouterr().out
    assert json.loads(file.read_text(), parse_constant=pytest.fail)["perplexity"] == "inf"
    # On standard output, JSON is alone.
    assert _run("eval", f"--model={tiny.LANGUAGE_MODEL}", f"--logdir={tmp_path}", "--json=-") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tokens"] == 9 and "800.0000 nats per token" in printed.err
