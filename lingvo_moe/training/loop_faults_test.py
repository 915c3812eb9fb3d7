"""Non-finite numbers and full disks end training with one error that says what to do; checkpoints survive."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import resource
import shutil
import tempfile
import time

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.cli import main
from lingvo_moe.engines import pjrt
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing import harness
from lingvo_moe.training import checkpoint_manifest, loop
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import Reader
from lingvo_moe.training.replay import Replay
from lingvo_moe.training.summary import SummaryWriter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

# The diagnosis is a program of its own, in which the compiler may or may not fuse k * l_aux into the sum of the loss.
REPLAY_TOLERANCE = 2 * harness.FLOAT32_ROUNDING
EXPERTS = "decoder/layer_0/feed_forward"
# Tied embeddings, as in m4.Pocket: the logits are a block of the diagnosis without weights of its own.
_CHANGES = (
    "training.checkpoint_every=4",
    "training.evaluate_every=0",
    "training.ema_decay=0.9",
    "model.tied_embeddings=true",
)


def train(experiment: Experiment, logdir: pathlib.Path) -> dict[str, float]:
    return loop.train(tiny.LANGUAGE_MODEL, experiment, pjrt.Engine(2, "cpu"), logdir)


def pretend_skipped(monkeypatch: pytest.MonkeyPatch, skipped: list[int]):
    """Makes step i + 1 report `skipped[i]` skipped steps in a row, and skip if that is not 0."""
    make, counts = pjrt.Training.train, iter(skipped)

    def train_or_skip(self, batches):
        before = tree.map_leaves(np.array, self.state)
        metrics, count = make(self, batches), next(counts)
        if count:
            self.load(before | {"step": np.int32(before["step"] + 1)})
        return metrics | {"skipped_in_a_row": count}

    monkeypatch.setattr(pjrt.Training, "train", train_or_skip)


def diagnose(logdir: pathlib.Path, *flags: str) -> int:
    return main.main(["lingvo_moe", "diagnose", f"--logdir={logdir}", "--devices=2", "--platform=cpu", *flags])


def test_a_finite_step_after_too_many_skipped_ones_continues_training(data, tmp_path, monkeypatch):
    """It has been started when the skipped steps are counted; training ends only if it is skipped as well."""
    pretend_skipped(monkeypatch, [0, 1, 2, 0, 0, 0])
    assert train(tiny.tiny_language_model(data, *_CHANGES, "training.steps=6", "training.max_skipped=2"), tmp_path)
    assert not (tmp_path / "replay").exists()


def test_a_saved_step_can_be_repeated(data, tmp_path, monkeypatch, capsys):
    """The command `diagnose` repeats it with its weights, batch and random numbers, and so has its loss.

    Its weights are those of the checkpoint before the skipped steps, from which training resumes.
    """
    pretend_skipped(monkeypatch, [0, 0, 1, 2, 3])
    experiment = tiny.tiny_language_model(data, *_CHANGES, "training.steps=8", "training.max_skipped=2")
    with pytest.raises(
        UserError,
        match=r"the loss of step 4 is \d.*2 consecutive updates were skipped.*Recomputed, all numbers are finite; "
        r"the largest: the largest activation after .*/replay/4.npz. A lower",
    ) as error:
        train(experiment, tmp_path)
    monkeypatch.undo()
    kept = Replay.load(tmp_path / "replay" / "4.npz")
    assert (kept.model, kept.step, kept.seed, kept.checkpoint) == (tiny.LANGUAGE_MODEL, 4, (0, 0), 4)
    assert Checkpoints(tmp_path).latest() == 4
    command = re.search(r"diagnose --logdir=(.*) --batch=(.*)\. A lower", str(error.value)).groups()
    assert command == (str(tmp_path), str(tmp_path / "replay" / "4.npz"))
    flags = (f"--batch={command[1]}", f"--json={tmp_path}/found.json")
    capsys.readouterr()
    assert diagnose(tmp_path, *flags) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["metrics"]["loss"] == pytest.approx(kept.loss, rel=REPLAY_TOLERANCE)
    assert found["metrics"]["gradient_norm"] == pytest.approx(kept.gradient_norm, rel=REPLAY_TOLERANCE)
    assert found["finite"] and (found["step"], found["checkpoint"]) == (4, 4)
    out = capsys.readouterr().out
    assert out.startswith(f"step 4 of {tiny.LANGUAGE_MODEL}, with the weights of {tmp_path}/checkpoints/4\n")
    assert f"training computed a loss of {kept.loss:.6g}" in out
    assert diagnose(tmp_path, "--json=-") == 0
    following = json.loads(capsys.readouterr().out)
    assert train(experiment, tmp_path) and Checkpoints(tmp_path).latest() == 8
    assert max(tiny.curves(tmp_path)["loss"][5]) == pytest.approx(following["metrics"]["loss"], rel=REPLAY_TOLERANCE)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    assert diagnose(tmp_path, *flags) == 0
    assert (
        "checkpoints/4, which has the weights of that step, is missing or corrupt; those of step 8 are used "
        "instead, so the numbers may differ" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("value", "finding"),
    [
        (np.nan, rf"the root mean square of weight {EXPERTS}/wi\[0\] is nan"),
        (1e38, rf"the largest activation after {EXPERTS}\[0\] is (nan|inf)"),
    ],
)
def test_the_first_non_finite_number_is_named(data, tmp_path, monkeypatch, value, finding):
    """The error names the layer and its repeat; the next run, from the checkpoint, finds the same.

    It saves no second checkpoint of the same weights, for which a good one would be deleted.
    """
    initialise = pjrt.Training.initialise

    def initialise_and_spoil(self, seed):
        initialise(self, seed)
        theta = tree.map_leaves(np.array, self.state["theta"])
        theta["decoder"]["layer_0"]["feed_forward"]["wi"][0] = value  # of all experts, because one may get no token
        self.load(self.state | {"theta": theta})

    monkeypatch.setattr(pjrt.Training, "initialise", initialise_and_spoil)
    experiment = tiny.tiny_language_model(data, *_CHANGES, "training.steps=40", "training.max_skipped=3")
    expected = (
        r"the loss of step {} is (nan|inf).* {} consecutive updates.* Recomputed, the first number that is not finite: "
    )
    with pytest.raises(UserError, match=expected.format(3, 3) + finding):
        train(experiment, tmp_path)
    assert int(Reader(Checkpoints(tmp_path).path(4)).read("skipped_in_a_row")) == 4
    with pytest.raises(UserError, match=expected.format(5, 5) + finding):
        train(experiment, tmp_path)
    assert Checkpoints(tmp_path).steps() == [4]


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        (
            (Replay, "save"),
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            r"2 consecutive updates.*could not be saved: .*/replay/3.npz: No space left on device\.$",
        ),
        (
            (Checkpoints, "save"),
            UserError("LOG/checkpoints: the checkpoint could not be written."),
            r"2 consecutive updates.*could not be saved: LOG/checkpoints: the checkpoint could not be written\.$",
        ),
        (
            (pjrt.Training, "diagnose"),
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating"),
            r"It could not be recomputed \(RuntimeError: RESOURCE_EXHAUSTED: Out of memory\)\. To look closer",
        ),
        (
            (pjrt.Training, "diagnose"),
            KeyError("softmax"),
            r"2 consecutive updates.*because of a defect .*\(KeyError: 'softmax'\); please report it.*To look closer",
        ),
    ],
)
def test_a_failing_save_or_diagnosis_does_not_hide_why_training_ended(
    data, tmp_path, monkeypatch, where, error, message
):
    def fail(*_):
        raise error

    pretend_skipped(monkeypatch, [0, 1, 2, 3])
    monkeypatch.setattr(*where, fail)
    with pytest.raises(UserError, match=message):
        train(tiny.tiny_language_model(data, *_CHANGES, "training.steps=8", "training.max_skipped=2"), tmp_path)


def test_an_unwritable_log_directory_is_reported_before_compiling(data, tmp_path, monkeypatch):
    """And so are the directories in it: what is found at the first checkpoint has cost hours."""
    make_file = tempfile.TemporaryFile

    def read_only(dir):
        if dir == unwritable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))
        return make_file(dir=dir)

    engine = tiny.Uncompiled(2, "cpu")
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=rf"--logdir={tmp_path}/file/log: nothing can be written there \(Not a directory\)"
    ):
        loop.train(tiny.LANGUAGE_MODEL, tiny.tiny_language_model(data), engine, tmp_path / "file" / "log")
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    for name in ("log", "log/checkpoints", "log/valid", "log/replay"):
        unwritable = tmp_path / name
        unwritable.mkdir(exist_ok=True)
        with pytest.raises(
            UserError,
            match=rf"{unwritable}: nothing can be written there \(Read-only file system\). Mount",
        ):
            loop.train(tiny.LANGUAGE_MODEL, tiny.tiny_language_model(data), engine, tmp_path / "log")
    (tmp_path / "log" / "train").write_text("")
    unwritable = None
    with pytest.raises(UserError, match=rf"^{tmp_path}/log/train is a file; expected a directory"):
        loop.train(tiny.LANGUAGE_MODEL, tiny.tiny_language_model(data), engine, tmp_path / "log")


def test_training_resumes_after_a_full_disk_ended_it(data, tmp_path, monkeypatch):
    """The curves could not be written; the next run has the losses of an undisturbed one."""
    experiment = tiny.tiny_language_model(data, *_CHANGES, "training.steps=8")
    undisturbed = tmp_path / "undisturbed"
    train(experiment, undisturbed)
    write = SummaryWriter.write

    def write_until_full(self, step, scalars):
        if step != 6:
            write(self, step, scalars)
            return
        wait_for_checkpoint(tmp_path / "log", 4)
        with full_disk():
            write(self, step, scalars)

    monkeypatch.setattr(SummaryWriter, "write", write_until_full)
    with pytest.raises(UserError, match="log/train: the curves could not be written"):
        train(experiment, tmp_path / "log")
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "log").latest() == 4
    train(experiment, tmp_path / "log")
    assert tiny.curves(tmp_path / "log")["loss"] == tiny.curves(undisturbed)["loss"]


@pytest.mark.parametrize("log_every", [1, 100])
def test_removing_the_log_directory_ends_training(data, tmp_path, monkeypatch, log_every):
    """It ends at the next report; a checkpoint before that makes a new directory, and is complete."""
    make = pjrt.Training.train

    def make_and_remove(self, batches):
        if int(np.asarray(self.state["step"])) == 5:
            wait_for_checkpoint(tmp_path, 4)
            shutil.rmtree(tmp_path)
        return make(self, batches)

    monkeypatch.setattr(pjrt.Training, "train", make_and_remove)
    experiment = tiny.tiny_language_model(data, *_CHANGES, "training.steps=12", f"training.log_every={log_every}")
    with pytest.raises(UserError, match=f"{tmp_path}/train: the directory has been removed"):
        train(experiment, tmp_path)
    monkeypatch.undo()
    assert Checkpoints(tmp_path).latest() == (8 if log_every > 8 else None)
    assert train(experiment, tmp_path)


def wait_for_checkpoint(logdir: pathlib.Path, step: int):
    """Waits until the background thread has written a checkpoint."""
    while not (Checkpoints(logdir).path(step) / checkpoint_manifest.MANIFEST).exists():
        time.sleep(0.01)


@contextlib.contextmanager
def full_disk():
    """Makes the kernel refuse to let any file of this process grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
