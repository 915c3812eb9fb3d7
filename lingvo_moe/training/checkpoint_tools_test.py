"""Averages, safetensors files and `verify`: exact round trips; unfit and corrupt files are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import tempfile

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from orbax import checkpoint as orbax
from safetensors import numpy as safetensors_numpy

from lingvo_moe import experiment, tree
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.testing.checkpoints import (
    ONE,
    SPECS,
    assert_equal,
    files_up_to,
    flip,
    largest,
    save,
    shardings,
    state_of,
)
from lingvo_moe.testing.harness import BFLOAT16_ROUNDING
from lingvo_moe.training import checkpoint_manifest, hyperparameters, logdir_lock
from lingvo_moe.training import checkpoint_tools as tools
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import WEIGHTS

THETA = tree.flatten(SPECS["theta"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Checkpoints:
    """Steps 4, 8 and 12 of the small state."""
    logdir = tmp_path_factory.mktemp("log")
    save(logdir, 4, 8, 12)
    return Checkpoints(logdir)


@pytest.fixture(scope="module")
def weights_file(trained, tmp_path_factory) -> pathlib.Path:
    """The weights of step 8."""
    path = tmp_path_factory.mktemp("file") / "weights.safetensors"
    tools.to_safetensors(trained, 8, path)
    return path


def theta_of(step: int) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in tree.flatten(state_of(step)["theta"]).items()}


def restore_theta(logdir: pathlib.Path) -> tuple[int, dict]:
    return Checkpoints(logdir).restore_theta("tiny", SPECS["theta"], shardings(SPECS, ONE)["theta"])


@pytest.mark.parametrize("steps", [[4, 8], [12, 4, 8]])
def test_average_is_the_mean_in_float64(trained, tmp_path, steps):
    """It is saved under the newest step's number, and read as any other checkpoint."""
    tools.average(trained, steps, tmp_path / "average")
    step, found = restore_theta(tmp_path / "average")
    assert step == max(steps)
    members = [theta_of(member) for member in steps]
    expected = {
        path: np.mean([theta[path] for theta in members], axis=0, dtype=np.float64).astype(np.float32) for path in THETA
    }
    assert_equal(found, tree.unflatten(expected))
    seen = tools.overview(Checkpoints(tmp_path / "average"), step)
    assert (seen.problem, seen.origin) == ("", f"average of steps {', '.join(map(str, steps))}")
    assert tools.verify(Checkpoints(tmp_path / "average"), step) == []


