"""A dry run prints the commands and runs none; what is missing is told before anything is created."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess

import pytest

from lingvo_moe.cli import app
from tools import launch_tpu

WHERE = ("--slice=tpu", "--zone=europe-west4-a")
TRAIN = ("--", "--model=m4.Small", "--set", "training.seed=1")


def run(*arguments: str) -> int:
    launch_tpu._VALUES.unparse_flags()
    for name in launch_tpu._VALUES:
        launch_tpu._VALUES[name].unparse()
    return app.execute(launch_tpu.main, ["launch_tpu", *arguments], launch_tpu._VALUES)


@pytest.fixture(autouse=True)
def nothing_is_run(monkeypatch):
    def refuse(command, **options):
        raise AssertionError(f"{command} was run")

    monkeypatch.setattr(subprocess, "run", refuse)


def commands(capsys, *arguments: str) -> list[list[str]]:
    assert run(*WHERE, "--dry_run", *arguments) == 0
    return [shlex.split(line.removesuffix(" || \\")) for line in capsys.readouterr().out.splitlines()]


def test_one_machine_is_created_installed_and_trained_on(capsys):
    describe, create, make, copy, install, train = commands(capsys, *TRAIN)
    gcloud = ["gcloud", "compute", "tpus", "tpu-vm"]
    assert describe == [*gcloud, "describe", "tpu", "--zone=europe-west4-a"]
    assert create == [
        *gcloud,
        "create",
        "tpu",
        "--zone=europe-west4-a",
        "--accelerator-type=v3-8",
        "--version=tpu-vm-tf-2.20.0-pjrt",
    ]
    assert make[-1] == "--command=mkdir -p lingvo_moe_run" and copy[4] == "scp"
    assert "install -r tpu.txt tensorflow-tpu==2.20.0 libtpu==0.0.14" in install[-1]
    assert "--no-deps 'tensorflow-text==2.20.*'" in install[-1]
    assert (
        "python -m lingvo_moe train --model=m4.Small --set training.seed=1 --engine=tpu_strategy --tpu=local --logdir=log"
        in train[-1]
    )


def test_a_slice_of_many_machines_is_driven_by_its_first(capsys):
    found = commands(capsys, "--accelerator=v3-2048", "--spot", "--project=mine", *TRAIN)
    assert "--version=tpu-vm-tf-2.20.0-pod-pjrt" in found[1] and "--spot" in found[1]
    assert all("--project=mine" in command for command in found)
    assert "TPU_LOAD_LIBRARY=0" in found[-1][-1] and "--tpu=tpu " in found[-1][-1] and "--worker=0" in found[-1]


def test_what_goes_with_another_tensorflow_is_left_out():
    """Of the requirements, all but those that the packages for TPUs stand for."""
    lines = (
        (pathlib.Path(launch_tpu.__file__).parent.parent / "requirements.txt").read_text(encoding="utf-8").splitlines()
    )
    left_out = {re.split("[ =]", line)[0] for line in lines if re.search(launch_tpu._REPLACED, line)}
    assert left_out == {"--constraint", "libtpu", "tensorboard", "tensorflow", "tensorflow-text"}


def test_the_slice_is_deleted_on_demand_alone(capsys):
    ((*_, verb, name, zone, quiet),) = commands(capsys, "--delete")
    assert (verb, name, zone, quiet) == ("delete", "tpu", "--zone=europe-west4-a", "--quiet")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--zone=z", *TRAIN), "--slice is missing: the slice's name"),
        (("--slice=t", *TRAIN), "--zone is missing"),
        ((*WHERE, "--accelerator=v3", *TRAIN), "--accelerator=v3: expected v2, v3 or v4 and the number of cores"),
        ((*WHERE, "--logdir=gs://bucket/log", *TRAIN), "expected a directory; mount the bucket"),
        (WHERE, "no --model among the flags"),
    ],
)
def test_what_is_missing_is_told(capsys, arguments, said):
    assert run("--dry_run", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_missing_gcloud_is_told(monkeypatch, capsys):
    monkeypatch.setattr(launch_tpu.shutil, "which", lambda name: None)
    assert run(*WHERE, *TRAIN) == 2
    assert "gcloud is not installed" in capsys.readouterr().err


def test_a_slice_that_is_there_is_not_created_again(monkeypatch):
    ran = []
    monkeypatch.setattr(launch_tpu.shutil, "which", lambda name: name)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: (ran.append(command), subprocess.CompletedProcess(command, 0))[1]
    )
    assert run(*WHERE, *TRAIN) == 0
    assert [command[4] for command in ran] == ["describe", "ssh", "scp", "ssh", "ssh"]


def test_a_command_that_fails_ends_it(monkeypatch, capsys):
    monkeypatch.setattr(launch_tpu.shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 1))
    assert run(*WHERE, *TRAIN) == 2
    assert "this command failed: gcloud compute tpus tpu-vm create tpu" in capsys.readouterr().err
