"""`train` on a Cloud TPU and in several processes: its flags, and when it imports TensorFlow and JAX."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time

import pytest

from lingvo_moe import experiment
from lingvo_moe.cli import main, train
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing.processes import run_code

pytestmark = pytest.mark.slow

TPU = ["train", "--model=Quickstart", "--logdir=x", "--engine=tpu_strategy"]

# Prints the status and the imported modules at the end.
_CODE = """
import sys
from lingvo_moe.cli import initial_weights, main
status = main.main(["lingvo_moe", *sys.argv[1:]])
{then}
print(status, *(name for name in ("jax", "orbax", "lingvo_moe.engines.pjrt") if name in sys.modules))
"""
# Replaces the slice by this machine.
_HERE = """
import pytest
from lingvo_moe.engines import tpu_strategy
from lingvo_moe.testing import local_tpu
local_tpu.run_programs_here(pytest.MonkeyPatch())
tpu_strategy.Engine.connect = staticmethod(lambda tpu: local_tpu.engine())
"""


def _process(code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    """Runs `main` in a process whose environment does not choose JAX's platform."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return run_code(code, *arguments, environment=environment, succeeds=False, **options)


@pytest.mark.parametrize(
    "mesh, settings, expected",
    [
        ((2, 4), ("layout=gspmd",), "layout gspmd does not shard its stages over the mesh 2x4"),
        ((2, 4), (), "Instead pass --set layout=pipeline_gshard, or leave the pipeline out"),
        ((8,), (), "Instead pass --set layout=pipeline, or"),
        ((2, 4), ("layout=pipeline_gshard",), ""),
        ((2, 2, 2), (), ""),
        ((1,), (), ""),
    ],
)
def test_stages_that_devices_do_not_share_are_a_warning(mesh, settings, expected):
    """Such a pipeline only has bubbles."""
    pipeline = ("model.pipeline=gpipe", "model.stages=2", "model.microbatches=2")
    config = experiment.get("sparse_lm.Small", (*pipeline, *settings), DeviceMesh(mesh))
    found = train._stages_together(config)
    assert expected in found and bool(found) == bool(expected)


@pytest.mark.parametrize(
    "mesh, layout, expected",
    [
        ((2, 2), "BGE:x,V~x", "the axis y of the mesh 2x2: devices .* Pass --mesh=4, or"),
        ((2, 2), "BGE:y", "the axis x of the mesh 2x2: .* Pass --set layout=NAME"),
        ((4, 2, 2), "BGE:x,V~x", "the axes l, y of the mesh 4x2x2: .* Pass --mesh=16, or"),
        ((4, 1), "BGE:x,V~x", None),
        ((2, 2), "BGE:x,M~x/y", None),
        ((2, 2), "auto", None),
        ((8,), "auto", None),
    ],
)
def test_devices_that_repeat_the_computation_of_others_are_a_warning(mesh, layout, expected):
    """A registered model may name axis rules for a mesh of one axis, as m4.Quickstart does."""
    found = train._unused_axes(experiment.get("m4.Quickstart", (f"layout={layout}",), DeviceMesh(mesh)))
    assert re.search(expected, found) if expected else not found


@pytest.mark.parametrize(
    "rejected, messages",
    [
        (0, []),
        (99, [(logging.INFO, "99 of 1,000 training examples were left out, as they do not fit input.target_length=8")]),
        (
            100,
            [
                (
                    logging.WARNING,
                    "100 of 1,000 training examples were left out, as they do not fit input.target_length=8; increase "
                    "with --set input.target_length=...",
                )
            ],
        ),
    ],
)
def test_training_says_how_many_examples_it_left_out(rejected, messages, caplog):
    """Rows that are too short for most of a corpus leave a model that has seen a small part of it."""
    config = InputConfig(batch_size=2, source_length=0, target_length=8)
    with caplog.at_level(logging.INFO):
        train._report_rejected(config, {"rejected_pairs": rejected, "drawn_pairs": 1000.0})
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == messages


