"""Tests that a killed training loses nothing, and that every kind of loss is detected."""

from __future__ import annotations

import pathlib
import random
import shutil
import sys
import types
from typing import Any

import pytest

from lingvo_moe import training
from lingvo_moe.cli import app
from lingvo_moe.testing.checkpoints import flip, save
from lingvo_moe.training.checkpoint import Checkpoints
from tools.soak import __main__ as soak
from tools.soak import checks, faults, process, run, stacks
from tools.soak.faults import KILL, TERMINATE, Fault
from tools.soak.stacks import Phase

pytestmark = pytest.mark.slow

_HEAD = (
    '  File "/x/lingvo_moe/commands.py", line 4 in train\n  File "<frozen runpy>", line 88 in _run_code\n'
    '  File "<frozen runpy>", line 198 in _run_module_as_main\n'
)


# A trainer without a model: nothing is computed, checkpoints and curves are real. With FAULT, losses differ after a
# kill.
_TRAINER = """
import faulthandler, os, pathlib, random, re, signal, sys, time, types
faulthandler.register(signal.SIGUSR1, open(os.environ["SOAK_STACKS"], "w"))
import tensorboard.compat
tensorboard.compat.notf = types.ModuleType("notf")  # it writes by itself, and TensorFlow is not imported
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.testing.checkpoints import state_of

logdir, steps = (re.search(rf"--{name}=(\\S+)", " ".join(sys.argv))[1] for name in ("logdir", "steps"))
pathlib.Path(logdir, "valid").mkdir(parents=True, exist_ok=True)
checkpoints = Checkpoints(logdir, keep=3)
step = first = checkpoints.latest() or 0
print(f"resuming from step {first}" if first else "", flush=True)
writer = EventFileWriter(f"{logdir}/train")
while step < int(steps):
    step += 1
    time.sleep(0.02)
    loss = random.Random(step).random() + ("FAULT" in os.environ and first > 0)
    value = summary_pb2.Summary.Value(tag="cross_entropy", simple_value=loss)
    writer.add_event(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[value])))
    writer.flush()
    if step % 8 == 0 or step == int(steps):
        checkpoints.save("tiny", state_of(step), {"next": step})
checkpoints.close()
"""


@pytest.mark.parametrize("is_valid", [True, False])
def test_killed_training_is_checked(tmp_path, monkeypatch, capsys, is_valid):
    """The tool on real processes and checkpoints: one that resumes exactly, one whose losses differ after the kill."""
    (tmp_path / "fake_trainer.py").write_text(_TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "TRAINER", (sys.executable, "-m", "fake_trainer"))
    monkeypatch.setattr(run.tiny, "make_data", lambda directory: run.tiny.Data(directory, directory))
    if not is_valid:
        monkeypatch.setenv("FAULT", "loss")
    arguments = ["soak", "--kills=1", "--seed=1", f"--directory={tmp_path}/soak", f"--json={tmp_path}/soak.json"]
    status, output = app.execute(soak.main, arguments, soak._VALUES), capsys.readouterr().out
    assert output.count("SIGKILL aimed at") == 1 and (tmp_path / "soak.json").read_text().count('"SIGKILL"') == 1
    assert status == (0 if is_valid else 1) and ("Nothing was lost" in output) == is_valid, output
    assert ("cross_entropy differs in" in output) != is_valid


def _processes(output: str, *statuses: int, step: int = 0, chosen: int = 0, crashed_in_dump: bool = False) -> Any:
    return types.SimpleNamespace(
        output=output, statuses=list(statuses), step=step, chosen=lambda fault: chosen, crashed_in_dump=crashed_in_dump
    )


@pytest.mark.parametrize(
    ("processes", "seconds", "problem"),
    [
        (_processes("resuming from step 8", -9), 0.1, ""),
        (_processes("", -9), 0.1, ""),
        (_processes("", 3, -9, chosen=1), 0.1, ""),
        (_processes("resuming from step 0", -9), 0.1, "resumed from step 0 instead of 8"),
        (_processes("", -11), 0.1, r"ended with status [-11] instead of [-9]"),
        (_processes("", -11, crashed_in_dump=True), 0.1, ""),
        (_processes("", 0), 0.1, r"ended with status [0] instead of [-9]"),
        (_processes("", 0, -9, chosen=1), 0.1, r"ended with status [0, -9] instead of [3, -9]"),
        (_processes("", 3, -9, chosen=1), 40, "another process ended 40.0 s after the kill"),
        (_processes("Traceback (most recent call last):", -9), 0.1, "a traceback was printed"),
    ],
)
def test_problems_of_processes_are_found(processes, seconds, problem):
    """A wrong resumed step, a wrong status, a late end and a traceback are problems."""
    found = run.check_processes(processes, Fault(KILL, "step", 3, 0.1, 0.0, None), 8, seconds)
    assert len(found) == bool(problem) and all(problem in line for line in found)


