"""Reported values are readable at once, and stay when another process resumes the run."""

from __future__ import annotations

import contextlib
import re
import shutil

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.testing.checkpoints import files_up_to
from lingvo_moe.testing.experiments import curves
from lingvo_moe.training.summary import SummaryWriter


def test_scalars_are_readable_while_the_writer_is_open(tmp_path):
    """A killed run loses no point of its curves."""
    writer = SummaryWriter(tmp_path, "train")
    writer.write(3, {"loss": 1.5, "norm": 2.0})
    writer.write(4, {"loss": 1.25})
    assert curves(tmp_path) == {"loss": {3: {1.5}, 4: {1.25}}, "norm": {3: {2.0}}}
    writer.close()


def test_a_later_writer_adds_to_the_curves_of_a_run(tmp_path):
    for step, loss in ((1, 4.0), (2, 3.0)):
        for run, factor in (("train", 1.0), ("valid", 2.0)):
            writer = SummaryWriter(tmp_path, run)
            writer.write(step, {"loss": factor * loss})
            writer.close()
    assert curves(tmp_path, "train") == {"loss": {1: {4.0}, 2: {3.0}}}
    assert curves(tmp_path, "valid") == {"loss": {1: {8.0}, 2: {6.0}}}


def test_a_full_disk_is_reported_and_earlier_values_stay(tmp_path):
    """A truncated record does not hide the values of a later run."""
    writer = SummaryWriter(tmp_path, "train")
    writer.write(1, {"loss": 4.0})
    size = max(path.stat().st_size for path in (tmp_path / "train").iterdir())
    with files_up_to(size + 10):
        with pytest.raises(UserError, match=rf"^{tmp_path}/train: the curves could not be written \(File too large\)"):
            writer.write(2, {"loss": 3.0})
        with contextlib.suppress(UserError):
            writer.close()
    assert curves(tmp_path) == {"loss": {1: {4.0}}}
    again = SummaryWriter(tmp_path, "train")
    again.write(2, {"loss": 3.0})
    again.close()
    assert curves(tmp_path) == {"loss": {1: {4.0}, 2: {3.0}}}


def test_a_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "log").write_text("a file\n")
    expected = rf"^{tmp_path}/log/train: the curves could not be written \(.*\). Checkpoints.*Remove the cause and"
    with pytest.raises(UserError, match=expected) as error:
        SummaryWriter(tmp_path / "log", "train")
    assert not re.search(r"\[Op|function_node|\n", str(error.value))


def test_a_removed_directory_is_reported(tmp_path):
    """The kernel would keep writing to a file that nobody can open any more."""
    writer = SummaryWriter(tmp_path, "train")
    writer.write(1, {"loss": 4.0})
    shutil.rmtree(tmp_path / "train")
    with pytest.raises(UserError, match=f"{tmp_path}/train: the directory has been removed while training wrote"):
        writer.write(2, {"loss": 3.0})
    writer.close()
