"""Protects a run: its commands, the length of its training, and that it resumes wherever it was ended.

Commands are not run: `_Machine` leaves the files that they would leave.
"""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from lingvo_moe.errors import UserError
from tools.study import ticks, trial
from tools.study.plan import Run, Study
from tools.study.ticks import Tick
from tools.study.trial import Data, Trial

_STUDY = Study("m4.Quickstart", {"de": 0, "fr": 9}, ("training.keep=2",), 8000, 50, (), (), ())
_EXPERTS = Run("4 experts", "", ("model.num_experts=4",), seed=2)
_BILINGUAL = Run("bilingual fr", "fr", ("model.num_experts=0",))


class _Machine:
    """Stands in for the commands; a step takes `seconds`, and the command number `fails` ends with status 137."""

    def __init__(self, run: Trial, seconds: float = 2.0, fails: int = 0):
        self.commands: list[list[str]] = []
        self._run, self._seconds, self._fails = run, seconds, fails

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        self.commands.append(list(arguments))
        if len(self.commands) == self._fails:
            return 137
        given = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments[1:])
        if arguments[0] == "train":
            return self._train(int(given["steps"]), float(environment.get(ticks.LIMIT, "inf")))
        file = pathlib.Path(given["json"] if arguments[0] == "eval" else given["explain"])
        file.write_text("{}", encoding="utf-8")
        return 0

    def _train(self, steps: int, limit: float) -> int:
        made = ticks.read(self._run.logdir) or [Tick(0, 0.0, 0)]
        while made[-1].step < steps and made[-1].seconds < limit:
            step = made[-1].step + 1
            made.append(Tick(step, step * self._seconds, 10 * step))
        self._run.logdir.mkdir(parents=True, exist_ok=True)
        ticks.rewrite(self._run.logdir, made[1:] if not made[0].step else made)
        return 0 if made[-1].step == steps else 130


@pytest.fixture
def data(tmp_path) -> Data:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "corpus.json").write_text('{"fingerprint": "abc"}', encoding="utf-8")
    (tmp_path / "sentences.txt").write_text("eins\nun\n", encoding="utf-8")
    return Data(
        tmp_path / "corpus",
        {"": tmp_path / "corpus", "fr": tmp_path / "corpora" / "fr"},
        tmp_path / "tokenizers",
        tmp_path / "sentences.txt",
        tmp_path / "embeddings",
    )


def test_half_of_the_time_at_the_full_rate_then_it_falls(data, tmp_path):
    """100 CPU seconds, 2 a step: 25 steps, and as many again; then evaluation, and the experts of test sentences."""
    run = Trial(_STUDY, _EXPERTS, tmp_path / "run")
    machine = _Machine(run)
    run.complete(data, 100.0, machine)
    first, second, evaluation, explanation = machine.commands
    assert [command[0] for command in machine.commands] == ["train", "train", "eval", "translate"]
    assert "--import=tools.study.cpu_clock" in first and not any("cooldown" in flag for flag in first)
    for command in (first, second):
        assert f"--initial_embeddings={tmp_path / 'embeddings' / '256.safetensors'}" in command
    falling = {"--set=optimizer.learning_rate.cooldown_after=25", "--set=optimizer.learning_rate.cooldown_steps=25"}
    assert falling | {"--steps=50"} <= set(second)
    assert ticks.read(run.logdir)[-1].seconds == 100
    settings = ["training.keep=2", "model.source_vocabulary=8000", "model.num_experts=4", "training.seed=2"]
    for command in machine.commands:
        assert {f"--logdir={run.logdir}", "--devices=1", *(f"--set={s}" for s in settings)} <= set(command)
    assert {"--languages=de,fr", "--max_pairs=50", f"--json={run.scores}"} <= set(evaluation)
    assert {f"--input={data.sentences}", f"--explain={run.experts}"} <= set(explanation) and run.is_finished


def test_a_baseline_is_trained_on_its_language_and_tested_on_the_same_sentences(data, tmp_path):
    """It has no experts to explain."""
    run = Trial(_STUDY, _BILINGUAL, tmp_path / "run")
    machine = _Machine(run)
    run.complete(data, 10.0, machine)
    assert [command[0] for command in machine.commands] == ["train", "train", "eval"] and run.is_finished
    assert f"--corpus={tmp_path / 'corpora' / 'fr'}" in machine.commands[0]
    assert f"--initial_embeddings={tmp_path / 'embeddings' / 'fr' / '256.safetensors'}" in machine.commands[0]
    assert {f"--corpus={tmp_path / 'corpus'}", "--languages=fr"} <= set(machine.commands[2])