def test_sigterm_during_the_start():
    """Before its handler is installed, SIGTERM ends a process; afterwards it must save."""
    fault = Fault(TERMINATE, "start", 3, 0.1, 0.0, None)
    assert run.check_processes(_processes("", -15), fault, 8, 0.1) == []
    assert run.check_processes(_processes("", 130, 130, step=9), fault, 8, 30) == []
    assert run.check_processes(_processes("", -15, step=9), fault, 8, 0.1)


def test_faults_depend_on_the_seed_alone():
    """The same seed draws the same faults, of all kinds."""
    drawn = list(faults.draw(200, 0, 60))
    assert drawn == list(faults.draw(200, 0, 60)) != list(faults.draw(200, 1, 60))
    assert sum(fault.signal == KILL for fault in drawn) == 200 and any(fault.signal == TERMINATE for fault in drawn)
    assert {fault.aim for fault in drawn} == set(faults.AIMS)
    assert {fault.corruption for fault in drawn} == {None, *faults.CORRUPTIONS}
    assert all(1 <= fault.ahead <= 60 and 0 <= fault.delay < 1 for fault in drawn)


@pytest.mark.parametrize("name", faults.CORRUPTIONS)
def test_corruption_of_checkpoints(tmp_path, name):
    """A corruption makes the newest checkpoint invalid or leaves it valid, as declared; the one before stays valid."""
    save(tmp_path, 4, 8)
    corrupt, usable = faults.CORRUPTIONS[name]
    corrupt(tmp_path / "checkpoints" / "8", random.Random(0))
    assert checks.valid(tmp_path) == ([4, 8] if usable else [4])
    assert Checkpoints(tmp_path).latest() == (8 if usable else 4)


def test_lost_checkpoint_is_found(tmp_path):
    """A corrupt or missing checkpoint is a problem, one that was due for removal is not."""
    save(tmp_path, 4, 8, 12)
    complete = process.complete(tmp_path)
    assert checks.missing_checkpoints(complete, checks.valid(tmp_path), keep=3) == []
    flip(max((tmp_path / "checkpoints" / "8").rglob("*"), key=lambda path: path.stat().st_size * path.is_file()))
    assert checks.missing_checkpoints(complete, checks.valid(tmp_path), keep=3) == [
        "checkpoint 8 was complete and is no longer valid"
    ]
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    assert len(checks.missing_checkpoints(complete, checks.valid(tmp_path), keep=3)) == 2
    assert checks.missing_checkpoints([4, 8, 12], [8, 12, 16], keep=3) == []
    assert checks.missing_checkpoints([4, 8, 12], [4, 8], keep=3, corrupt=[12]) == []


def test_repeated_steps_are_found():
    """More repeated steps than allowed are a problem."""
    assert checks.missing_steps(reached=24, newest=8, most=16) == []
    assert checks.missing_steps(reached=25, newest=8, most=16) == [
        "17 steps have to be repeated, 25 were made, the newest checkpoint is 8"
    ]


@pytest.mark.parametrize(
    ("found", "problems"),
    [
        ({"loss": {1: {0.5}, 2: {0.25}}, "tokens_per_second": {1: {7.0}}}, []),
        ({"loss": {1: {0.5}}}, ["loss lacks 1 step, the first is 2"]),
        (
            {"loss": {1: {0.5}, 2: {0.25, 0.26}}},
            ["loss differs in 1 step, the first is 2: [0.25, 0.26] instead of [0.25]"],
        ),
        ({"loss": {1: {0.5}, 2: {0.25 + 2**-54}}}, ["loss differs in 1 step, the first is 2: "]),
        ({"loss": {1: {0.5}, 2: {0.25}, 3: {0.1}}}, ["loss differs in 1 step, the first is 3: [0.1] instead of []"]),
    ],
)
def test_curves_are_compared_bit_for_bit(found, problems):
    """Missing steps, other values and several values of a step are problems; scalars of the machine are not."""
    differences = checks.different_curves(found, {"loss": {1: {0.5}, 2: {0.25}}})
    assert len(differences) == len(problems) and all(
        ours.startswith(theirs) for ours, theirs in zip(differences, problems)
    )


def test_missing_held_out_loss_is_no_difference():
    """A kill between a checkpoint and its evaluation may omit the held-out loss."""
    assert checks.different_curves({}, {"loss": {12: {0.5}}}, complete=False) == []
    assert checks.different_curves({"loss": {12: {float("nan")}}}, {"loss": {12: {float("nan")}}}, complete=False) == []


