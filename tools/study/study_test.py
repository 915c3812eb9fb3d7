"""The whole tool on tiny models: killed in the middle of a training run, it resumes, and repeats nothing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from lingvo_moe.cli import app
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.utils import file_lock
from tools.study import __main__ as study
from tools.study import ticks, trial
from tools.study.results import Results

_PLAN = """
model = "m4.Quickstart"
vocabulary = 512
max_pairs = 3
losses = [100.0, 0.001]
set = [{settings}]
[languages]
de = 0
fr = 40
[[models]]
name = "4 experts"
set = [
    "model.num_experts=4",
    "model.layer_pattern=moe",
    "training.checkpoint_every=5",
    "training.evaluate_every=5",
]
"""
_REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(data) -> pathlib.Path:
    return data.corpus


@pytest.fixture
def flags():
    saved = study.FLAGS.flag_values_dict()
    yield study.FLAGS
    for name, value in saved.items():
        study.FLAGS[name].value = value


def _plan(directory: pathlib.Path) -> pathlib.Path:
    # The baselines have no experts, so a layer pattern with experts can only be a setting of a model.
    patterns = ("model.layer_pattern=", "model.encoder_layer_pattern=")
    settings = [flag.removeprefix("--set=") for flag in tiny.settings(*patterns) if flag.startswith("--set=")]
    plan = directory / "study.toml"
    plan.write_text(_PLAN.format(settings=", ".join(f'"{setting}"' for setting in settings)), encoding="utf-8")
    return plan


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_and_is_finished_once(corpus, tmp_path):
    """SIGKILL of the tool and of the training in its first half costs what came after the checkpoint, and no more."""
    command = [sys.executable, "-m", "tools.study", f"--corpus={corpus}", f"--plan={_plan(tmp_path)}"]
    command += [f"--directory={tmp_path}/study", "--budget=0.2"]
    log, run_directory = tmp_path / "output.log", tmp_path / "study" / "runs" / "4_experts"
    logdir = run_directory / "log"
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY)}

    def start(wait: bool) -> subprocess.Popen:
        with open(log, "w", encoding="utf-8") as opened:
            process = subprocess.Popen(command, stdout=opened, stderr=opened, env=environment, start_new_session=True)
        if wait:
            assert process.wait() == 0, log.read_text(encoding="utf-8")
        return process

    first = start(wait=False)
    while not Checkpoints(logdir).steps() and first.poll() is None:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    with file_lock.locked(run_directory / "lock"):  # the training has inherited it, and may end later
        pass
    killed, saved = ticks.read(logdir), Checkpoints(logdir).steps()[-1]
    assert killed[-1].seconds < 6 and killed[-1].step - saved <= 2 * 5  # a checkpoint is written while steps continue
    start(wait=True)
    output = log.read_text(encoding="utf-8")
    assert f"resuming from step {saved} " in output
    # Only lines of commands: training that ends during an evaluation advises `python -m lingvo_moe eval`.
    assert re.findall(r"^\$ .*-m lingvo_moe (\w+)", output, re.MULTILINE) == ["train", "train", "eval", "translate"]
    made = ticks.read(logdir)
    kept = [tick for tick in killed if tick.step <= saved]
    # The tick of a step is written after its evaluation, and its checkpoint may be complete before.
    assert made[: len(kept)] == kept and len(kept) >= saved - 1
    assert [tick.step for tick in made] == list(range(1, made[-1].step + 1))  # each step once
    assert made[-1].seconds > 6  # half of the time, and the other half as far as steps take equal times
    (run,) = Results.load(tmp_path / "study" / "report" / "results.json").runs
    assert run.steps == made[-1].step and run.tokens == made[-1].tokens and run.experts == 4
    assert [score.language for score in run.scores] == ["de", "fr"] and run.scores[1].train_pairs == 40
    assert run.reached(100.0) and not run.reached(0.001)
    assert set(run.routing) == {"encoder/1", "decoder/1"} and set(run.routing["encoder/1"].shares) == {"de", "fr"}
    assert {path.name for path in (tmp_path / "study" / "report").iterdir()} == {
        "results.json",
        "tables.md",
        *(f"{name}.svg" for name in ("gain", "efficiency", "experts", "languages_4_experts")),
    }
    with open(tmp_path / "study.toml", "a", encoding="utf-8") as plan:
        plan.write('[[models]]\nname = "dense"\nset = ["model.num_experts=0"]\n')
    command.append("--only=4_experts")
    start(wait=True)
    assert "-m lingvo_moe" not in log.read_text(encoding="utf-8")
    assert Results.load(tmp_path / "study" / "report" / "results.json").missing == ["dense"]


def test_numbers_are_drawn_again_into_a_page(tmp_path, flags):
    """Without any training; prose outside of the markers stays."""
    Results(60.0, [3.0], [], ["dense"]).save(tmp_path / "results.json")
    page = tmp_path / "study.md"
    page.write_text("before\n<!-- study: begin -->\nold\n<!-- study: end -->\nafter\n", encoding="utf-8")
    arguments = [f"--results={tmp_path}/results.json", f"--output={tmp_path}/out", f"--page={page}"]
    assert app.execute(study.main, ["study", *arguments], flags) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "**Not measured: dense.**" in text
    assert app.execute(study.main, ["study", *arguments[:2]], flags) == 0
    assert (tmp_path / "out" / "tables.md").read_text(encoding="utf-8").strip() in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--corpus is missing"),
        (["--corpus=x", "--budget=0"], "--budget=0: expected minutes"),
        (["--corpus=x", "--budget=nan"], "--budget=nan: expected a number"),
        (["--corpus=x", "--budget=inf"], "--budget=inf: expected minutes"),
        (["--corpus=x", "--page=typo.md"], "typo.md: No such file"),
        (["--corpus=x", f"--page={ticks.__file__}"], "ticks.py: the markers `<!-- study: begin -->`"),
        (["--corpus=x", "--plan=missing.toml"], "missing.toml: no such file"),
        (["--corpus=x", "--set=model.num_expert=3"], "no such field"),
        (["--corpus=x", "--only=dense,sparse"], "no run is named 'sparse'; known: bilingual_it,"),
        (["--results=missing.json"], "--output is missing"),
        (["--results=missing.json", "--output=x"], "missing.json: No such file"),
        (
            ["--results=x", f"--output={ticks.__file__}"],
            "ticks.py is not a directory; expected the name of a directory",
        ),
        (["--corpus=x", f"--directory={ticks.__file__}/x"], "ticks.py, which is not a directory; expected"),
        (["--corpus=missing"], "the corpus missing does not exist"),
        (["--corpus=x", "more"], "unexpected argument 'more'"),
    ],
)
def test_mistakes_are_errors(arguments, message, tmp_path, flags, capsys):
    """Before anything is trained, or made."""
    given = [f"--plan={pathlib.Path(study.__file__).with_name('m4.toml')}", f"--directory={tmp_path}/x", *arguments]
    assert app.execute(study.main, ["study", *given], flags) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


class _Named:
    """What `_in_turn` needs of a run."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory


