"""Scores of volumes count each volume once, and their mean is that of the objects' classes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import experiment
from lingvo_moe.data.volumes import INTENSITIES, make_volume
from lingvo_moe.inference.segmenter import ClassScore, Segmenter, by_threshold, evaluate

CONFIG = experiment.get("unet.Small", ["input.size=16,8,8", "input.held_out=3", "model.num_layers=2"])


class FakeSegmenter(Segmenter):
    """Gives every voxel of a volume one class; an empty row, too."""

    def __init__(self, label: int):
        self.label, self.batches = label, []

    def segment(self, source: dict[str, np.ndarray]) -> np.ndarray:
        self.batches.append(source["voxels"])
        return np.full(source["voxels"].shape[:-1], self.label, np.int32)


def labels(split: str, count: int) -> np.ndarray:
    return np.stack([make_volume(CONFIG.input, split, number).target for number in range(count)])


def test_every_volume_counts_once():
    """Three volumes in batches of two: the empty row of the last batch counts nowhere."""
    expected, segmenter = labels("test", 3), FakeSegmenter(label=2)
    *of_classes, mean = evaluate(segmenter, CONFIG)
    assert [batch.shape for batch in segmenter.batches] == [(2, 16, 8, 8, 1)] * 2
    assert [score.voxels for score in of_classes] == [np.count_nonzero(expected == label) for label in range(3)]
    tubes = np.count_nonzero(expected == 2)
    dice = [0.0, 0.0, 2 * tubes / (tubes + expected.size)]
    assert [score.dice for score in of_classes] == pytest.approx(dice)
    assert mean == ClassScore("mean", None, pytest.approx(dice[2] / 2), pytest.approx(of_classes[1].threshold_dice / 2))


def test_progress_is_of_all_volumes(capsys):
    """So that the time that is left can be shown; the empty row of the last batch is no volume."""
    evaluate(FakeSegmenter(label=0), CONFIG, max_volumes=100)
    assert "segmenting: 3/3 volumes" in capsys.readouterr().err


def test_max_volumes_and_split_choose_volumes():
    """One volume leaves the second row of its batch empty."""
    scores = evaluate(FakeSegmenter(label=0), CONFIG, max_volumes=1, split="valid")
    expected = labels("valid", 1)
    assert [score.voxels for score in scores[:3]] == [np.count_nonzero(expected == label) for label in range(3)]
    background = np.count_nonzero(expected == 0)
    assert scores[0].dice == pytest.approx(2 * background / (background + expected.size))


def test_the_threshold_sees_brightness_alone():
    """Without noise it finds all objects, and calls tubes ellipsoids."""
    silent = dataclasses.replace(CONFIG.input, noise=0.0)
    volume = make_volume(silent, "test", 0)
    np.testing.assert_array_equal(by_threshold(volume.source[None])[0] == 1, volume.target > 0)
    assert by_threshold(np.array(INTENSITIES).reshape(1, 2, 1, 1, 1)).tolist() == [[[[1]], [[1]]]]
