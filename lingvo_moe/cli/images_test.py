"""A model of volumes is trained, resumed, evaluated and diagnosed by the commands of the others."""

from __future__ import annotations

import json

import pytest

from lingvo_moe.cli import images, main
from lingvo_moe.inference.segmenter import ClassScore
from lingvo_moe.testing import experiments as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_SETTINGS = (
    "model.num_layers=2",
    "model.base_channels=2",
    "input.size=16,8,8",
    "input.held_out=3",
    "training.log_every=1",
    "training.evaluate_every=2",
    "platform=cpu",
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """The flags of a tiny model, trained for two steps and then, resumed, for two more, by two devices."""
    directory = tmp_path_factory.mktemp("volumes")
    shared = ["--model=unet.Small", "--devices=2", *(f"--set={setting}" for setting in _SETTINGS)]
    shared += [f"--logdir={directory}"]
    for steps in (2, 4):
        assert main.main(["lingvo_moe", "train", *shared, f"--steps={steps}"]) == 0
    curves = tiny.curves(directory)
    assert set(curves["loss"]) == {1, 2, 3, 4} and {"dice", "cross_entropy"} <= set(curves)
    assert set(curves["tokens"][1]) == {2 * 16 * 8 * 8}
    assert set(tiny.curves(directory, "valid")) == {"cross_entropy"}
    return shared


def test_eval_prints_and_writes_dice_by_class(flags, tmp_path, capsys, monkeypatch):
    """All three volumes of the split, of which the last batch has one; into the directory where the user is."""
    monkeypatch.chdir(tmp_path)
    assert main.main(["lingvo_moe", "eval", *flags, "--json=scores.json"]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "scores.json").read_text())
    scores = {score["name"]: score for score in rows["scores"]}
    assert rows["step"] == 4 and list(scores) == ["background", "ellipsoid", "tube", "mean"]
    assert sum(scores[name]["voxels"] for name in ("background", "ellipsoid", "tube")) == 3 * 16 * 8 * 8
    assert scores["mean"]["voxels"] is None
    assert scores["mean"]["dice"] == pytest.approx((scores["ellipsoid"]["dice"] + scores["tube"]["dice"]) / 2)
    assert scores["tube"]["threshold_dice"] == 0 < scores["ellipsoid"]["threshold_dice"] < 1
    assert all(name in printed for name in scores)


def test_diagnose_names_the_blocks(flags, capsys):
    assert main.main(["lingvo_moe", "diagnose", *flags]) == 0
    printed = capsys.readouterr().out
    blocks = ("analysis_0", "analysis_1", "upsampling_0", "synthesis_0", "softmax")
    assert all(block in printed for block in (*blocks, "all numbers are finite"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["translate"], "unet.Small segments volumes; it has nothing to translate"),
        (["eval", "--logdir=x", "--beam_size=4"], "--beam_size is for texts"),
        (["eval", "--logdir=x", "--languages=de"], "--languages is for texts"),
        (["train", "--logdir=x", "--corpus=y"], "--corpus=y: a program makes the volumes"),
        (["plan", "--program=decode"], "unet.Small neither translates nor generates"),
    ],
)
def test_mistakes_are_errors(arguments, message, capsys):
    assert main.main(["lingvo_moe", *arguments, "--model=unet.Small"]) == 2
    assert message in capsys.readouterr().err


def test_summary_is_the_mean():
    """It has no number of voxels."""
    scores = [ClassScore("tube", 1000, 0.5, 0.25), ClassScore("mean", None, 0.5, 0.25)]
    assert images.table(scores).splitlines()[1].split() == ["tube", "1,000", "0.500", "0.250"]
    assert [line.split() for line in images.table(scores, summary=True).splitlines()[1:]] == [
        ["mean", "0.500", "0.250"]
    ]