@pytest.mark.parametrize(
    "arguments, pattern",
    [
        (TPU, "--tpu is missing: the name of the slice"),
        (
            [*TPU, "--tpu=local", "--devices=8"],
            "--devices is for --engine=pjrt; tpu_strategy takes all cores .* --mesh=",
        ),
        ([*TPU, "--tpu=local", "--platform=tpu"], "--platform is for --engine=pjrt"),
        ([*TPU, "--tpu=grpc://nowhere"], "--tpu=grpc://nowhere: expected grpc://HOST:PORT"),
        ([*TPU[:-1], "--tpu=local"], "--tpu=local is for --engine=tpu_strategy; pass that too, or leave --tpu out"),
        ([*TPU, "--tpu=local", "--cache=off"], "--cache is for --engine=pjrt"),
        ([*TPU[:-1], "--engine=jax"], "engine 'jax' is unknown. .*Known: pjrt, tpu_strategy. --import"),
        (
            ["eval", "--model=Quickstart", "--logdir=x", "--engine=tpu_strategy"],
            "--engine=tpu_strategy only trains; .* --engine=pjrt",
        ),
        (["train", "--model=Quickstart", "--engine=tpu_strategy"], "--logdir is missing"),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--initial_weights=nowhere"],
            "--initial_weights=nowhere: there is no such file or directory; expected a log directory, or .*safetensors",
        ),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--initial_weights=."],
            "--initial_weights=.: there are no checkpoints; expected a log directory, or a file .*safetensors",
        ),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--initial_weights=nowhere.safetensors"],
            "--initial_weights=nowhere.safetensors: there is no such file",
        ),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(arguments, pattern, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main.main(["lingvo_moe", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.strip().splitlines()) <= 2 and re.search(pattern, message), (
        message
    )
    assert not list(tmp_path.iterdir())


def test_an_unreachable_slice_is_reported_within_seconds_and_without_jax(tmp_path):
    """TensorFlow must initialise the TPU before JAX is imported, which would set up libtpu for itself."""
    start = time.monotonic()
    done = _process(_CODE.format(then=""), *TPU, "--tpu=grpc://127.0.0.1:1", cwd=tmp_path)
    assert done.stdout == "2\n", done
    assert re.fullmatch(
        "error: --tpu=grpc://127.0.0.1:1: nothing answers there .*; is the slice running, .*\n", done.stderr
    )
    assert time.monotonic() - start < 60 and not list(tmp_path.iterdir())


_JOINING = """
import sys
from lingvo_moe.distributed import jax_runtime, watchdog
watchdog.supervise = lambda member: None
def join(member, platform):
    print("joins with", *(name for name in ("tensorflow", "tensorflow_text") if name in sys.modules), file=sys.stderr)
    sys.exit(0)
jax_runtime.join = join
"""


def test_tensorflow_is_imported_before_the_runtime_may_end_the_process(tmp_path):
    """The import redirects file descriptor 2, where the watchdog reads why; it would be an abort without a reason."""
    flags = [*tiny.settings(), "--coordinator=127.0.0.1:1", "--processes=2", "--process=1", f"--logdir={tmp_path}"]
    done = _process(_JOINING + _CODE.format(then=""), "train", *flags)
    assert "joins with tensorflow tensorflow_text\n" in done.stderr, done


def test_training_on_a_slice_leaves_jax_the_cpu_only(tmp_path):
    """A whole run of the command, checkpoint included: the checkpoint library imports JAX, which uses the CPU only."""
    data = tiny.make_data(tmp_path / "data")
    then = (
        "import jax; assert {device.platform for device in jax.devices()} == {'cpu'}; print(jax.config.jax_platforms)"
    )
    flags = [
        flag
        for flag in tiny.language_model_settings(
            "model.num_experts=8",
            "model.num_groups=8",
            "input.batch_size=8",
            "training.steps_per_loop=2",
            "training.log_every=2",
            "training.checkpoint_every=2",
            "training.evaluate_every=0",
        )
        if not flag.startswith("--devices")
    ]
    done = _process(
        _HERE + _CODE.format(then=then),
        "train",
        *flags,
        f"--corpus={data.corpus}",
        f"--tokenizers={data.tokenizers}",
        f"--logdir={tmp_path / 'log'}",
        "--steps=4",
        "--engine=tpu_strategy",
        "--tpu=local",
    )
    assert done.stdout == "cpu\n0 jax orbax\n", done
    assert "for 8 tpu device(s), mesh 8" in done.stderr and "trained for 4 steps" in done.stderr
    assert sorted(path.name for path in (tmp_path / "log" / "checkpoints").iterdir()) == ["2", "4"]
