"""Means of checkpoints: exact, of one model, of valid and finite weights."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.errors import UserError
from lingvo_moe.testing.checkpoints import (
    SPECS,
    assert_equal,
    flip,
    restore_theta,
    save,
    theta_of,
)
from lingvo_moe.training import checkpoint_average, checkpoint_manifest, checkpoint_tools, hyperparameters
from lingvo_moe.training.checkpoint import Checkpoints

THETA = tree.flatten(SPECS["theta"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Checkpoints:
    """Steps 4, 8 and 12 of the small state."""
    return save(tmp_path_factory.mktemp("log"), 4, 8, 12)


@pytest.mark.parametrize("steps", [[4, 8], [12, 4, 8]])
def test_average_is_the_mean_in_float64(trained, tmp_path, steps):
    """It is saved under the newest step's number, and read as any other checkpoint."""
    checkpoint_average.of_steps(trained, steps, tmp_path / "average")
    step, found = restore_theta(tmp_path / "average")
    assert step == max(steps)
    members = [theta_of(member) for member in steps]
    expected = {
        path: np.mean([theta[path] for theta in members], axis=0, dtype=np.float64).astype(np.float32) for path in THETA
    }
    assert_equal(found, tree.unflatten(expected))
    seen = checkpoint_tools.overview(Checkpoints(tmp_path / "average"), step)
    assert (seen.problem, seen.origin) == ("", f"average of steps {', '.join(map(str, steps))}")
    assert checkpoint_tools.verify(Checkpoints(tmp_path / "average"), step) == []


