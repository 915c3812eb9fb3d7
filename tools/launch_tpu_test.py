"""The launcher of Cloud TPU slices: its commands, and its errors before anything is created."""

from __future__ import annotations

import pathlib
import shlex
import subprocess

import pytest

from lingvo_moe import registry
from lingvo_moe.cli import app
from tools import launch_tpu

WHERE = ("--slice=tpu", "--zone=europe-west4-a")
TRAIN = ("--", "--model=m4.Small", "--set", "training.seed=1")
_OWN_DATA = launch_tpu._own_data  # the fixture `no_defaults` replaces it


def run(*arguments: str) -> int:
    launch_tpu._VALUES.unparse_flags()
    for name in launch_tpu._VALUES:
        launch_tpu._VALUES[name].unparse()
    return app.execute(launch_tpu.main, ["launch_tpu", *arguments], launch_tpu._VALUES)


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch):
    """Tests do not depend on the corpus and tokenizers that this checkout may have."""
    monkeypatch.setattr(launch_tpu, "_own_data", lambda config, experiment: ())


@pytest.fixture(autouse=True)
def run_no_command(monkeypatch):
    def refuse(command, **options):
        raise AssertionError(f"{command} was run")

    monkeypatch.setattr(subprocess, "run", refuse)


def commands(capsys, *arguments: str) -> list[list[str]]:
    assert run(*WHERE, "--dry_run", *arguments) == 0
    return [shlex.split(line.removesuffix(" || \\")) for line in capsys.readouterr().out.splitlines()]


def test_slice_of_one_machine(capsys):
    """The commands create the slice, install the lock file on it and start training."""
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
    repository = pathlib.Path(launch_tpu.__file__).parents[1]
    copied = [str(repository / name) for name in ("lingvo_moe", "params", "requirements-tpu.txt")]
    assert copy[5:-2] == ["--recurse", *copied, "tpu:lingvo_moe_run"]
    assert "pip install --require-hashes --no-deps --requirement requirements-tpu.txt" in install[-1]
    assert (
        "python -m lingvo_moe train --model=m4.Small --set training.seed=1 "
        "--engine=tpu_strategy --tpu=local --logdir=log" in train[-1]
    )


@pytest.mark.parametrize(
    "given", [("--corpus=build/mine/corpus", "--tokenizers=build/tok"), ("--set=corpus=build/mine/corpus",)]
)
def test_what_train_reads_is_copied_to_the_same_paths(capsys, tmp_path, monkeypatch, given):
    """And nothing else of build; the working directory does not matter, and absolute paths are of the slice."""
    monkeypatch.setattr(launch_tpu, "_REPOSITORY", tmp_path)
    monkeypatch.setattr(launch_tpu, "_own_data", lambda config, experiment: ("build/tok",))
    for name in ("build/mine/corpus", "build/tok", "build/other"):
        (tmp_path / name).mkdir(parents=True)
    _, _, make, _, *copies = commands(capsys, *TRAIN, *given, "--initial_weights=/mnt/weights")
    words = make[-1].split()
    assert {"lingvo_moe_run/build/mine", "lingvo_moe_run/build"} <= set(words)
    tokenizers, corpus, *rest = copies
    assert corpus[5:8] == ["--recurse", f"{tmp_path}/build/mine/corpus", "tpu:lingvo_moe_run/build/mine"]
    assert tokenizers[5:8] == ["--recurse", f"{tmp_path}/build/tok", "tpu:lingvo_moe_run/build"]
    assert [command[4] for command in rest] == ["ssh", "ssh"]


