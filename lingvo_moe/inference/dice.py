"""The Dice coefficient: how much of predicted and true regions is common to both (Dice 1945)."""

from __future__ import annotations

import numpy as np


class Overlap:
    """Counts the voxels of each class over any number of volumes.

    Args:
      classes: how many there are; labels are 0 to `classes` - 1.
    """

    def __init__(self, classes: int):
        self._both, self._either = np.zeros(classes, np.int64), np.zeros(classes, np.int64)

    def add(self, predicted: np.ndarray, labels: np.ndarray):
        """Counts volumes of one shape, both of them integers from 0 to `classes` - 1; raises ValueError for others."""
        if predicted.shape != labels.shape:
            raise ValueError(f"Dice: predictions have shape {predicted.shape}, labels {labels.shape}.")
        classes = len(self._both)
        for region in (predicted, labels):
            self._either += np.bincount(region.ravel(), minlength=classes)
        self._both += np.bincount(labels[predicted == labels], minlength=classes)

    def coefficients(self) -> tuple[float, ...]:
        """Returns 2 |P and L| / (|P| + |L|) of each class; 1 for a class that neither has."""
        return tuple(float(2 * both / either) if either else 1.0 for both, either in zip(self._both, self._either))