def test_average_of_log_directories_is_the_mean_of_their_newest_weights(trained, tmp_path):
    """Of different numbers of steps; newest are valid ones; models of other weights are refused and named."""
    save(tmp_path / "other", 4)
    logdirs = {"log": trained, "other": Checkpoints(tmp_path / "other")}
    checkpoint_average.of_logdirs(logdirs, tmp_path / "average")
    step, found = restore_theta(tmp_path / "average")
    newest = [theta_of(12), theta_of(4)]
    expected = {path: np.mean([t[path] for t in newest], axis=0, dtype=np.float64) for path in THETA}
    assert step == 12
    assert_equal(found, tree.unflatten({path: value.astype(np.float32) for path, value in expected.items()}))
    origin = checkpoint_tools.overview(Checkpoints(tmp_path / "average"), step).origin
    assert origin == "average of 2 log directories, steps 12, 4"

    save(tmp_path / "broken", 4, 8)
    (tmp_path / "broken" / "checkpoints" / "8" / checkpoint_manifest.MANIFEST).write_text("{")
    checkpoint_average.of_logdirs(
        {"log": trained, "broken": Checkpoints(tmp_path / "broken")}, tmp_path / "of valid ones"
    )
    origin = checkpoint_tools.overview(Checkpoints(tmp_path / "of valid ones"), 12).origin
    assert origin == "average of 2 log directories, steps 12, 4"

    with contextlib.closing(Checkpoints(tmp_path / "wider", keep=1)) as wider:
        wider.save_weights(4, "tiny", {"embedding": np.zeros((16, 9), np.float32)}, "a test")
    with pytest.raises(UserError, match=r"wider.* not those of log: embedding is \[16, 9\] there, \[16, 8\] here"):
        checkpoint_average.of_logdirs({"log": trained, "wider": Checkpoints(tmp_path / "wider")}, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_average_has_the_hyperparameters_of_its_members(tmp_path):
    """Weights of two routers have equal shapes; their mean is refused. A log directory may have no record.

    Runs may differ in what does not change the meaning of weights, such as dropout; the mean has that of the first.
    """
    for name, settings in (
        ("top2", ["router=top2"]),
        ("switch", ["router=switch", "input.seed=2"]),
        ("other", ["router=switch", "word_dropout=0.5", "unroll=false", "capacity_factor=1.25", "sampled_softmax=0"]),
        ("unknown", []),
    ):
        save(tmp_path / name, 4)
        if settings:
            changed = experiment.unchecked("m4.Quickstart", settings)
            hyperparameters.save(tmp_path / name, hyperparameters.of("m4.Quickstart", changed))
    members = {name: Checkpoints(tmp_path / name) for name in ("unknown", "switch", "other", "top2")}
    with pytest.raises(UserError, match="top2: .* not those of switch: model.router is top2 there, switch here"):
        checkpoint_average.of_logdirs(members, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    del members["top2"]
    checkpoint_average.of_logdirs(members, tmp_path / "mean")
    assert hyperparameters.load(tmp_path / "mean") == hyperparameters.load(tmp_path / "switch") is not None


def test_a_checkpoint_never_lacks_its_hyperparameters(tmp_path, monkeypatch):
    """They are written first: a checkpoint that cannot be written, as on a full disk, is none; the next one is."""
    members = {name: Checkpoints(tmp_path / name) for name in ("first", "second")}
    recorded = hyperparameters.of("m4.Quickstart", experiment.unchecked("m4.Quickstart"))
    for name in members:
        save(tmp_path / name, 4)
        hyperparameters.save(tmp_path / name, recorded)

    def fail(*_):
        assert hyperparameters.load(tmp_path / "mean") == hyperparameters.load(tmp_path / "first") is not None
        raise UserError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save_weights", fail)
        with pytest.raises(UserError, match="the disk is full"):
            checkpoint_average.of_logdirs(members, tmp_path / "mean")
    checkpoint_average.of_logdirs(members, tmp_path / "mean")
    assert Checkpoints(tmp_path / "mean").steps() == [4]


def test_average_with_a_run_of_an_earlier_version(tmp_path):
    """What it did not record is as in the registered model; if that is not known here, the field is named."""
    recorded = hyperparameters.of("m4.Quickstart", experiment.unchecked("m4.Quickstart"))
    lacking = ("model.inference_capacity_factor", "model.layer_pattern")  # None, and a tuple
    old = recorded._replace(values={path: value for path, value in recorded.values.items() if path not in lacking})
    for name, own in (("new", recorded), ("old", old), ("foreign", old._replace(model="elsewhere.Model"))):
        save(tmp_path / name, 4)
        hyperparameters.save(tmp_path / name, own)
    members = {name: Checkpoints(tmp_path / name) for name in ("new", "old", "foreign")}
    with pytest.raises(UserError, match=f"foreign: .* not those of new: {lacking[1]} is absent there, "):
        checkpoint_average.of_logdirs(members, tmp_path / "none")
    del members["foreign"]
    checkpoint_average.of_logdirs(members, tmp_path / "mean")


def test_average_is_of_one_model_and_its_tokenizers(tmp_path):
    """The mean of two models is neither; rows of embeddings stand for the pieces of the tokenizers, which it keeps."""
    members = {}
    for name, model, tokenizer_hashes in (
        ("a", "tiny", ["x", "y"]),
        ("b", "other", ["x", "y"]),
        ("c", "tiny", ["x", "z"]),
        ("d", "tiny", None),
    ):
        with contextlib.closing(Checkpoints(tmp_path / name, keep=1)) as members[name]:
            members[name].save_weights(4, model, tree.unflatten(theta_of(4)), "a test", tokenizer_hashes)
        hyperparameters.save(tmp_path / name, hyperparameters.Recorded(model, {"model.field": model}))
    for names, pattern in (
        ("ab", "^a is of tiny, b of other; the mean is of one model"),
        ("dac", "c/checkpoints/4 was trained with other tokenizers than .*a/checkpoints/4, .* Leave one of them out"),
    ):
        with pytest.raises(UserError, match=pattern):
            checkpoint_average.of_logdirs({name: members[name] for name in names}, tmp_path / "average")
    checkpoint_average.of_logdirs({name: members[name] for name in "da"}, tmp_path / "average")
    assert Checkpoints(tmp_path / "average").tokenizer_hashes(4) == ["x", "y"]
    assert members["d"].tokenizer_hashes(4) is None


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
            checkpoint_average.of_steps(Checkpoints(tmp_path), steps, tmp_path / "average")
    flip(tmp_path / "checkpoints" / "8" / "theta" / "_METADATA")
    with pytest.raises(UserError, match="checkpoints/8 is corrupt: theta/_METADATA has changed. Choose another step"):
        checkpoint_average.of_steps(Checkpoints(tmp_path), [4, 8], tmp_path / "average")
    assert not (tmp_path / "average").exists()
    with pytest.raises(UserError, match="already has checkpoints"):
        checkpoint_average.of_steps(Checkpoints(tmp_path), [4, 8], tmp_path)
