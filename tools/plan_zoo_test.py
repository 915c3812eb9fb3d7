"""Tests that the plans are of registered models with valid settings, and how missing plans are made."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import signal
import subprocess
import sys

import pytest

from lingvo_moe import experiment
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.cli import app
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing.plans import training_plan
from tools import plan_zoo


@pytest.mark.parametrize("name", plan_zoo.plans())
def test_every_plan_has_a_model_and_valid_settings(name):
    """The settings are accepted; the model is made for a slice: of 32 cores, of a Conformer's stages, of table 8.

    Or it is imported.
    """
    request = plan_zoo.plans()[name]
    experiment.get(request.model, request.changes, DeviceMesh.parse(request.mesh) if request.mesh else None)
    config = experiment.get(request.model)
    of_stages = config.mesh.size == config.model.stages and config.model.num_layers >= 32
    assert config.mesh.size >= 32 or of_stages or name in plan_zoo.volumes() or name.startswith("nllb.")
    assert name.startswith(request.model)


def test_volumes_have_the_same_work_on_each_core_as_in_the_papers_table():
    """On a slice of eight cores or more: equal voxels for each core, shared by as many cores."""
    requests = plan_zoo.volumes()
    assert len(requests) == 7
    for name, request in requests.items():
        own, mesh = experiment.get(name), DeviceMesh.parse(request.mesh)
        config = experiment.get(name, request.changes, mesh)
        assert mesh.size == max(8, own.mesh.size) and mesh.shape[1] == own.mesh.shape[1]
        assert config.input.batch_size / mesh.size == own.input.batch_size / own.mesh.size


def test_variants_have_the_stated_batch():
    """Batch tokens are the source's, in `both_sides` those of both; `tokens_per_core` has equal tokens and policies."""
    plans = {name: (request.model, request.changes) for name, request in plan_zoo.plans().items()}
    for row, batch_tokens in (("m4.MoE128E12L", 2**20), ("m4.MoE512E36L", 2**20), ("m4.MoE2048E36L", 2**22)):
        own, other = (experiment.get(*plans[name]).input for name in (row, f"{row}.both_sides"))
        assert own.batch_size * own.source_length == other.tokens == batch_tokens
    few, many = (experiment.get(*plans[name]) for name in ("m4.MoE128E36L.tokens_per_core", "m4.MoE2048E36L"))
    assert (
        few.input.tokens / few.mesh.size == many.input.tokens / many.mesh.size and few.model.remat == many.model.remat
    )


@pytest.mark.parametrize("name", plan_zoo.clusters() | plan_zoo.meshes())
def test_meshes_have_the_devices_of_their_cluster(name):
    """What does not fit would be refused after hours of other plans; a v4 or tpu7x chip has two devices."""
    request = plan_zoo.plans()[name]
    device, _, sizes = request.topology.partition(":")
    mesh = DeviceMesh.parse(request.mesh) if request.mesh else None
    config = experiment.get(request.model, request.changes, mesh)  # raises for what the devices do not divide
    assert config.mesh.size == math.prod(map(int, sizes.split("x"))) * (2 if device in ("v4", "tpu7x") else 1)
    assert (mesh is None) == any(change.startswith("mesh=") for change in request.changes)


def test_the_plans_in_docs_are_of_their_requests():
    """An edited request would leave its old plan under the new meaning, in every table."""
    requests, files = plan_zoo.plans(), {path.stem: path for path in plan_zoo.DIRECTORY.glob("*.json")}
    assert files.keys() == requests.keys()
    assert [name for name, path in files.items() if not requests[name].is_of(Plan.load(path))] == []


def made(request: plan_zoo.Request) -> Plan:
    """Returns a plan of a request, without compiling it."""
    mesh = experiment.get(request.model, request.changes, DeviceMesh.parse(request.mesh) if request.mesh else None).mesh
    plan = training_plan(request.model, mesh.size, str(mesh), changes=request.changes, program=request.program)
    return dataclasses.replace(plan, topology=request.topology or plan.topology)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "m4.MoE2048E60L"},
        {"changes": ("model.remat=full",)},
        {"program": "decode"},
        {"topology": "v5p:8x8x4", "mesh": "256"},
        {"mesh": "16x128"},
        {"compiler_options": ("xla_tpu_run_space_to_batch=false",)},
    ],
)
def test_a_plan_of_another_request_is_another_plan(changed):
    """Everything that a request states, and the model's own slice if it states none, are compared."""
    request = plan_zoo.Request("m4.MoE2048E36L")
    other = dataclasses.replace(request, **changed)
    assert request.is_of(made(request)) and not other.is_of(made(request))
    if "compiler_options" not in changed:
        assert other.is_of(made(other)) and not request.is_of(made(other))