def test_average_of_log_directories_is_the_mean_of_their_newest_weights(trained, tmp_path):
    """Of different numbers of steps; newest are valid ones; models of other weights are refused and named."""
    save(tmp_path / "other", 4)
    logdirs = {"log": trained, "other": Checkpoints(tmp_path / "other")}
    tools.average_logdirs(logdirs, tmp_path / "average")
    step, found = restore_theta(tmp_path / "average")
    newest = [theta_of(12), theta_of(4)]
    expected = {path: np.mean([t[path] for t in newest], axis=0, dtype=np.float64) for path in THETA}
    assert step == 12
    assert_equal(found, tree.unflatten({path: value.astype(np.float32) for path, value in expected.items()}))
    origin = tools.overview(Checkpoints(tmp_path / "average"), step).origin
    assert origin == "average of 2 log directories, steps 12, 4"

    save(tmp_path / "broken", 4, 8)
    (tmp_path / "broken" / "checkpoints" / "8" / checkpoint_manifest.MANIFEST).write_text("{")
    tools.average_logdirs({"log": trained, "broken": Checkpoints(tmp_path / "broken")}, tmp_path / "of valid ones")
    origin = tools.overview(Checkpoints(tmp_path / "of valid ones"), 12).origin
    assert origin == "average of 2 log directories, steps 12, 4"

    with contextlib.closing(Checkpoints(tmp_path / "wider", keep=1)) as wider:
        wider.save_weights(4, "tiny", {"embedding": np.zeros((16, 9), np.float32)}, "a test")
    with pytest.raises(UserError, match=r"wider.* not those of log: embedding is \[16, 9\] there, \[16, 8\] here"):
        tools.average_logdirs({"log": trained, "wider": Checkpoints(tmp_path / "wider")}, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_average_has_the_hyperparameters_of_its_members(tmp_path):
    """Weights of two routers have equal shapes; their mean is refused. A log directory may have no record.

    Runs may differ in what does not change the meaning of weights, such as dropout; the mean has that of the first.
    """
    for name, settings in (
        ("top2", ["router=top2"]),
        ("switch", ["router=switch", "input.seed=2"]),
        ("other", ["router=switch", "word_dropout=0.5", "unroll=false", "remat=full", "sampled_softmax=0"]),
        ("unknown", []),
    ):
        save(tmp_path / name, 4)
        if settings:
            changed = experiment.unchecked("m4.Quickstart", settings)
            hyperparameters.save(tmp_path / name, hyperparameters.of("m4.Quickstart", changed))
    members = {name: Checkpoints(tmp_path / name) for name in ("unknown", "switch", "other", "top2")}
    with pytest.raises(UserError, match="top2: .* not those of switch: model.router is top2 there, switch here"):
        tools.average_logdirs(members, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    del members["top2"]
    tools.average_logdirs(members, tmp_path / "mean")
    assert hyperparameters.load(tmp_path / "mean") == hyperparameters.load(tmp_path / "switch") is not None


def test_average_with_a_run_of_an_earlier_version(tmp_path):
    """What it did not record is as in the registered model; if that is not known here, the field is named."""
    recorded = hyperparameters.of("m4.Quickstart", experiment.unchecked("m4.Quickstart"))
    lacking = ("model.inference_capacity_factor", "model.layer_pattern")  # None, and a tuple
    old = recorded._replace(values={path: value for path, value in recorded.values.items() if path not in lacking})
    for name, own in (("new", recorded), ("old", old), ("foreign", old._replace(model="elsewhere.Model"))):
        save(tmp_path / name, 4)
        hyperparameters.save(tmp_path / name, own)
    members = {name: Checkpoints(tmp_path / name) for name in ("new", "old", "foreign")}
    with pytest.raises(UserError, match=f"foreign: .* not those of new: {lacking[0]} is absent there, None here"):
        tools.average_logdirs(members, tmp_path / "none")
    del members["foreign"]
    tools.average_logdirs(members, tmp_path / "mean")


def test_average_is_of_one_model_and_its_tokenizers(tmp_path):
    """The mean of two models is neither; rows of embeddings stand for the pieces of the tokenizers, which it keeps."""
    members = {}
    for name, model, readers in (
        ("a", "tiny", ["x", "y"]),
        ("b", "other", ["x", "y"]),
        ("c", "tiny", ["x", "z"]),
        ("d", "tiny", None),
    ):
        with contextlib.closing(Checkpoints(tmp_path / name, keep=1)) as members[name]:
            members[name].save_weights(4, model, tree.unflatten(theta_of(4)), "a test", readers)
        hyperparameters.save(tmp_path / name, hyperparameters.Recorded(model, {"model.field": model}))
    for names, pattern in (
        ("ab", "^a is of tiny, b of other; the mean is of one model"),
        ("dac", "c/checkpoints/4 was trained with other tokenizers than .*a/checkpoints/4, .* Leave one of them out"),
    ):
        with pytest.raises(UserError, match=pattern):
            tools.average_logdirs({name: members[name] for name in names}, tmp_path / "average")
    tools.average_logdirs({name: members[name] for name in "da"}, tmp_path / "average")
    assert Checkpoints(tmp_path / "average").readers(4) == ["x", "y"] and members["d"].readers(4) is None


def test_converted_weights_keep_what_read_their_texts(tmp_path):
    """From a training's checkpoint to a file and back: translate refuses other tokenizers for these, too."""
    with contextlib.closing(Checkpoints(tmp_path / "log", keep=1)) as checkpoints:
        checkpoints.save("tiny", state_of(4), {"next": 4, "readers": ["x", "y"]})
    file = tmp_path / "a.safetensors"
    tools.to_safetensors(checkpoints, 4, file)
    tools.from_safetensors(file, "tiny", SPECS["theta"], tmp_path / "back")
    with tools.as_logdir(file, "tiny", SPECS["theta"]) as logdir:
        found = [Checkpoints(each).readers(4) for each in (tmp_path / "log", tmp_path / "back", logdir)]
    assert found == [["x", "y"]] * 3


def test_average_refuses_unfit_steps(tmp_path):
    """One step, the same step twice, absent ones, other models, corrupt ones; no log directory is created."""
    save(tmp_path, 4, 8)
    checkpoints = Checkpoints(tmp_path, keep=9)
    checkpoints.save_weights(12, "other", {"embedding": np.zeros((16, 9), np.float32)}, "a test")
    checkpoints.close()
    for steps, pattern in (
        ([4], "two or more different steps"),
        ([4, 4], "two or more different steps"),
        ([4, 5], "no checkpoint of step 5. Existing steps: 4, 8, 12"),
        ([4, 12], "^step 4 is of tiny, step 12 of other; the mean is of one model"),
    ):
        with pytest.raises(UserError, match=pattern):
            tools.average(Checkpoints(tmp_path), steps, tmp_path / "average")
    flip(tmp_path / "checkpoints" / "8" / "theta" / "_METADATA")
    with pytest.raises(UserError, match="checkpoints/8 is corrupt: theta/_METADATA has changed. Choose another step"):
        tools.average(Checkpoints(tmp_path), [4, 8], tmp_path / "average")
    assert not (tmp_path / "average").exists()
    with pytest.raises(UserError, match="already has checkpoints"):
        tools.average(Checkpoints(tmp_path), [4, 8], tmp_path)


def test_safetensors_round_trip(tmp_path):
    """Bit for bit: NaN payloads, negative zero, denormals. The file is the same each time; any program can read it."""
    theta = theta_of(8)
    odd = np.array([0x7FC12345, 0x80000000, 1, 0xFF800000], np.uint32).view(np.float32)
    theta["embedding"] = np.concatenate([odd, theta["embedding"].ravel()[4:]]).reshape(16, 8)
    checkpoints = Checkpoints(tmp_path / "odd", keep=1)
    checkpoints.save_weights(8, "tiny", tree.unflatten(theta), "a test")
    checkpoints.close()
    for name in ("a.safetensors", "b.safetensors"):
        tools.to_safetensors(checkpoints, 8, tmp_path / name)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert {
        path: value.tobytes() for path, value in safetensors_numpy.load_file(tmp_path / "a.safetensors").items()
    } == {path: value.tobytes() for path, value in theta.items()}
    assert tools.from_safetensors(tmp_path / "a.safetensors", "tiny", SPECS["theta"], tmp_path / "back") == 8
    step, found = restore_theta(tmp_path / "back")
    assert step == 8
    for path, value in tree.flatten(found).items():
        assert np.asarray(value).tobytes() == theta[path].tobytes(), path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "back", "odd"]


def test_temporary_copies_of_killed_processes_are_removed(weights_file, tmp_path, monkeypatch):
    """Each is as large as the weights in float32."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = tmp_path / "lingvo_moe-killed"
    killed.mkdir()
    (killed / "lock").touch()
    os.utime(killed, (0, 0))
    with tools.as_logdir(weights_file, "tiny", SPECS["theta"]) as logdir:
        assert Checkpoints(logdir).latest(WEIGHTS) == 8
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_an_error_that_leaves_no_file(trained, tmp_path):
    """safetensors has an error of its own for it."""
    with (
        files_up_to(100),
        pytest.raises(UserError, match="--output=.*a.safetensors: cannot be written .* free disk space"),
    ):
        tools.to_safetensors(trained, 8, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_file_of_half_the_bits(trained, weights_file, tmp_path):
    """bfloat16 halves the file; back in float32, each weight is within one rounding of the original."""
    file = tmp_path / "half.safetensors"
    tools.to_safetensors(trained, 8, file, "bfloat16")
    original = safetensors_numpy.load_file(weights_file)
    stored = safetensors_numpy.load_file(file)
    assert {path: 2 * stored[path].nbytes for path in stored} == {path: original[path].nbytes for path in original}
    tools.from_safetensors(file, "tiny", SPECS["theta"], tmp_path / "back")
    for path, value in tree.flatten(restore_theta(tmp_path / "back")[1]).items():
        assert np.asarray(value).dtype == np.float32
        np.testing.assert_allclose(value, original[path], rtol=BFLOAT16_ROUNDING, atol=0)


def test_file_of_a_quarter_of_the_bits(trained, weights_file, tmp_path):
    """int8 quarters matrices but for a scale of each row; back, each is within half a scale; vectors are exact."""
    file = tmp_path / "quarter.safetensors"
    tools.to_safetensors(trained, 8, file, "int8")
    original = safetensors_numpy.load_file(weights_file)
    stored = safetensors_numpy.load_file(file)
    assert stored["embedding"].dtype == np.int8 and stored["embedding.scale"].shape == (16,)
    tools.from_safetensors(file, "tiny", SPECS["theta"], tmp_path / "back")
    for path, value in tree.flatten(restore_theta(tmp_path / "back")[1]).items():
        if original[path].ndim < 2:
            np.testing.assert_array_equal(value, original[path])
        else:
            half = np.abs(original[path]).max(axis=-1, keepdims=True) / 254
            assert np.all(np.abs(value - original[path]) <= half * (1 + 1e-5)), path


def test_int8_file_without_its_scales_is_refused(trained, tmp_path):
    """The scale of the weights is unknown."""
    file = tmp_path / "quarter.safetensors"
    tools.to_safetensors(trained, 8, file, "int8")
    with safetensors.safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    stored = {path: value for path, value in safetensors_numpy.load_file(file).items() if path != "embedding.scale"}
    safetensors_numpy.save_file(stored, file, metadata)
    with pytest.raises(UserError, match=r"embedding is int8 \[16, 8\] there, float32 \[16, 8\] here"):
        tools.from_safetensors(file, "tiny", SPECS["theta"], tmp_path / "new")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(weights_file, tmp_path, value, caplog):
    """A model with them would translate each line into the same token, and nothing would say why.

    A file of floating-point numbers can have them; it is written with a warning.
    """
    file, logdir = tmp_path / "weights.safetensors", tmp_path / "log"
    with safetensors.safe_open(weights_file, "numpy") as opened:
        metadata = opened.metadata()
    stored = safetensors_numpy.load_file(weights_file)
    stored["embedding"][3, 4] = value
    safetensors_numpy.save_file(stored, file, metadata)
    message = "weights.safetensors: embedding has values that are not finite; use another file"
    with pytest.raises(UserError, match=message), tools.as_logdir(file, "tiny", SPECS["theta"]):
        pass
    checkpoints = Checkpoints(logdir, keep=9)
    for step, theta in ((4, stored), (8, safetensors_numpy.load_file(weights_file))):
        checkpoints.save_weights(step, "tiny", tree.unflatten(theta), "a test")
    checkpoints.close()
    with pytest.raises(UserError, match="checkpoints/4: embedding has values that are not finite; choose another step"):
        tools.average(Checkpoints(logdir), [4, 8], tmp_path / "average")
    assert not (tmp_path / "average").exists()
    message = r"log/checkpoints/4: embedding has values that are not finite; .* choose another step"
    with pytest.raises(UserError, match=message):
        tools.to_safetensors(Checkpoints(logdir), 4, tmp_path / "new.safetensors", "int8")
    assert not (tmp_path / "new.safetensors").exists()
    for dtype in ("float32", "bfloat16"):
        caplog.clear()
        tools.to_safetensors(Checkpoints(logdir), 4, tmp_path / f"{dtype}.safetensors", dtype)
        assert re.search(message, caplog.text)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (
            {"embedding": Spec((16, 9), "float32", "VM")},
            r"embedding is float32 \[16, 8\] there, float32 \[16, 9\] here",
        ),
        (
            {"embedding": Spec((16, 8), "bfloat16", "VM")},
            r"embedding is float32 \[16, 8\] there, bfloat16 \[16, 8\] here",
        ),
        ({"bias": Spec((8,), "float32", "M")}, r"bias is absent there, float32 \[8\] here"),
        ({"expert": {"outer": Spec((8,), "float32", "M")}}, r"expert/inner is float32 \[4, 8, 16\] there, absent here"),
    ],
)
def test_safetensors_of_another_model_is_refused(weights_file, tmp_path, change, pattern):
    """The error names the first tensor that differs; no log directory is created."""
    with pytest.raises(UserError, match=f"does not hold the weights of other: {pattern}. Pass that --model"):
        tools.from_safetensors(weights_file, "other", SPECS["theta"] | change, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def foreign(path: pathlib.Path, metadata: dict[str, str] | None):
    safetensors_numpy.save_file(
        {name: np.zeros(spec.shape, spec.dtype) for name, spec in THETA.items()}, path, metadata
    )


def written(**changes) -> dict[str, str]:
    """Returns the metadata of a file of weights with changed fields, and without those that are `...`."""
    fields = {"format": 1, "model": "tiny", "step": 4, **changes}
    return {"lingvo_moe": json.dumps({name: value for name, value in fields.items() if value is not ...})}


@pytest.mark.parametrize(
    ("metadata", "pattern"),
    [
        (None, "lacks format, model or step"),
        ({"format": "pt"}, "lacks format, model or step"),
        ({"lingvo_moe": "{"}, "lacks format, model or step"),
        ({"lingvo_moe": "3"}, "lacks format, model or step"),
        (written(model=...), "lacks format, model or step"),
        (written(format=2), "format 2; this program knows 1"),
        (written(model=None), "model is None; expected the registered name"),
        (written(step=-4), "step is -4"),
        (written(step="../4"), "step is '../4'"),
        (written(readers=5), "readers are 5; expected a list"),
    ],
)
def test_safetensors_of_another_program_is_refused(tmp_path, metadata, pattern):
    """By the metadata, before any tensor is read."""
    path = tmp_path / "foreign.safetensors"
    foreign(path, metadata)
    with pytest.raises(UserError, match=pattern):
        tools.from_safetensors(path, "tiny", SPECS["theta"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@given(data=st.data())
def test_malformed_safetensors(weights_file, tmp_path_factory, data):
    """Truncated anywhere, with a flipped bit in the header's length, or of any bytes: an error names the file."""
    content = weights_file.read_bytes()
    kind = data.draw(st.sampled_from(["truncated", "flipped", "made up"]))
    path, logdir = weights_file.with_name("malformed.safetensors"), weights_file.with_name("new")
    if kind == "truncated":
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif kind == "flipped":
        path.write_bytes(content)
        flip(path, data.draw(st.integers(0, 63)))  # the length of the header
    else:
        path.write_bytes(data.draw(st.binary(max_size=64)))
    with pytest.raises(UserError, match="malformed.safetensors: not a complete safetensors file"):
        tools.from_safetensors(path, "tiny", SPECS["theta"], logdir)
    assert not logdir.exists()


def test_a_write_that_failed_can_be_repeated(weights_file, tmp_path):
    """A full disk leaves a directory of Orbax, which is no checkpoint."""
    left = tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    assert tools.from_safetensors(weights_file, "tiny", SPECS["theta"], tmp_path) == 8
    assert Checkpoints(tmp_path).latest() == 8 and not left.exists()


def test_nothing_is_written_where_a_training_runs(trained, weights_file, tmp_path, monkeypatch):
    """It has no checkpoint yet; each would delete those of the other."""
    monkeypatch.setattr(logdir_lock, "_ENDING_SECONDS", 0)
    with logdir_lock.locked(tmp_path):
        with pytest.raises(UserError, match=f"--logdir={tmp_path}: another process trains there"):
            tools.from_safetensors(weights_file, "tiny", SPECS["theta"], tmp_path)
        with pytest.raises(UserError, match=f"--output={tmp_path}: another process trains there"):
            tools.average(trained, trained.steps()[-2:], tmp_path)
    assert not Checkpoints(tmp_path).steps()


def test_unfit_paths_are_refused_first(trained, weights_file, tmp_path):
    """Before anything is read or written."""
    for name, pattern in (
        ("weights.bin", "ends with .safetensors"),
        ("nowhere/a.safetensors", "there is no directory"),
    ):
        with pytest.raises(UserError, match=pattern):
            tools.to_safetensors(trained, 8, tmp_path / name)
    content = weights_file.read_bytes()
    with pytest.raises(UserError, match=f"--output={weights_file} exists already; name a new file, or delete"):
        tools.to_safetensors(trained, 4, weights_file)
    assert weights_file.read_bytes() == content
    with pytest.raises(UserError, match="no such file"):
        tools.from_safetensors(tmp_path / "a.safetensors", "tiny", SPECS["theta"], tmp_path / "new")
    with pytest.raises(UserError, match="already has checkpoints"):
        tools.from_safetensors(weights_file, "tiny", SPECS["theta"], trained.directory.parent)
    with pytest.raises(UserError, match="is a file; expected a directory"):
        tools.from_safetensors(weights_file, "tiny", SPECS["theta"], weights_file)
    with pytest.raises(UserError, match="x/y: .*weights.safetensors is a file; expected a directory"):
        tools.from_safetensors(weights_file, "tiny", SPECS["theta"], weights_file / "x" / "y")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_to_is_refused_first(trained, weights_file, tmp_path, monkeypatch):
    """Before arrays are read; nothing is left, and the error is not that of a checkpoint."""

    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(tools.Reader, "read", None)
    monkeypatch.setattr(safetensors, "safe_open", None)
    pattern = r"=.*/new/log: nothing can be written there \(Read-only file system\). Remove the cause, or pass another "
    with pytest.raises(UserError, match=f"^--output{pattern}--output.$"):
        tools.average(trained, [4, 8], tmp_path / "new" / "log")
    with pytest.raises(UserError, match=f"^--logdir{pattern}--logdir.$"):
        tools.from_safetensors(weights_file, "tiny", SPECS["theta"], tmp_path / "new" / "log")
    assert not any(tmp_path.iterdir())


def test_verify_names_files_and_arrays(tmp_path):
    """A missing file, and the array that cannot be read without it."""
    save(tmp_path, 8)
    checkpoints = Checkpoints(tmp_path)
    assert tools.verify(checkpoints, 8) == []
    data = largest(checkpoints.path(8), "theta/ocdbt.process_0/d/*")
    data.unlink()
    found = tools.verify(checkpoints, 8)
    assert found[0] == f"theta/ocdbt.process_0/d/{data.name} is missing"
    assert found[1].startswith("theta/expert/inner cannot be read")
    assert tools.overview(checkpoints, 8).problem == found[0]


@pytest.mark.parametrize(
    "module, name", [(checkpoint_manifest, "size"), (orbax.CompositeCheckpointHandler, "metadata")]
)
def test_overview_of_what_cannot_be_read_for_now(trained, monkeypatch, module, name):
    """A file server that has restarted is no problem of the checkpoint, and no error: the other steps are shown."""

    def fail(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "file")

    monkeypatch.setattr(module, name, fail)
    seen = tools.overview(trained, 8)
    assert re.fullmatch(r"cannot be read \(.*Stale file handle.*\)", seen.problem) and seen.bytes is None


def test_statistics_are_of_finite_values():
    """Others are counted."""
    found = tools.Statistics.of(np.array([[3.0, -4.0, np.nan], [np.inf, 0.0, 1.0]], np.float32))
    assert (found.mean, found.least, found.greatest, found.not_finite) == (0.0, -4.0, 3.0, 2)
    assert found.rms == pytest.approx(np.sqrt(26 / 4))
    nothing = tools.Statistics.of(np.full(3, np.nan, np.float32))
    assert np.isnan(nothing.mean) and nothing.not_finite == 3


def test_overview_of_a_corrupt_checkpoint(trained, tmp_path):
    """What cannot be read is None, and the problem is named."""
    seen = tools.overview(trained, 8)
    assert (seen.model, seen.weights, seen.problem, seen.origin) == ("tiny", 16 * 8 + 4 * 8 * 16, "", None)
    save(tmp_path, 8)
    (tmp_path / "checkpoints" / "8" / "meta" / "metadata").unlink()
    seen = tools.overview(Checkpoints(tmp_path), 8)
    assert (seen.model, seen.weights, seen.problem) == (None, None, "meta/metadata is missing")
