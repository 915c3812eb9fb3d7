"""A safetensors file of weights: its metadata, and its tensors as float32; needs neither TensorFlow nor JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors

from lingvo_moe.data.batching import READERS_KEY
from lingvo_moe.errors import UserError
from lingvo_moe.training import quantization

# The key of the metadata's only entry, a JSON object: the library writes several entries in an arbitrary order.
METADATA = "lingvo_moe"
FORMAT = 1


class Facts(NamedTuple):
    """What the metadata says of the weights.

    Attributes:
      model: the registered name.
      step: the number of steps.
      tokenizer_hashes: see `checkpoint_reader.Reader.tokenizer_hashes`.
      hyperparameters: `values` of their training's `hyperparameters.Recorded`, without directories; None if unknown.
    """

    model: str
    step: int
    tokenizer_hashes: list[str] | None = None
    hyperparameters: Mapping[str, Any] | None = None


def metadata(facts: Facts) -> dict[str, str]:
    """Returns the metadata of a file of weights."""
    keys = {"tokenizer_hashes": READERS_KEY}
    known = {keys.get(name, name): value for name, value in facts._asdict().items() if value is not None}
    return {METADATA: json.dumps({"format": FORMAT, **known}, sort_keys=True)}


def facts(name: str, opened: safetensors.safe_open) -> Facts:
    """Returns what the metadata says.

    Args:
      name: what messages call the file, like `--input=FILE`.
      opened: the file.

    Raises:
      UserError: another program wrote the file, or another version of this one.
    """
    try:
        found = json.loads((opened.metadata() or {})[METADATA])
        version, step = found["format"], found["step"]
        values = found.get("hyperparameters")
        known = Facts(found["model"], step, found.get(READERS_KEY), None if values is None else dict(values))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise UserError(
            f"{name}: its metadata lacks format, model or step; expected a file that `checkpoint convert --output` "
            f"wrote. A model in Hugging Face's format is imported by the name of its directory."
        ) from None
    if version != FORMAT:
        raise UserError(f"{name}: format {version!r}; this program knows {FORMAT}.")
    tokenizer_hashes = known.tokenizer_hashes
    if tokenizer_hashes is not None and not (
        isinstance(tokenizer_hashes, list) and all(isinstance(each, str) for each in tokenizer_hashes)
    ):
        raise UserError(
            f"{name}: its {READERS_KEY} are {tokenizer_hashes!r}; expected a list of the tokenizers' hashes."
        )
    if not isinstance(known.model, str):
        raise UserError(f"{name}: its model is {known.model!r}; expected the registered name.")
    if type(step) is not int or step < 0:
        raise UserError(f"{name}: its step is {step!r}; expected a non-negative integer.")
    return known


def read_tensor(opened: safetensors.safe_open, path: str) -> np.ndarray:
    """Returns a weight of a file that was opened for NumPy; one in int8 as float32."""
    value = opened.get_tensor(path)
    return (
        quantization.dequantize(value, opened.get_tensor(path + quantization.SCALE))
        if value.dtype == np.int8
        else value
    )
