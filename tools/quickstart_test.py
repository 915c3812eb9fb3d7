"""Tests that the quickstart runs public commands in order, and how it ends if one fails."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys

import pytest

from lingvo_moe import experiment
from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments as tiny
from tools import quickstart

pytestmark = pytest.mark.slow


@pytest.fixture
def flags(tmp_path):
    values = quickstart._VALUES
    saved = values.flag_values_dict()
    values(["quickstart", f"--directory={tmp_path}", "--preset=django", "--languages=de,fr", "--steps=7", "--seed=3"])
    yield values
    for name, value in saved.items():
        values[name].value = value


def test_stages_are_public_commands_with_matching_paths(flags, tmp_path, monkeypatch, capsys):
    """Each stage reads what the one before wrote; a sample is shown with our translation and the reference."""
    stages = []

    def stage(title, module, *arguments):
        stages.append((module, arguments))
        if len(stages) == 1:
            tiny.make_data(tmp_path)
            (tmp_path / "unseen").symlink_to(tmp_path / "corpus")
        if arguments[0] == "eval":
            name = arguments[-1].removeprefix("--json=")
            bleu = 30.0 if name.endswith("corpus.json") else 20.0
            scores = [{"bleu": bleu - 8, "copy_bleu": 1.0}, {"bleu": bleu + 8, "copy_bleu": 4.0}]
            pathlib.Path(name).write_text(json.dumps({"scores": scores}), encoding="utf-8")
        if arguments[0] == "translate":
            (tmp_path / "samples.en.txt").write_text("".join(f"line {i}\n" for i in range(8)), encoding="utf-8")

    monkeypatch.setattr(quickstart, "_stage", stage)
    quickstart.main(["quickstart"])
    assert [(module, arguments[0]) for module, arguments in stages] == [
        ("tools.build_corpus", "--preset=django"),
        ("tools.build_corpus", "--preset=unseen"),
        ("tools.train_tokenizer", f"--corpus={tmp_path}/corpus"),
        ("tools.train_embeddings", f"--corpus={tmp_path}/corpus"),
        ("lingvo_moe", "train"),
        ("lingvo_moe", "eval"),
        ("lingvo_moe", "eval"),
        ("lingvo_moe", "translate"),
    ]
    assert {"--languages=de,fr", f"--unseen_by={tmp_path}/corpus"} <= set(stages[1][1])
    assert {"--source_vocabulary=24000", "--target_vocabulary=8000"} <= set(stages[2][1])
    assert {"--steps=7", "--set=training.seed=3", "--set=input.seed=3"} <= set(stages[4][1])
    assert stages[3][1][-1] == f"--output={tmp_path}/embeddings.safetensors"
    assert {f"--initial_embeddings={tmp_path}/embeddings.safetensors", f"--corpus={tmp_path}/corpus"} <= set(
        stages[4][1]
    )
    assert {f"--logdir={tmp_path}/log", f"--tokenizers={tmp_path}/tokenizers"} <= set(stages[4][1])
    assert [f"--corpus={tmp_path}/{name}" in stages[i][1] for i, name in ((5, "corpus"), (6, "unseen"))] == [True, True]
    shown = capsys.readouterr().out
    (_, source, reference), *_ = samples = quickstart._samples(Corpus.open(tmp_path / "corpus"))
    assert f"Of its own packages:\n\nde         {source}\nours       line 0\nreference  {reference}\n\nfr  " in shown
    assert f"Of packages it has not seen:\n\nde         {source}\nours       line 4\n" in shown and "Curves: " in shown
    assert "own packages 30.0 (2.5), unseen packages 20.0 (2.5)." in shown  # means of two languages
    written = (tmp_path / "samples.txt").read_text(encoding="utf-8")
    assert written == "".join(f"{source}\n" for _, source, _ in samples * 2)


@pytest.mark.parametrize("flag, value, before", [("seed", 4, "3"), ("model", "m4.QuickstartShort", "m4.Quickstart")])
def test_another_seed_or_model_needs_another_directory(flags, tmp_path, monkeypatch, flag, value, before):
    """The stages would find the training complete, and report its scores as those of the new seed or schedule."""
    stages = []
    monkeypatch.setattr(quickstart, "_stage", lambda title, module, *arguments: stages.append(title))
    monkeypatch.setattr(quickstart, "_translate_samples", lambda *arguments: None)
    monkeypatch.setattr(quickstart, "_result", lambda directory: "")
    flags["model"].value = "m4.Quickstart"
    quickstart.main(["quickstart"])
    quickstart.main(["quickstart"])  # resumes
    started, flags[flag].value = len(stages), value
    message = f"--{flag}={value}: --directory={tmp_path} has a training with --{flag}={before}. Name another --dir"
    with pytest.raises(UserError, match=message):
        quickstart.main(["quickstart"])
    assert len(stages) == started


@pytest.mark.parametrize(
    "model, changes, sizes",
    [
        ("m4.Quickstart", [], ["--align_pieces", "--source_vocabulary=24000", "--target_vocabulary=8000"]),
        ("m4.Quickstart", ["source_vocabulary=8000"], ["--shared_vocabulary=8000"]),
        ("m4.Small", [], ["--align_pieces", "--source_vocabulary=16000", "--target_vocabulary=8000"]),
    ],
)
def test_tokenizers_are_those_of_the_model(model, changes, sizes):
    """One for both sides where the model has one table, two elsewhere."""
    assert quickstart._vocabularies(experiment.get(model, changes).model) == sizes


@pytest.mark.parametrize(
    "multiplies_bfloat16, has_avx512_bf16, name",
    [
        (True, True, "m4.Quickstart"),
        (False, True, "m4.QuickstartMedium"),
        (False, False, "m4.QuickstartShort"),
    ],
)
def test_a_slow_processor_trains_fewer_steps(flags, monkeypatch, multiplies_bfloat16, has_avx512_bf16, name):
    """The models differ in nothing but the steps and the schedule that depends on them."""
    stages = []
    monkeypatch.setattr(quickstart.processor, "multiplies_bfloat16", lambda: multiplies_bfloat16)
    monkeypatch.setattr(quickstart.processor, "has_avx512_bf16", lambda: has_avx512_bf16)
    monkeypatch.setattr(quickstart, "_stage", lambda title, module, *arguments: stages.append(arguments))
    monkeypatch.setattr(quickstart, "_translate_samples", lambda *arguments: None)
    monkeypatch.setattr(quickstart, "_result", lambda directory: "")
    quickstart.main(["quickstart"])
    named = [arguments[1] for arguments in stages if arguments[0] in ("train", "eval")]
    assert named == [f"--model={name}"] * 3
    whole, short = experiment.get("m4.Quickstart"), experiment.get(name)
    assert {5800: "m4.Quickstart", 3600: "m4.QuickstartMedium", 1800: "m4.QuickstartShort"}[
        short.training.steps
    ] == name
    assert whole == dataclasses.replace(short, training=whole.training, optimizer=whole.optimizer)
    rate = whole.optimizer.learning_rate
    assert short.optimizer == dataclasses.replace(whole.optimizer, learning_rate=short.optimizer.learning_rate)
    assert (rate.peak_value, rate.warmup_steps) == (
        short.optimizer.learning_rate.peak_value,
        short.optimizer.learning_rate.warmup_steps,
    )


def test_a_model_that_does_not_translate_is_one_line(flags):
    flags["model"].value = "unet.Small"
    with pytest.raises(UserError, match="--model=unet.Small does not translate"):
        quickstart.main(["quickstart"])


def test_samples_are_chosen_by_rule(tmp_path):
    """The languages in turn, short sentences, no English twice, and the same ones every time."""
    corpus = Corpus.open(tiny.make_data(tmp_path).corpus)
    samples = quickstart._samples(corpus)
    assert [language for language, *_ in samples] == ["de", "fr", "de", "fr"]
    assert len({english for *_, english in samples}) == 4 and samples == quickstart._samples(corpus)
    for language, sentence, english in samples:
        assert (sentence, english) in list(corpus.pairs("test", language)) and len(sentence) <= 80


@pytest.mark.parametrize(
    "code, status, remedy",
    [
        ("raise SystemExit(1)", 1, "Run the same command again to resume from here."),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9, "Run the same command again to resume from here."),
        ("raise SystemExit(2)", 2, "no --force or --output: where the error asks for one, name another"),
    ],
)
def test_failed_stage_ends_the_quickstart_with_its_status(code, status, remedy, monkeypatch, capsys):
    """A signal becomes 128 + its number, as in a shell; the handler of SIGINT is restored.

    After a mistake, the same command would fail again.
    """
    _stages_run(code, monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        quickstart._stage("5/7 training", "lingvo_moe", "train")
    assert ended.value.code == status and signal.getsignal(signal.SIGINT) is before
    printed = capsys.readouterr().err
    assert remedy in printed and ("Run the same command" in printed) == (status != 2)


def test_ctrl_c_leaves_the_stage_time_to_save(monkeypatch):
    """The signal also reaches the stage; the quickstart waits for it to end."""
    code = (
        "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: (time.sleep(0.2), exit(130)))\n"
        "import os; os.kill(os.getppid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"
    )
    _stages_run(code, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        quickstart._stage("5/7 training", "lingvo_moe", "train")
    assert ended.value.code == 130


@pytest.mark.parametrize("status, code", [(130, 130), (0, 130), (None, 128 + signal.SIGTERM)])
def test_sigterm_is_passed_on_to_the_stage(monkeypatch, status, code):
    """It would go on as an orphan. No other stage begins, even if this one ends well; None: it has no handler."""
    handle = "" if status is None else f"signal.signal(signal.SIGTERM, lambda *_: exit({status}))\n"
    _stages_run(f"import os, signal, time\n{handle}os.kill(os.getppid(), signal.SIGTERM); time.sleep(20)", monkeypatch)
    with pytest.raises(SystemExit) as ended:
        quickstart._stage("5/7 training", "lingvo_moe", "train")
    assert ended.value.code == code


def _stages_run(code: str, monkeypatch):
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command: start([sys.executable, "-c", code]))


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--max_pairs=0", "--max_pairs=0: "),
        ("--steps=0", "--steps=0: "),
        ("--seed=-1", "--seed=-1: "),
        ("--unseen=unsene", "--unseen=unsene: no such preset of tools.build_corpus. Did you mean unseen"),
        ("--preset=none", "--preset=none: no such preset"),
        ("--languages=de,x y", "--languages"),
    ],
)
def test_mistakes_are_reported_before_the_first_stage(flag, message, monkeypatch, tmp_path, capsys):
    """Not when their stage runs, after minutes."""
    monkeypatch.setattr(quickstart, "_stage", None)
    arguments = ["quickstart", "--model=m4.Quickstart", f"--directory={tmp_path / 'new'}", flag]
    assert app.execute(quickstart.main, arguments, quickstart._VALUES) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "new").exists()
