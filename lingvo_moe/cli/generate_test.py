"""`generate` writes each prompt with its continuation, and names what cannot be done."""

from __future__ import annotations

import io
import pathlib

import pytest

from lingvo_moe.cli import main
from lingvo_moe.testing import experiments as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_PROMPTS = ["the old", "", "a small bird"]


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", "generate", *arguments])


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> list[str]:
    """Trains for two steps; returns the flag of the log directory, which has all the others."""
    logdir = tmp_path_factory.mktemp("log")
    shared = [f"--tokenizers={data.tokenizers}", f"--logdir={logdir}", f"--corpus={data.corpus}"]
    settings = [*tiny.language_model_settings(), "--set=training.evaluate_every=0"]
    assert main.main(["lingvo_moe", "train", *settings, *shared, "--steps=2"]) == 0
    return [f"--logdir={logdir}", "--devices=2"]


@pytest.fixture
def prompts(tmp_path) -> str:
    return _written(tmp_path, *_PROMPTS)


def _written(directory: pathlib.Path, *lines: str) -> str:
    path = directory / "prompts.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"--input={path}"


def test_each_line_is_continued(trained, prompts, tmp_path, capsys):
    """On standard output as in a file; with scores or several continuations, in columns."""
    assert _run(*trained, prompts) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith(prompt) for prompt, line in zip(_PROMPTS, lines))
    assert _run(*trained, prompts, f"--output={tmp_path / 'out.txt'}", "--scores") == 0
    scored = [line.split("\t") for line in (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()]
    assert [text for _, text in scored] == lines
    assert _run(*trained, prompts, "--continuations=2") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "2", "3", "3"] and rows[::2] == [
        [str(number), *row] for number, row in enumerate(scored, start=1)
    ]


def test_samples_are_those_of_their_seed(trained, prompts, capsys):
    flags = ["--temperature=0.9", "--top_k=20", "--top_p=0.9", "--continuations=3"]
    printed = []
    for seed in (1, 1, 2):
        assert _run(*trained, prompts, *flags, f"--seed={seed}") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2] and len(printed[0].splitlines()) == 9


def test_long_prompts_are_named(trained, tmp_path, capsys):
    """With the number of tokens that a prompt may have: 32 less 12 of the continuation and bos."""
    given = _written(tmp_path, "the", " ".join(tiny.WORDS), "a", " ".join(tiny.WORDS[::-1]))
    assert _run(*trained, given) == 0
    captured = capsys.readouterr()
    assert "lines 2, 4: the prompt has more than 19 tokens; only its end was read" in captured.err
    assert captured.out.splitlines()[1].startswith(" ".join(tiny.WORDS))


def test_an_empty_file_is_an_empty_file(tmp_path, capsys):
    """Without a model, as with `translate`."""
    flags = ["--model=dense_lm.Small", f"--logdir={tmp_path}", _written(tmp_path)]
    assert _run(*flags, f"--output={tmp_path / 'out.txt'}") == 0
    assert "is empty, and so is what is written" in capsys.readouterr().err
    assert (tmp_path / "out.txt").read_text() == ""


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--input=none.txt"], "--input=none.txt: there is no such file; expected one prompt a line"),
        (["--top_k=5"], "--top_k=5 is for sampling: pass --temperature, too"),
        (["--seed=5"], "--seed=5 is for sampling"),
        (["--temperature=0"], "--temperature=0: leave it out. Beam search then finds"),
        (["--temperature=-1"], "--temperature is -1.0; expected at least 0.01"),
        (["--temperature=1", "--top_p=0"], "--top_p is 0.0; expected a number above 0"),
        (["--temperature=1", "--top_k=-1"], "--top_k is -1; expected at least 0"),
        (["--temperature=1", "--beam_size=4"], "--beam_size=4 is for beam search, and --temperature=1 for sampling"),
        (["--continuations=3"], "--continuations=3: expected at most 2, the hypotheses of the beam. Raise --beam_size"),
        (["--max_length=32"], "search.max_length is 32, but the model reads a prompt and its continuation"),
    ],
)
def test_mistakes_are_errors(trained, monkeypatch, flags, message, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert _run(*trained, *flags) == 2
    assert message in capsys.readouterr().err


def test_a_missing_log_directory_is_named_before_prompts_are_read(tmp_path, capsys):
    """Whoever types prompts does not type them in vain."""
    assert _run("--model=dense_lm.Small", _written(tmp_path)) == 2
    assert capsys.readouterr().err == "error: --logdir is missing: the directory of checkpoints and curves.\n"


@pytest.mark.parametrize(
    "model, message",
    [
        ("", "--model is missing, and so is --logdir, which has the model of a training run"),
        ("m4.Small", "m4.Small is a translation model; it does not generate text. `translate` translates"),
        ("conformer.Small", "conformer.Small is no language model"),
    ],
)
def test_models_of_other_kinds_are_refused(model, message, capsys):
    assert _run(*([f"--model={model}", "--logdir=x"] if model else [])) == 2
    assert message in capsys.readouterr().err
