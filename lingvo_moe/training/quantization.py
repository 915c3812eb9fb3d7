"""Weights in eight bits: int8 with one float32 scale for each vector along the last dimension.

Symmetric quantization by the largest magnitude (Jacob et al. 2018, section 2.1, with zero point 0). Tensors of fewer
than two dimensions stay as they are, such as the scale of the last normalisation; those of repeated layers are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lingvo_moe.errors import UserError

SCALE = ".scale"  # the name of a tensor's scales is its own name with this at the end
_LARGEST = 127


def quantize(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors by name: `w [..., N]` as int8, and as `w.scale [...] float32` the value of 1.

    Each value is within half of its vector's scale of the original one.

    Raises:
      UserError: a value is not finite.
    """
    tensors = {}
    for name, value in weights.items():
        if value.ndim < 2:
            tensors[name] = value
            continue
        if not np.isfinite(value).all():
            raise UserError(f"{name} has values that are not finite, which int8 does not have.")
        scale = np.abs(value).max(axis=-1).astype(np.float32) / np.float32(_LARGEST)
        steps = np.divide(value, scale[..., None], out=np.zeros(value.shape, np.float32), where=scale[..., None] > 0)
        tensors[name] = np.clip(np.rint(steps), -_LARGEST, _LARGEST).astype(np.int8)
        tensors[name + SCALE] = scale
    return tensors


def dequantize(steps: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns `steps * scale`: `[..., N] float32` from `[..., N] int8` and `[...] float32`."""
    with np.errstate(over="ignore", invalid="ignore"):  # of a damaged file; what uses weights refuses these values
        return steps.astype(np.float32) * scale[..., None]