def test_weights_are_compared_bit_for_bit(tmp_path):
    """Every array of the state, and the position in the data."""
    for name, steps in (("a", (8,)), ("b", (8,)), ("c", (12,))):
        save(tmp_path / name, *steps)
    assert checks.different_weights(tmp_path / "a", tmp_path / "b", 8) == []
    (tmp_path / "c" / "checkpoints" / "12").rename(tmp_path / "c" / "checkpoints" / "8")
    arrays, data = checks.different_weights(tmp_path / "a", tmp_path / "c", 8)
    assert "arrays of checkpoint 8 differ" in arrays and "another position in the data" in data


@pytest.mark.parametrize(
    ("frames", "background", "expected"),
    [
        ([("training/checkpoint.py", "save"), ("training/loop.py", "_make_steps")], [], Phase("save")),
        (
            [("data/tokenizer.py", "encode"), ("training/standard_callbacks.py", "_cross_entropy")],
            [],
            Phase("evaluation"),
        ),
        (
            [("data/pipeline.py", "batches"), ("training/loop.py", "_make_steps")],
            [("training/checkpoint.py", "_write_manifest")],
            Phase("data", "write"),
        ),
        (
            [("engines/pjrt.py", "train"), ("training/loop.py", "_make_steps")],
            [("training/checkpoint_manifest.py", "write_manifest"), ("training/checkpoint.py", "_write_manifest")],
            Phase("step", "manifest"),
        ),
        ([], [], Phase("start")),
    ],
)
def test_phases_are_read_from_stacks(frames, background, expected):
    """The main thread's phase and the background work on a checkpoint; an incomplete dump is recognised."""

    def text(stack) -> str:
        return "".join(f'  File "/x/lingvo_moe/{file}", line 7 in {function}\n' for file, function in stack)

    call = "(most recent call first)"
    dump = f"Thread 0x1 {call}:\n{text(background)}\nCurrent thread 0x2 {call}:\n{text(frames)}{_HEAD}"
    assert stacks.phase(dump) == expected and stacks.is_complete(dump)
    assert not stacks.is_complete(dump[:-5]) and stacks.phase("") == Phase("start")


def test_phases_name_existing_functions():
    """Protects the map from stacks to phases when functions of the library are renamed."""
    package = pathlib.Path(training.__file__).parents[1]
    for part, function, _ in (*stacks._MAIN, *stacks._BACKGROUND):
        if function:
            assert f"def {function}(" in (package / part).read_text(encoding="utf-8"), (part, function)


def test_a_loss_is_reported(monkeypatch, tmp_path, capsys):
    """A loss gives status 1, and is in the summary."""
    event = run.Event(
        Fault(KILL, "save", 3, 0.1, 0.0, None), Phase("save", "write"), 20, 8, 0.1, problems=["a checkpoint"]
    )
    result = run.Result(60, [event], ["a checkpoint"])
    monkeypatch.setattr(soak, "Soak", lambda *arguments: type("Fake", (), {"run": lambda self, log, advance: result})())
    assert app.execute(soak.main, ["soak", f"--directory={tmp_path}/new"], soak._VALUES) == 1
    output = capsys.readouterr().out
    assert "LOST: a checkpoint" in output and "Something was lost." in output and "Nothing was lost" not in output
    assert "most steps repeated" in output and "Steps repeated: 12 at most (16 are allowed), 12.0 on average." in output
    assert run.counts(result) == [("save, write in background", 1, 12, 1)]


def test_steps_repeated_are_averaged():
    """A checkpoint that is newer than the last step that was reported repeats none, and not fewer than none.

    After a corruption, repeated steps are expected, and not counted.
    """
    fault, phase = Fault(KILL, "save", 3, 0.1, 0.0, None), Phase("save", "write")
    events = [run.Event(fault, phase, reached, resumed, 0.1) for reached, resumed in ((20, 8), (8, 12), (9, 9))]
    events.append(run.Event(fault, phase, 50, 0, 0.1, corruption="truncated"))
    printed = soak.summary(run.Result(60, events, []), 1.0)
    assert "Steps repeated: 12 at most (16 are allowed), 4.0 on average." in printed


def test_directory_must_be_empty(tmp_path, capsys):
    """Files of the user are never touched."""
    (tmp_path / "mine.txt").write_text("mine")
    for path, message in ((tmp_path, "is not empty"), (tmp_path / "mine.txt", "is not a directory; expected")):
        assert app.execute(soak.main, ["soak", f"--directory={path}"], soak._VALUES) == 2
        assert f"--directory={path} {message}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