def test_runs_of_other_processes_come_last(tmp_path):
    """So that two processes make two runs at once, and each ends when all are finished."""
    runs: list[Any] = [_Named(tmp_path / name) for name in "abc"]
    with contextlib.ExitStack() as other:
        runs[0].directory.mkdir()
        other.enter_context(file_lock.locked(runs[0].directory / "lock"))
        mine = study._in_turn(runs)
        assert [next(mine)[0], next(mine)[0]] == runs[1:]
        other.close()  # otherwise the next one would wait
        assert next(mine)[0] is runs[0]


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(data, tmp_path, flags, monkeypatch, capsys):
    """It is tried again by the next start; an interruption ends the study."""
    ended: list[str] = []

    def complete(run, data, budget, execute):
        ended.append(run.run.name)
        raise trial.CommandFailed(130 if run.run.name == "dense" else 137)

    monkeypatch.setattr(trial.Trial, "complete", complete)
    text = _plan(tmp_path).read_text(encoding="utf-8")
    plan = tmp_path / "two.toml"
    for name, status in (("dense, too", 1), ("dense", 130)):
        plan.write_text(f'{text}[[models]]\nname = "{name}"\nset = ["model.num_experts=0"]\n', encoding="utf-8")
        arguments = [f"--corpus={data.corpus}", f"--plan={plan}", f"--directory={tmp_path}/study"]
        assert app.execute(study.main, ["study", *arguments], flags) == status
    assert ended == ["4_experts", "dense_too", "4_experts", "dense"]
    assert "Failed: 4_experts (status 137), dense_too (status 137)." in capsys.readouterr().err
