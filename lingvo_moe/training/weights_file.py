"""A safetensors file of weights: its metadata, and its tensors as float32; needs neither TensorFlow nor JAX."""

from __future__ import annotations

import json

import numpy as np
import safetensors

from lingvo_moe.training import quantization

# The key of the metadata's only entry, a JSON object: the library writes several entries in an arbitrary order.
METADATA = "lingvo_moe"
FORMAT = 1


def metadata(model: str, step: int, readers: list[str] | None = None) -> dict[str, str]:
    """Returns the metadata of a file with the weights of a registered model after `step` steps.

    Args:
      model: the registered name.
      step: the number of steps.
      readers: see `checkpoint_reader.Reader.readers`.
    """
    known = {} if readers is None else {"readers": readers}
    return {METADATA: json.dumps({"format": FORMAT, "model": model, "step": step, **known}, sort_keys=True)}


def read_tensor(opened: safetensors.safe_open, path: str) -> np.ndarray:
    """Returns a weight of a file that was opened for NumPy; one in int8 as float32."""
    value = opened.get_tensor(path)
    return (
        quantization.dequantize(value, opened.get_tensor(path + quantization.SCALE))
        if value.dtype == np.int8
        else value
    )
