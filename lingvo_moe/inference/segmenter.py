"""Segmentation with a trained model: Dice on held-out volumes, by class."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from lingvo_moe.data.pipeline import EvalInput
from lingvo_moe.data.volumes import CLASSES, INTENSITIES, VolumeInput
from lingvo_moe.engines.base import Engine
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.dice import Overlap
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.utils import progress


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """The Dice coefficients of one class, or their mean over all classes except the background.

    Attributes:
      name: of the class, or `mean`.
      voxels: how many voxels of the volumes are of the class; None of the mean.
      dice: of the model.
      threshold_dice: of `by_threshold`, the threshold baseline: intensity alone.
    """

    name: str
    voxels: int | None
    dice: float
    threshold_dice: float


class Segmenter:
    """Segments volumes with the newest checkpoint of a log directory.

    Attributes:
      step: the training step of the checkpoint.
    """

    def __init__(self, name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path):
        """Compiles the program and restores the weights; the arguments are those of `translator.Translator`.

        Raises:
          UserError: no checkpoint, or one of another model.
        """
        with trained_weights(name, experiment, logdir) as restore:
            self._program = engine.compile(experiment.steps.segment(experiment.input.specs()["source"]))
            self.step, self._theta = restore(self._program.shardings("theta"))

    def segment(self, source: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the class of each voxel of a batch's `source`: `[B, X, Y, Z] int32`."""
        return np.asarray(self._program({"theta": self._theta, "source": source})["classes"])


def evaluate(
    segmenter: Segmenter, experiment: Experiment, max_volumes: int = 100, split: str = "test"
) -> list[ClassScore]:
    """Segments up to `max_volumes` volumes of a held-out split.

    Returns:
      The scores of each class over all volumes together, and the mean of those that are no background.
    """
    held_out = EvalInput(experiment.corpus, experiment.tokenizers, experiment.input, split, max_pairs=max_volumes)
    of_model, of_threshold, voxels = Overlap(len(CLASSES)), Overlap(len(CLASSES)), np.zeros(len(CLASSES), np.int64)
    total = min(max_volumes, experiment.input.held_out) if isinstance(experiment.input, VolumeInput) else None
    with progress.bar("segmenting", total, "volumes") as advance:
        for batch in held_out.batches():
            present = batch["target"]["segment_ids"] != 0
            labels = batch["target"]["labels"][present]
            of_model.add(segmenter.segment(batch["source"])[present], labels)
            of_threshold.add(by_threshold(batch["source"]["voxels"][present]), labels)
            voxels += np.bincount(labels.ravel(), minlength=len(CLASSES))
            advance(int(present.sum()))
    rows = zip(CLASSES, voxels.tolist(), of_model.coefficients(), of_threshold.coefficients())
    scores = [ClassScore(*row) for row in rows]
    mean = [float(np.mean([getattr(score, name) for score in scores[1:]])) for name in ("dice", "threshold_dice")]
    return [*scores, ClassScore("mean", None, *mean)]


def by_threshold(voxels: np.ndarray) -> np.ndarray:
    """Returns a class for each voxel of `[B, X, Y, Z, 1]` by itself: an ellipsoid where it is as bright as an object.

    Ellipsoids have more voxels than tubes, and their intensities are the same.
    """
    return (voxels[..., 0] >= INTENSITIES[0]).astype(np.int32)
