"""The command `checkpoint` on what training writes: other commands use its results, and errors are a line or two."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.cli import main
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing.checkpoints import flip, largest
from lingvo_moe.training import checkpoint_manifest, hyperparameters
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_errors import UnreadableCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> pathlib.Path:
    """A log directory with steps 2 and 4, as training writes it."""
    logdir = tmp_path_factory.mktemp("log")
    specs, random = tiny.tiny(data).steps.state_specs(), np.random.RandomState(0)
    checkpoints = Checkpoints(logdir, keep=2)
    for step in (2, 4):
        state = tree.map_leaves(lambda spec: random.normal(scale=0.1, size=spec.shape).astype(spec.dtype), specs)
        checkpoints.save(tiny.MODEL, state | {"step": np.int32(step)}, None)
    checkpoints.close()
    hyperparameters.save(logdir, hyperparameters.of(tiny.MODEL, tiny.tiny(data)))
    return logdir


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", *arguments])


def test_inspect_shows_steps_and_arrays(trained, capsys):
    capsys.readouterr()
    assert _run("checkpoint", "inspect", f"--logdir={trained}", "--grep=^optimizer_state/|^step$", "--stats") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == str(trained / "checkpoints")
    assert re.match(r"step +date \(UTC\) +model +weights +MiB +state$", out[1])
    assert [re.sub(" +", " ", line).split(" ")[0] for line in out[2:4]] == ["2", "4"]
    assert all(tiny.MODEL in line and line.endswith("complete") for line in out[2:4])
    assert re.match(r"step 4: \d+ arrays, [\d,]+ bytes", out[5]) and out[6].split()[0] == "array"
    assert all(line.startswith(("optimizer_state/", "step ")) for line in out[7:]) and len(out) > 9
    assert out[-1].split() == ["step", "int32", "scalar", "4", "4", "4", "4", "4", "0"]


def test_verify_names_corrupt_files(trained, tmp_path, capsys):
    """Exit status 2 for one flipped bit; the other checkpoint is valid."""
    assert _run("checkpoint", "verify", f"--logdir={trained}") == 0
    shutil.copytree(trained, tmp_path / "log")
    directory = tmp_path / "log" / "checkpoints"
    corrupt = largest(directory / "4" / "theta", "ocdbt.process_0/d/*")
    flip(corrupt)
    (directory / "2" / "manifest.json").unlink()
    capsys.readouterr()
    assert _run("checkpoint", "verify", f"--logdir={tmp_path / 'log'}") == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{directory / '2'}: every array can be read and is finite; no manifest.json")
    assert out[1:3] == [f"{directory / '4'}: corrupt", f"  {corrupt.relative_to(directory / '4')} has changed"]
    assert _run("checkpoint", "verify", f"--logdir={tmp_path / 'log'}", "--step=2") == 0
    (directory / "4").rename(directory / "4.corrupt")
    capsys.readouterr()
    assert _run("checkpoint", "inspect", f"--logdir={tmp_path / 'log'}") == 0
    out = capsys.readouterr().out
    assert "no manifest.json" in out and "4.corrupt: set aside as corrupt" in out


@pytest.mark.parametrize(
    ("arguments", "status", "pattern"),
    [
        (["verify"], 0, r"^\S+/2: removed meanwhile; .*\n\S+/4: valid\n$"),
        (["inspect"], 0, r"state\n4 .*complete\n\nstep 4"),
        (["convert", "--step=2", "--output=OUT"], 2, r"/2 has been removed; .*\(training.keep\)"),
        (["average", "--steps=2,4", "--output=OUT"], 2, r"/2 has been removed; .*\(training.keep\)"),
    ],
)
def test_a_step_that_training_removes_meanwhile_is_not_corrupt(
    trained, tmp_path, capsys, monkeypatch, arguments, status, pattern
):
    """A log directory can be looked at while a training saves there, and deletes old checkpoints."""
    shutil.copytree(trained, tmp_path / "log")
    compare = checkpoint_manifest.problems

    def compare_removed(directory, *others, **options):
        if directory.name == "2":
            shutil.rmtree(directory)
        return compare(directory, *others, **options)

    monkeypatch.setattr(checkpoint_manifest, "problems", compare_removed)
    action, *flags = (argument.replace("OUT", f"{tmp_path}/new.safetensors") for argument in arguments)
    capsys.readouterr()
    assert _run("checkpoint", action, f"--logdir={tmp_path / 'log'}", *flags) == status
    printed = capsys.readouterr()
    assert re.search(pattern, printed.out + printed.err, re.DOTALL)


def test_a_step_that_cannot_be_read_for_now_does_not_hide_the_others(trained, capsys, monkeypatch):
    """A file server refuses one of them: that is no corruption, and the others are shown and verified."""
    compare = checkpoint_manifest.problems

    def compare_refused(directory, *others, **options):
        if directory.name == "2":
            raise UnreadableCheckpoint(directory, "Stale file handle")
        return compare(directory, *others, **options)

    monkeypatch.setattr(checkpoint_manifest, "problems", compare_refused)
    capsys.readouterr()
    assert _run("checkpoint", "verify", f"--logdir={trained}") == 2
    steps = trained / "checkpoints"
    assert capsys.readouterr().out == f"{steps / '2'}: cannot be read (Stale file handle)\n{steps / '4'}: valid\n"
    assert _run("checkpoint", "inspect", f"--logdir={trained}") == 0
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == "2 - - - - cannot be read (Stale file handle)" and lines[3].endswith(" complete")


def test_average_and_convert_can_be_used(trained, data, tmp_path, capsys):
    """The average can be inspected, converted and translated with, without --model and --set; training is refused."""
    average, back, file = tmp_path / "average", tmp_path / "back", tmp_path / "weights.safetensors"
    assert _run("checkpoint", "average", f"--logdir={trained}", "--last=2", f"--output={average}") == 0
    assert _run("checkpoint", "convert", f"--logdir={average}", f"--output={file}") == 0
    assert _run("checkpoint", "convert", f"--logdir={back}", f"--input={file}") == 0
    # No input of a corpus has been saved beside these weights.
    assert f"--input={file} does not say which tokenizers its weights were trained with" in capsys.readouterr().err
    both = tmp_path / "both"
    assert _run("checkpoint", "average", f"--logdirs={average},{back}", f"--output={both}") == 0
    capsys.readouterr()
    (tmp_path / "in.txt").write_text("der old\nneerg\n", encoding="utf-8")
    translations = []
    for logdir in (average, back, both):
        assert (
            _run(
                "translate",
                "--devices=2",
                f"--tokenizers={data.tokenizers}",
                f"--logdir={logdir}",
                f"--input={tmp_path / 'in.txt'}",
                "--n_best=2",
            )
            == 0
        )
        translations.append(capsys.readouterr().out)
    assert translations[0] == translations[1] == translations[2] and len(translations[0].splitlines()) >= 2
    assert _run("checkpoint", "inspect", f"--logdir={average}") == 0
    assert "complete, weights only: average of steps 2, 4" in capsys.readouterr().out
    assert (
        _run(
            "train",
            *tiny.settings(),
            f"--corpus={data.corpus}",
            f"--tokenizers={data.tokenizers}",
            f"--logdir={back}",
            "--steps=8",
        )
        == 2
    )
    message = capsys.readouterr().err
    assert "holds weights only (converted from weights.safetensors)" in message
    assert f"or a new one with --initial_weights={back}." in message


def test_a_file_keeps_all_hyperparameters(trained, data, tmp_path):
    """Also those that do not fit the mesh of the registered model, which has no part in converting."""
    shutil.copytree(trained, tmp_path / "log")
    config = tiny.tiny(data)
    odd = dataclasses.replace(config, input=dataclasses.replace(config.texts, batch_size=3))
    given = hyperparameters.of(tiny.MODEL, odd)
    hyperparameters.save(tmp_path / "log", given)
    file = tmp_path / "weights.safetensors"
    assert _run("checkpoint", "convert", f"--logdir={tmp_path / 'log'}", f"--output={file}") == 0
    assert _run("checkpoint", "convert", f"--logdir={tmp_path / 'back'}", f"--input={file}") == 0
    found = hyperparameters.load(tmp_path / "back")
    assert found is not None and found.resolve("it") == given.portable.resolve("it")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ([], "checkpoint takes one of inspect, verify, average, convert, got 0"),
        (["verfy"], "checkpoint verfy: no such action. Did you mean verify"),
        (["inspect", "verify"], "got 2"),
        (["verify"], "--logdir is missing"),
        (["verify", f"--logdir={__file__}"], "checkpoint_test.py is a file; expected the log directory"),
        (["verify", "--logdir=nowhere"], "--logdir=nowhere: there is no checkpoint in "),
        (["verify", "--logdir=LOG", "--step=3"], "--step=3: there is no such checkpoint; existing steps: 2, 4"),
        (["verify", "--logdir=LOG", "--grep=x"], "--grep is not for checkpoint verify, which takes --logdir, --step"),
        (["inspect", "--logdir=LOG", "--grep=("], "not a regular expression"),
        (["inspect", "--logdir=LOG", "--grep=decoder/2"], "--grep=decoder/2: no path of step .* matches"),
        (["inspect", "--logdir=LOG", "--step=-1"], "--step|step"),
        (["average", "--logdir=LOG", "--last=2"], "--output is missing"),
        (["average", "--logdir=LOG", "--output=new"], "either --last=N or --steps=A,B,C"),
        (["average", "--logdir=LOG", "--output=new", "--last=2", "--steps=2,4"], "either --last=N or --steps=A,B,C"),
        (["average", "--logdir=LOG", "--output=new", "--last=3"], "--last=3: .* holds 2 checkpoints"),
        (["average", "--logdir=LOG", "--output=new", "--steps=2,four"], "'four' is not a step"),
        (["average", "--logdir=LOG", "--output=new", f"--steps=2,{5000 * '1'}"], "1' is not a step"),
        (
            ["average", "--logdir=LOG", "--output=new", "--steps=2,3"],
            "there is no checkpoint of step 3. Existing steps: 2, 4",
        ),
        (["average", "--logdirs=LOG", "--output=new"], "expected two or more different log directories"),
        (["average", "--logdirs=LOG,LOG/.", "--output=new"], "/\\.: one is empty or named twice; expected different"),
        (["average", "--logdirs=LOG,", "--output=new"], ",: one is empty or named twice; expected different"),
        (["average", "--logdirs=LOG,nowhere", "--output=new"], "--logdirs=nowhere: there is no checkpoint in"),
        (
            ["average", "--logdirs=LOG,LOG2", "--logdir=LOG", "--output=new"],
            "--logdirs averages the newest checkpoints; leave --logdir, --last and --steps out",
        ),
        (["convert", "--logdir=LOG", "--logdirs=LOG,LOG"], "--logdirs is not for checkpoint convert"),
        (["convert", "--logdir=LOG"], "which way"),
        (["convert", "--logdir=LOG", "--output=a.safetensors", "--input=b.safetensors"], "which way"),
        (["convert", "--logdir=LOG", "--output=a.bin"], "ends with .safetensors"),
        (
            ["convert", "--logdir=LOG", "--output=a.safetensors", "--model=Quickstart"],
            "--model and --set are for --input",
        ),
        (["convert", "--logdir=new", "--input=a.safetensors"], "--input=a.safetensors: there is no such file"),
        (
            ["convert", "--logdir=new", "--input=a.safetensors", "--model=Quickstart", "--step=3"],
            "--step is for --output",
        ),
        (
            ["convert", "--logdir=new", "--input=a.safetensors", "--model=Quickstart", "--dtype=bfloat16"],
            "--dtype is for --output; with --input, the file says which dtype it has",
        ),
        (["convert", "--logdir=new", "--input=a.safetensors", "--model=Quikstart"], "Did you mean m4.Quickstart"),
        (["convert", "--logdir=new", "--input=a.safetensors", "--model=Quickstart"], "there is no such file"),
    ],
)
def test_errors_name_the_remedy(trained, arguments, pattern, capsys, tmp_path, monkeypatch):
    """Exit status 2, `error:`, at most two lines, and no file is written."""
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert _run("checkpoint", *(argument.replace("LOG", str(trained)) for argument in arguments)) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.strip().splitlines()) <= 2
    assert re.search(pattern, message), message
    assert not list(tmp_path.iterdir())