def test_a_model_without_tied_embeddings_starts_with_random_ones(data, tmp_path):
    """`train` refuses counted ones."""
    run = Trial(_STUDY, _BILINGUAL, tmp_path / "run", ["model.tied_embeddings=false"])
    machine = _Machine(run)
    run.complete(data, 10.0, machine)
    assert not any("initial_embeddings" in flag for command in machine.commands for flag in command)


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_a_run_goes_on_at_the_command_that_was_killed(data, tmp_path, fails):
    """With the same schedule, although the machine is slower now; what is finished is not repeated."""
    run = Trial(_STUDY, _EXPERTS, tmp_path / "run")
    machine = _Machine(run, fails=fails)
    with pytest.raises(trial.CommandFailed) as ended:
        run.complete(data, 100.0, machine)
    assert ended.value.status == 137 and len(machine.commands) == fails and not run.is_finished
    again = _Machine(run, seconds=2.0 if fails == 1 else 5.0)
    Trial(_STUDY, _EXPERTS, tmp_path / "run").complete(data, 100.0, again)
    assert again.commands[-1][0] == "translate" and run.schedule(100.0) == trial.Schedule(25, 50)
    # Training is asked once more, and has nothing to do where it was complete.
    assert len(again.commands) == {1: 4, 2: 3, 3: 3, 4: 1}[fails]
    third = _Machine(run)
    run.complete(data, 100.0, third)
    assert third.commands == []


def test_an_interruption_ends_the_run(data, tmp_path):
    """Ctrl-C saves a checkpoint and has the status of the limit, but the time is not over."""
    run = Trial(_STUDY, _EXPERTS, tmp_path / "run")
    with pytest.raises(trial.CommandFailed) as ended:
        run.complete(data, 100.0, lambda arguments, environment: 130)
    assert ended.value.status == 130 and run.schedule(100.0) is None


@pytest.mark.parametrize(
    ("study", "budget", "message"),
    [
        (_STUDY, 99.0, "cpu_seconds 100.0, which is now 99.0"),
        (None, 100.0, "set .*, which is now .*model.num_layers=8"),
    ],
)
def test_other_settings_are_an_error(data, tmp_path, study, budget, message):
    """Half of a run would have one, half the other, or a table would mix them."""
    Trial(_STUDY, _EXPERTS, tmp_path / "run").complete(data, 100.0, _Machine(Trial(_STUDY, _EXPERTS, tmp_path / "run")))
    changed = Trial(_STUDY, _EXPERTS, tmp_path / "run", [] if study else ["model.num_layers=8"])
    with pytest.raises(UserError, match=message):
        changed.complete(data, budget, _Machine(changed))


def test_other_sentences_are_an_error(data, tmp_path):
    """The order of the lines gives their languages, which the lines of a finished run must have."""
    run = Trial(_STUDY, _EXPERTS, tmp_path / "run")
    run.check_settings(data, 100.0)
    run.complete(data, 100.0, _Machine(run))
    run.check_settings(data, 100.0)
    data.sentences.write_text("un\neins\n", encoding="utf-8")
    with pytest.raises(UserError, match="run was trained with sentences .*, which is now "):
        run.check_settings(data, 100.0)


@pytest.mark.parametrize("budget", [3.0, 1e-6])
def test_a_time_of_few_steps_is_enough(data, tmp_path, budget):
    """However slow a step is, there is one of each half."""
    run = Trial(_STUDY, _BILINGUAL, tmp_path / "run")
    run.complete(data, budget, _Machine(run))
    assert run.schedule(budget) == trial.Schedule(1, 2)


@pytest.mark.slow
def test_commands_know_their_parent_and_hold_the_lock(tmp_path, monkeypatch, capsys):
    """The status of a signal is that of a shell."""
    code = (
        "import json, os, signal, sys; os.fstat(int(sys.argv[1]));"
        f"json.dump({{name: os.environ.get(name) for name in ('{ticks.LIMIT}', '{ticks.PARENT}')}} | "
        f"{{'parent': os.getppid()}}, open('{tmp_path}/seen.json', 'w')); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **options: run([sys.executable, "-c", code, str(options["pass_fds"][0])], **options),
    )
    with open(tmp_path / "lock", "w") as lock:
        status = trial.execute(["train", "--steps=3"], {ticks.LIMIT: "7"}, [lock.fileno()])
    assert status == 128 + signal.SIGKILL
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen[ticks.LIMIT] == "7" and seen[ticks.PARENT] == str(seen["parent"])
    assert "STUDY_CPU_SECONDS=7" in capsys.readouterr().out
