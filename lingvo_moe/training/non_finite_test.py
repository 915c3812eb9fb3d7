"""When training ends because steps are skipped, and what is kept of such a step."""

from __future__ import annotations

import dataclasses
import pathlib
import types

import numpy as np
import pytest

from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.errors import UserError
from lingvo_moe.training import non_finite
from lingvo_moe.training.callbacks import StepResult
from lingvo_moe.training.non_finite import NonFiniteGuard
from lingvo_moe.training.replay import Replay, path_of

FEATURES = np.array([[0.5, -1.75], [np.nan, 3.0]], np.float32)
BATCH = {"source": {"features": FEATURES}, "target": {"ids": np.array([[1, 2], [3, 0]], np.int32)}}


def run_of(logdir: pathlib.Path, max_skipped: int) -> types.SimpleNamespace:
    """What the guard reads of a run; its checkpoint exists, and nothing can be recomputed."""

    def diagnose(*_):
        raise RuntimeError("no device")

    return types.SimpleNamespace(
        name="tiny",
        logdir=logdir,
        experiment=types.SimpleNamespace(training=types.SimpleNamespace(max_skipped=max_skipped)),
        training=types.SimpleNamespace(
            state={"step": np.int32(2), "seed": np.array([0, 5], np.int32)}, rows=range(2), diagnose=diagnose
        ),
        checkpoints=types.SimpleNamespace(latest=lambda: 2),
        process_group=ProcessGroup(),
        global_data_state=lambda state: state,
    )


def result(step: int, skipped: int, loop: int = 1) -> StepResult:
    metrics = {"loss": np.nan, "gradient_norm": np.nan, "skipped_in_a_row": skipped}
    return StepResult(step, [BATCH] * loop, metrics, {}, last=False)


@pytest.mark.parametrize("skipped, ends", [(9, True), (8, False), (4, False)])
def test_all_steps_of_the_next_loop_must_have_been_skipped(tmp_path, skipped, ends):
    """After five skipped steps, a loop of four in which one is finite has changed the weights of the skipped step."""
    guard, run = NonFiniteGuard(), run_of(tmp_path, max_skipped=4)
    guard.on_step(run, result(8, 5, loop=4))
    if ends:
        with pytest.raises(UserError, match="5 consecutive updates were skipped"):
            guard.on_step(run, result(12, skipped, loop=4))
    else:
        guard.on_step(run, result(12, skipped, loop=4))


def test_a_batch_of_numbers_is_kept_as_it_is(tmp_path):
    """Features of speech and voxels are float32, and what is skipped may well have NaN in its input."""
    with pytest.raises(UserError, match="1 consecutive updates were skipped"):
        NonFiniteGuard().on_end(run_of(tmp_path, max_skipped=1), result(3, 1))
    kept = Replay.load(path_of(tmp_path, 3)).batch
    assert kept["source"]["features"].dtype == np.float32 and kept["target"]["ids"].dtype == np.int32
    np.testing.assert_array_equal(kept["source"]["features"], FEATURES)
    np.testing.assert_array_equal(kept["target"]["ids"], BATCH["target"]["ids"])


def test_the_step_is_kept_where_all_checkpoints_are_corrupt(tmp_path):
    """With its weights, of which there is no other copy; the process waits for them before it ends."""
    run, saved = run_of(tmp_path, max_skipped=1), []

    def latest():
        raise UserError("no checkpoint is valid")

    run.checkpoints = types.SimpleNamespace(
        latest=latest,
        save=lambda model, state, data_state: saved.append(int(state["step"])),
        wait=lambda: saved.append("complete"),
    )
    with pytest.raises(UserError, match="It could not be recomputed"):
        NonFiniteGuard().on_end(run, result(3, 1))
    assert saved == [2, "complete"] and Replay.load(path_of(tmp_path, 3)).checkpoint == 2


def test_the_batch_of_the_last_step_of_a_loop_is_kept(tmp_path):
    """The number in the message, and of the file, is that step's."""
    batches = [{"target": {"ids": np.full((2, 2), number, np.int32)}} for number in (1, 2)]
    loop = dataclasses.replace(result(8, 2), batches=batches)
    with pytest.raises(UserError, match="the loss of step 8 is nan"):
        NonFiniteGuard().on_end(run_of(tmp_path, max_skipped=1), loop)
    np.testing.assert_array_equal(Replay.load(path_of(tmp_path, 8)).batch["target"]["ids"], batches[1]["target"]["ids"])


def test_the_rows_of_all_processes_are_in_the_order_of_the_batch():
    """Processes may feed any rows, and several of them the same."""
    parts = [[first, {"target/ids": ("int32", ids)}] for first, ids in ((2, [[3]]), (0, [[1], [2]]), (2, [[3]]))]
    np.testing.assert_array_equal(non_finite._global_batch(parts)["target"]["ids"], [[1], [2], [3]])


def test_the_traceback_of_a_defect_is_logged(tmp_path, caplog):
    """The error asks for it."""
    run = run_of(tmp_path, max_skipped=1)
    run.training.diagnose = lambda *_: 1 // 0
    with pytest.raises(UserError, match="because of a defect of lingvo_moe .*please report it, with the traceback"):
        NonFiniteGuard().on_end(run, result(3, 1))
    assert "ZeroDivisionError" in caplog.text