def run(monkeypatch, directory, *arguments) -> tuple[int, list]:
    """Returns (exit status, commands); a fake command writes its plan, and fails for a dense model."""
    commands, requests = [], plan_zoo.plans()

    def call(command, **options):
        commands.append(command)
        path = command[-1].removeprefix("--json=")
        failed = "Dense" in path
        if not failed:
            made(requests[pathlib.Path(path).stem]).save(path)
        return subprocess.CompletedProcess(command, int(failed))

    monkeypatch.setattr(plan_zoo, "DIRECTORY", directory)
    monkeypatch.setattr(subprocess, "run", call)
    return app.execute(plan_zoo.main, ["plan_zoo", *arguments], plan_zoo._VALUES), commands


def test_existing_plans_are_kept(monkeypatch, tmp_path):
    """A second run makes nothing, unless --force."""
    assert [len(run(monkeypatch, tmp_path, "--only=sparse_lm")[1]) for _ in range(2)] == [5, 0]
    assert len(run(monkeypatch, tmp_path, "--only=sparse_lm", "--force")[1]) == 5


def test_a_plan_of_an_edited_request_is_made_again(monkeypatch, tmp_path):
    """And so is a file that is no plan; the others are kept."""
    run(monkeypatch, tmp_path, "--only=sparse_lm")
    first, second = sorted(tmp_path.iterdir())[:2]
    dataclasses.replace(Plan.load(first), changes=("model.remat=full",)).save(first)
    second.write_text("")
    made = [command[-1].removeprefix("--json=") for command in run(monkeypatch, tmp_path, "--only=sparse_lm")[1]]
    assert sorted(made) == [str(first), str(second)]


def test_a_failed_plan_is_named_and_the_others_are_made(monkeypatch, tmp_path, capsys):
    """One failure does not stop hours of other plans."""
    status, commands = run(monkeypatch, tmp_path, "--only=m4")
    failed = [f"m4.Dense96L{suffix}" for suffix in ("", "GPipe", ".decode", ".h100-16x8", ".h200-8x8", ".b200-8x8")]
    assert status == 2 and f"no plan could be made of {', '.join(failed)};" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == len(commands) - len(failed)


def test_sigterm_leaves_no_plan_running(monkeypatch, tmp_path, capsys):
    """The compiler would go on as an orphan, for minutes."""
    started, is_waited_for = [], tmp_path / "is_waited_for"
    code = (
        f"import os, pathlib, signal, time\nwhile not pathlib.Path({str(is_waited_for)!r}).exists(): time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    )

    class Compiler(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", code], **options)
            started.append(self)

        def communicate(self, *arguments, **options):
            is_waited_for.touch()  # a signal between its start and this would leave it, if only for a moment
            return super().communicate(*arguments, **options)

    monkeypatch.setattr(plan_zoo, "DIRECTORY", tmp_path / "plans")
    monkeypatch.setattr(subprocess, "Popen", Compiler)
    arguments = ["plan_zoo", "--only=sparse_lm"]
    assert app.execute(plan_zoo.main, arguments, plan_zoo._VALUES) == app.INTERRUPTED
    # subprocess.run does not wait for what it kills after Ctrl-C.
    assert [process.wait(timeout=60) for process in started] == [-signal.SIGKILL]


@pytest.mark.parametrize(
    "given, message",
    [
        ("m4.MoE128E12", ""),  # begins names
        ("MoE128E12L", "Did you mean m4.MoE128E12L"),
        ("m4.MoE128E12L,", "an item is empty"),
    ],
)
def test_unknown_name(monkeypatch, tmp_path, capsys, given, message):
    """The error names the nearest; a final comma would choose all plans, and take hours."""
    assert run(monkeypatch, tmp_path, f"--only={given}")[0] == (2 if message else 0)
    assert message in capsys.readouterr().err
