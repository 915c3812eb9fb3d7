"""What a run has reported is there for TensorBoard at once, and stays when the run goes on in another process."""

from __future__ import annotations

from lingvo_moe.testing_experiment import curves
from lingvo_moe.training.summary import SummaryWriter


def test_scalars_are_readable_while_the_writer_is_open(tmp_path):
    """A killed run loses no point of its curves."""
    writer = SummaryWriter(tmp_path, "train")
    writer.write(3, {"loss": 1.5, "norm": 2.0})
    writer.write(4, {"loss": 1.25})
    assert curves(tmp_path) == {"loss": {3: {1.5}, 4: {1.25}}, "norm": {3: {2.0}}}
    writer.close()


def test_runs_are_curves_of_their_own_and_a_later_writer_adds_to_them(tmp_path):
    for step, loss in ((1, 4.0), (2, 3.0)):
        for run, factor in (("train", 1.0), ("valid", 2.0)):
            writer = SummaryWriter(tmp_path, run)
            writer.write(step, {"loss": factor * loss})
            writer.close()
    assert curves(tmp_path, "train") == {"loss": {1: {4.0}, 2: {3.0}}}
    assert curves(tmp_path, "valid") == {"loss": {1: {8.0}, 2: {6.0}}}
