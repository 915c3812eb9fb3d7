"""Tests that the programs train and decode without TensorFlow, and of errors."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from lingvo_moe import experiment
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh
from tools.gpu_bench import make, run

_TINY = (
    "model.model_dim=16",
    "model.hidden_dim=32",
    "model.num_heads=2",
    "model.head_dim=8",
    "model.num_layers=2",
    "model.encoder_layer_pattern=dense",
    "model.layer_pattern=moe",
    "model.num_experts=4",
    "model.num_groups=4",
    "model.source_vocabulary=64",
    "model.target_vocabulary=64",
    "model.input_dropout=0",
    "model.residual_dropout=0",
    "input.batch_size=4",
    "input.source_length=16",
    "input.target_length=16",
    "decoding_batch=2",
    "search.max_length=8",
    "optimizer.learning_rate.warmup_steps=0",
    "platform=gpu",
)
# A machine that has only JAX and NumPy.
_BARE = """
import sys
sys.modules.update(dict.fromkeys(("tensorflow", "absl", "flatbuffers", "orbax", "sentencepiece", "pytest"), None))
from tools.gpu_bench import run
sys.exit(run.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("made")
    assert 0 < make.make(experiment.get("m4.Small", _TINY, DeviceMesh((1,))), "m4.Small", directory) < 2**20
    return directory


@pytest.mark.slow
def test_programs_train_and_decode_without_tensorflow(directory, tmp_path):
    """In a process without other packages the loss falls; utilisation is the model's operations over the peak."""
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            _BARE,
            directory,
            "--platform=cpu",
            "--steps=12",
            "--peak=0.001",
            f"--json={tmp_path}/figures.json",
            f"--trace={tmp_path}/trace",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    figures, facts = (
        json.loads((tmp_path / "figures.json").read_text()),
        json.loads((directory / "facts.json").read_text()),
    )
    assert figures["last loss"] < figures["first loss"] and figures["TensorFlow in the process"] is False
    assert figures["tokens a second"] > 0 and figures["seconds of decoding"] > 0 and figures["sentences decoded"] == 2
    assert figures["model TFLOP/s"] * 1e12 * figures["seconds a step, fastest"] == pytest.approx(facts["flop"])
    assert next((tmp_path / "trace").rglob("*.xplane.pb")).stat().st_size > 0
    assert figures["utilisation, %"] == pytest.approx(100 * figures["model TFLOP/s"] / 1e-3)


@pytest.mark.parametrize(
    "device, dtype, given, peak",
    [
        ("NVIDIA H200", "bfloat16", None, 989.0),
        ("NVIDIA H200", "float32", None, None),
        ("NVIDIA H200", "float32", 400.0, 400.0),
        ("cpu", "bfloat16", None, None),
    ],
)
def test_the_peak_is_that_of_the_type_of_the_activations(device, dtype, given, peak):
    """Against the peak of bfloat16, a program in float32 would seem to use little of the device."""
    figures = run._utilisation(100.0, device, dtype, given)
    share = None if peak is None else pytest.approx(1e4 / peak)
    assert figures == {"model TFLOP/s": 100.0, "peak TFLOP/s": peak, "utilisation, %": share}


def test_loss_that_does_not_fall(monkeypatch, capsys):
    """Such a run has status 1; an unknown peak leaves out the utilisation."""
    monkeypatch.setattr(run, "run", lambda *_: {"first loss": 4.0, "last loss": 4.5, "utilisation, %": None})
    assert run.main(["anywhere"]) == 1
    printed = capsys.readouterr()
    assert "utilisation, %               not known" in printed.out and printed.err.startswith(
        "error: the loss did not fall"
    )


@pytest.mark.slow
def test_errors(directory, tmp_path, capsys):
    """Wrong directories and flags are errors of one line."""
    (tmp_path / "facts.json").write_text("[]")
    for arguments, message in (
        ([str(tmp_path / "none")], "facts.json: not what tools.gpu_bench.make writes"),
        ([str(tmp_path)], "facts.json: not what tools.gpu_bench.make writes"),
        ([str(directory), "--steps=0"], "--steps=0: at least one step"),
        ([str(directory), "--platform=tpu"], "--platform=tpu: JAX finds no such device"),
        ([str(directory), f"--trace={tmp_path}/facts.json"], "facts.json: this directory cannot be made"),
    ):
        assert run.main(arguments) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: ") and message in line
    with pytest.raises(UserError, match="cannot be written to"):
        make.make(experiment.get("m4.Small", _TINY, DeviceMesh((1,))), "m4.Small", tmp_path / "facts.json" / "below")