def test_the_own_data_of_the_model_is_copied_or_warned_of(capsys, tmp_path, monkeypatch):
    """A slice is charged from its creation, and training there ends where its corpus stayed here."""
    monkeypatch.setattr(launch_tpu, "_REPOSITORY", tmp_path)
    monkeypatch.setattr(launch_tpu, "_own_data", _OWN_DATA)
    (tmp_path / "build/debian/corpus").mkdir(parents=True)
    assert run(*WHERE, "--dry_run", *TRAIN) == 0
    shown = capsys.readouterr()
    assert f"--recurse {tmp_path}/build/debian/corpus tpu:lingvo_moe_run/build/debian" in shown.out
    assert "warning: build/debian/tokenizers (--tokenizers, of the model) is not here to be copied" in shown.err
    assert run(*WHERE, "--dry_run", *TRAIN, "--corpus=/mnt/corpus", "--tokenizers=/mnt/tokenizers") == 0
    shown = capsys.readouterr()
    assert "debian" not in shown.out and not shown.err


_MODEL = """
from lingvo_moe import registry
from params.m4 import Small


@registry.register
class Mine(Small):
    pass
"""


def test_imported_files_are_copied_and_a_flagfile_is_read(capsys, tmp_path, monkeypatch):
    """The model may be one that the file registers; what the flagfile says is checked, and passed on as flags."""
    monkeypatch.setattr(launch_tpu, "_REPOSITORY", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tpu_models.py").write_text(_MODEL)
    (tmp_path / "ff").write_text("--model=tpu_models.Mine\n--steps=7\n")
    given = ("--", "--flagfile=ff", "--import=mine/tpu_models.py")
    with registry.MODELS.isolated():
        *_, copied, _, train = commands(capsys, *given)
    assert copied[5:8] == ["--recurse", f"{tmp_path}/mine/tpu_models.py", "tpu:lingvo_moe_run/mine"]
    assert "train --model=tpu_models.Mine --steps=7 --import=mine/tpu_models.py --engine=tpu_strategy" in train[-1]
    (tmp_path / "ff").write_text("--model=m4.Small\n--logdir=x\n")
    assert run(*WHERE, "--dry_run", *given) == 2
    assert "--logdir=x after --: the launcher passes that itself" in capsys.readouterr().err


def test_a_module_is_copied_with_its_package(capsys, tmp_path, monkeypatch):
    """What is copied anyway is not copied twice; what an absolute file registers is not known here."""
    monkeypatch.setattr(launch_tpu, "_REPOSITORY", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tpu_package" / "inside").mkdir(parents=True)
    for name in ("tpu_package/__init__.py", "tpu_package/inside/__init__.py"):
        (tmp_path / name).write_text("")
    *_, copied, _, _ = commands(capsys, *TRAIN, "--import=tpu_package.inside", "--import=params.m4")
    assert copied[5:8] == ["--recurse", f"{tmp_path}/tpu_package", "tpu:lingvo_moe_run"]
    there = ("--", "--model=there.Model", "--import=/mnt/there.py")
    commands(capsys, *there, "--corpus=/mnt/corpus", "--tokenizers=/mnt/tokenizers")
    assert run(*WHERE, "--dry_run", *there) == 0
    assert "its corpus and tokenizers are not copied" in capsys.readouterr().err


def test_slice_of_many_machines_is_driven_by_the_first(capsys):
    """A pod needs another image, and TensorFlow on the first machine must not claim its TPUs."""
    large = ("--", "--model=m4.MoE2048E36L")
    found = commands(capsys, "--accelerator=v3-2048", "--spot", "--project=mine", *large)
    assert "--version=tpu-vm-tf-2.20.0-pod-pjrt" in found[1] and "--spot" in found[1]
    assert all("--project=mine" in command for command in found)
    assert "TPU_LOAD_LIBRARY=0" in found[-1][-1] and "--tpu=tpu " in found[-1][-1] and "--worker=0" in found[-1]


def test_a_model_may_be_named_with_one_dash(capsys):
    """As `train` accepts it."""
    assert "train -model m4.Small " in commands(capsys, "--", "-model", "m4.Small")[-1][-1]


def test_delete(capsys):
    """--delete runs one command; no other flag deletes."""
    ((*_, verb, name, zone, quiet),) = commands(capsys, "--delete")
    assert (verb, name, zone, quiet) == ("delete", "tpu", "--zone=europe-west4-a", "--quiet")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--zone=z", *TRAIN), "--slice is missing: the slice's name"),
        (("--slice=t", *TRAIN), "--zone is missing"),
        ((*WHERE, "--accelerator=v3", *TRAIN), "--accelerator=v3: expected v2, v3 or v4 and the number of cores"),
        ((*WHERE, "--logdir=gs://bucket/log", *TRAIN), "expected a directory; mount the bucket"),
        (WHERE, "no --model among the flags"),
        ((*WHERE, "--", "--models=m4.Small"), "unknown flag --models. Did you mean model"),
        ((*WHERE, "--", "--help"), "unknown flag --help. `python -m lingvo_moe train --help` lists the flags."),
        ((*WHERE, "--", "--model=m4.NoSuch"), "--model=m4.NoSuch: no such model"),
        ((*WHERE, *TRAIN, "--set=foo.bar=3"), "foo.bar"),
        ((*WHERE, *TRAIN, "--mesh=zz"), "zz"),
        ((*WHERE, *TRAIN, "--mesh=16"), "--accelerator=v3-8 8 cores; pass --mesh=8"),
        ((*WHERE, "--accelerator=v3-2048", *TRAIN), "Use --accelerator with a divisor of 32"),
        ((*WHERE, *TRAIN, "--devices=8"), "--devices is for --engine=pjrt"),
        ((*WHERE, *TRAIN, "--processes=2"), "Leave --coordinator, --processes and --process out"),
        ((*WHERE, *TRAIN, "--logdir=x"), "--logdir=x after --: the launcher passes that itself; --logdir=x goes bef"),
        ((*WHERE, *TRAIN, "--engine=pjrt"), "--engine=pjrt after --: the launcher passes that itself; leave it out"),
        ((*WHERE, *TRAIN, "--tpu=foo"), "--tpu=foo after --: the launcher passes that itself"),
        ((*WHERE, *TRAIN, "--flagfile=missing"), "Unable to open flagfile"),
        ((*WHERE, *TRAIN, "--import=no/where.py"), "--import=no/where.py: expected a path below"),
        ((*WHERE, *TRAIN, "--import=no_such_module"), "--import=no_such_module: expected a path below"),
        *(
            ((*WHERE, f"--accelerator={name}", *TRAIN), f"--accelerator={name}: there is no such slice; the cores of v")
            for name in ("v3-0", "v3-3", "v2-1024", "v4-999999999999", f"v4-{'8' * 5000}")
        ),
        ((*WHERE, *TRAIN, "--corpus=no/where"), "--corpus=no/where: expected a path below"),
        ((*WHERE, *TRAIN, "--tokenizers=../x"), "--tokenizers=../x: expected a path below"),
        ((*WHERE, *TRAIN, "--corpsu=x"), "unknown flag --corpsu. Did you mean corpus"),
    ],
)
def test_bad_flags(capsys, arguments, message):
    """An error names the flag and what was expected, before any command runs."""
    assert run("--dry_run", *arguments) == 2
    assert message in capsys.readouterr().err


def test_missing_gcloud(monkeypatch, capsys):
    """Without gcloud, the error names the alternatives."""
    monkeypatch.setattr(launch_tpu.shutil, "which", lambda name: None)
    assert run(*WHERE, *TRAIN) == 2
    assert "gcloud is not installed" in capsys.readouterr().err


def test_existing_slice_is_not_created_again(monkeypatch):
    """A second launch resumes on the same slice."""
    ran = []
    monkeypatch.setattr(launch_tpu.shutil, "which", lambda name: name)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: (ran.append(command), subprocess.CompletedProcess(command, 0))[1]
    )
    assert run(*WHERE, *TRAIN) == 0
    assert [command[4] for command in ran] == ["describe", "ssh", "scp", "ssh", "ssh"]


def test_failing_command(monkeypatch, capsys):
    """The first command that fails ends the launch, and the error names it."""
    monkeypatch.setattr(launch_tpu.shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 1))
    assert run(*WHERE, *TRAIN) == 2
    assert "this command failed: gcloud compute tpus tpu-vm create tpu" in capsys.readouterr().err
