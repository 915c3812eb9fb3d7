"""Safetensors files, written completely or not at all."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files


def save(name: str, file: str | pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]):
    """Writes tensors to a file, which is replaced if it exists.

    Args:
      name: what the message calls the file, like `--output=FILE`.
      file: to write.
      tensors: by name.
      metadata: of the file.

    Raises:
      UserError: the file cannot be written, as on a full disk.
    """
    try:
        with output_files.atomic_path(file) as partial:
            safetensors_numpy.save_file(dict(tensors), partial, dict(metadata))
    except (OSError, safetensors.SafetensorError) as error:  # the latter is its own for a full disk, too
        raise UserError(f"{name}: cannot be written ({error}); free disk space, or name another file.") from None
