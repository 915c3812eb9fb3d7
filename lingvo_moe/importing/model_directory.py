"""A directory of a model in Hugging Face's format: config.json and safetensors files, one or several with an index.

Weights in pickles (`pytorch_model.bin`) are refused: to read one may run code.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import safetensors

from lingvo_moe.errors import UserError
from lingvo_moe.utils import safe_paths

CONFIG = "config.json"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = "pytorch_model*.bin"
_DTYPES = ("F32", "F16", "BF16")


def read_json(path: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns the object in a JSON file; raises UserError, which begins with `name`, if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{name}: cannot read {path.name} ({error.strerror}); expected the directory of a model in Hugging Face's "
            f"format."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: {path.name} is not JSON ({error}); copy it again.") from None
    if not isinstance(found, dict):
        raise UserError(f"{name}: {path.name} is a {type(found).__name__}; expected an object; copy it again.")
    return found


class Tensors:
    """The tensors of a model's directory, by name; they are read when they are asked for.

    Attributes:
      shapes: of all tensors.
      size: the number of values of all tensors.
    """

    def __init__(self, name: str, files: Mapping[str, safetensors.safe_open]):
        """Reads the shapes; use `tensors`."""
        self._name, self._files = name, files
        self.shapes = {tensor: tuple(opened.get_slice(tensor).get_shape()) for tensor, opened in self._files.items()}
        self.size = sum(map(math.prod, self.shapes.values()))

    def read(self, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a tensor as float32.

        Raises:
          UserError: it is missing, has another shape or a dtype of quantized weights, or values that are not finite.
        """
        if tensor not in self.shapes:
            raise UserError(f"{self._name}: there is no tensor {tensor}, which {CONFIG} requires.")
        if self.shapes[tensor] != shape:
            raise UserError(
                f"{self._name}: {tensor} has the shape {list(self.shapes[tensor])}; by {CONFIG}, {list(shape)} is "
                f"expected."
            )
        if (dtype := self._files[tensor].get_slice(tensor).get_dtype()) not in _DTYPES:
            raise UserError(
                f"{self._name}: {tensor} is {dtype}; expected one of {', '.join(_DTYPES)}. Import the model from "
                f"before it was quantized."
            )
        found = self._files[tensor].get_tensor(tensor).astype(np.float32, copy=False)
        if not np.isfinite(found).all():
            raise UserError(f"{self._name}: {tensor} has values that are not finite; copy its file again.")
        return found


@contextlib.contextmanager
def tensors(directory: pathlib.Path, name: str) -> Iterator[Tensors]:
    """Opens the safetensors files of a directory.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: there are none, a file is missing or corrupt, or the index names a file outside of the directory.
    """
    with contextlib.ExitStack() as stack:
        by_file: dict[str, safetensors.safe_open] = {}
        files: dict[str, safetensors.safe_open] = {}
        for file, names in _names_by_file(directory, name).items():
            try:
                (directory / file).open("rb").close()  # the library does not say why it cannot read a file
            except OSError as error:
                raise UserError(f"{name}: cannot read {file} ({error.strerror}); copy it, too.") from None
            try:
                by_file[file] = stack.enter_context(safetensors.safe_open(directory / file, "numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                raise UserError(
                    f"{name}: {file} is not a complete safetensors file ({error}); copy it again."
                ) from None
            there = set(by_file[file].keys())
            if missing := sorted(set(names) - there):
                raise UserError(f"{name}: {INDEX} has {missing[0]} in {file}, where it is not; copy the files again.")
            files |= dict.fromkeys(names or there, by_file[file])
        yield Tensors(name, files)


def _names_by_file(directory: pathlib.Path, name: str) -> dict[str, list[str]]:
    """Returns the names of the tensors by file; of the only file, none."""
    if (directory / FILE).exists():
        return {FILE: []}
    if not (directory / INDEX).exists():
        if any(directory.glob(_PICKLES)):
            raise UserError(
                f"{name}: the weights are pickles, {_PICKLES}, which may run code when they are read. Save them as "
                f"safetensors with Hugging Face's library, where you trust them: "
                f"AutoModelForSeq2SeqLM.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})."
            )
        raise UserError(f"{name}: there is neither {FILE} nor {INDEX}; expected a model in Hugging Face's format.")
    places = read_json(directory / INDEX, name).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{name}: {INDEX} has no weight_map; copy it again.")
    by_file: dict[str, list[str]] = collections.defaultdict(list)
    for tensor, file in places.items():
        by_file[safe_paths.check_file_name(file, f"{name}: {INDEX}, {tensor}")].append(tensor)
    return by_file
