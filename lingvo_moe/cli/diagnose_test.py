"""`diagnose` reports mistakes before it compiles anything; `training.loop_faults_test` tests what it finds."""

from __future__ import annotations

import contextlib
import json
import pathlib
import types
from typing import Any

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.cli import main
from lingvo_moe.engines import pjrt
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.replay import Replay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def logdir(data, tmp_path_factory) -> pathlib.Path:
    """Makes a log directory with a checkpoint of step 4."""
    logdir = tmp_path_factory.mktemp("log")
    specs, random = tiny.tiny(data).steps.state_specs(), np.random.RandomState(0)
    state = tree.map_leaves(lambda spec: random.normal(scale=0.1, size=spec.shape).astype(spec.dtype), specs)
    checkpoints = Checkpoints(logdir, keep=1)
    checkpoints.save(tiny.MODEL, state | {"step": np.int32(4)}, {"stream": "of another corpus"})
    checkpoints.close()
    return logdir


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(pjrt.Engine, "compile", tiny.Uncompiled.compile)


def a_batch(data: tiny.Data, directory: pathlib.Path, model: str = tiny.MODEL, rows: int = 4) -> str:
    specs = tiny.tiny(data).batch_specs()
    batch = tree.map_leaves(lambda spec: np.ones((rows, *spec.shape[1:]), np.int32), specs)
    Replay(model, 5, (0, 0), 4, 6.0, 1.0, batch).save(directory / "5.npz")
    return f"--batch={directory}/5.npz"


def error_of(capsys, data: tiny.Data, *flags: str) -> str:
    capsys.readouterr()
    places = (f"--corpus={data.corpus}", f"--tokenizers={data.tokenizers}", "--platform=cpu", "--cache=off")
    assert main.main(["lingvo_moe", "diagnose", *tiny.settings(), *places, *flags]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_mistakes_are_reported_before_anything_is_compiled(data, logdir, tmp_path, capsys):
    at = f"--logdir={logdir}"
    (tmp_path / "text").write_text("de\tx\n")
    for flags, message in (
        ((), "--logdir is missing"),
        ((f"--logdir={tmp_path}/none",), "no checkpoint. Train first"),
        ((at, f"--json={tmp_path}/none/found.json"), f"there is no directory {tmp_path}/none"),
        ((at, f"--batch={tmp_path}/none.npz"), "cannot be read (No such file or directory)"),
        ((at, f"--batch={tmp_path}/text"), "not a batch that training saved"),
        ((at, a_batch(data, tmp_path / "a", model="m4.Small")), f"is of m4.Small, not of {tiny.MODEL}; pass --model"),
        ((at, a_batch(data, tmp_path / "b", rows=8)), "source/ids is int32[8, 48], the model takes int32[4, 48]"),
        ((at, "--set=model.num_experts=8"), "whose weights are not those of"),
        ((at,), "the position in the training data cannot be resumed"),
        ((at, "--engine=jax"), "engine 'jax' is unknown"),
    ):
        assert message in error_of(capsys, data, *flags), message


def test_settings_of_another_average_are_refused(data, logdir, tmp_path, capsys):
    """Without the setting the average would pass for the trained weights, whose loss is another one."""
    batch = a_batch(data, tmp_path)
    message = error_of(capsys, data, f"--logdir={logdir}", batch, "--set=training.ema_decay=0.9")
    assert (
        "checkpoints/4 was saved without an average" in message and "training.ema_decay is 0.9; pass --set" in message
    )

    specs = tiny.tiny(data, "training.ema_decay=0.9").steps.state_specs()
    checkpoints = Checkpoints(tmp_path / "averaged", keep=1)
    checkpoints.save(tiny.MODEL, tree.map_leaves(lambda spec: np.zeros(spec.shape, spec.dtype), specs), {})
    checkpoints.close()
    message = error_of(capsys, data, f"--logdir={tmp_path}/averaged", batch)
    assert "was saved with an average of the weights, but training.ema_decay is 0.0; pass --set" in message


def test_the_next_checkpoint_is_taken_if_training_removes_the_newest_while_the_program_is_compiled(
    data, tmp_path, monkeypatch, capsys
):
    """Minutes may pass, in which training saves and removes several."""
    theta = tree.map_leaves(lambda spec: np.zeros(spec.shape, spec.dtype), tiny.tiny(data).steps.state_specs()["theta"])

    def save(step: int):
        with contextlib.closing(Checkpoints(tmp_path / "log", keep=1)) as checkpoints:
            checkpoints.save_weights(step, tiny.MODEL, theta, "a test")

    def compile_slowly(engine: pjrt.Engine, program: Any) -> Any:
        save(8)
        return types.SimpleNamespace(shardings=lambda name: {"theta": None})

    def restore(checkpoints: Checkpoints, name: str, specs: dict, shardings: dict | None, step: int):
        raise UserError(f"restoring step {step}")

    save(4)
    monkeypatch.setattr(pjrt.Engine, "compile", compile_slowly)
    monkeypatch.setattr(Checkpoints, "restore_theta", restore)
    assert "restoring step 8" in error_of(capsys, data, f"--logdir={tmp_path / 'log'}")


def test_a_model_must_be_named(capsys):
    assert main.main(["lingvo_moe", "diagnose"]) == 2
    assert "--model is missing" in capsys.readouterr().err


def test_an_existing_json_file_stays_if_the_command_fails(data, logdir, tmp_path, capsys):
    (tmp_path / "found.json").write_text(json.dumps("before"))
    error_of(capsys, data, f"--logdir={logdir}", f"--json={tmp_path}/found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == "before"
