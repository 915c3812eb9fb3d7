"""A batch that training could not learn from, kept so that the step can be made again: `LOGDIR/replay/STEP.npz`.

The file holds the batch's arrays by path (`target/ids`) and `about`, JSON: what the step was and what came of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import zipfile
import zlib

import numpy as np

from lingvo_moe import tree
from lingvo_moe.data.batching import Batch
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import Spec

_FORMAT, _VERSION = "lingvo_moe replay", 1


@dataclasses.dataclass(frozen=True)
class Replay:
    """One training step that changed nothing.

    Attributes:
      model: the registered name.
      step: which one, counted from 1 as in the curves.
      seed: of the training state.
      checkpoint: the step of the checkpoint that holds the weights which the step began with.
      loss, gradient_norm: what training saw.
      batch: what it was made with.
    """

    model: str
    step: int
    seed: tuple[int, int]
    checkpoint: int
    loss: float
    gradient_norm: float
    batch: Batch = dataclasses.field(repr=False)

    def save(self, path: pathlib.Path):
        """Writes the file, which replaces `path` only when it is complete. Raises OSError where that is not possible."""
        about = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "batch"}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        try:
            with open(partial, "wb") as file:
                np.savez_compressed(
                    file,
                    about=json.dumps({"format": _FORMAT, "version": _VERSION, **about}),
                    **tree.flatten(self.batch),
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | pathlib.Path) -> Replay:
        """Reads a file that `save` wrote; raises UserError for one that is missing, damaged or something else."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                about = json.loads(str(stored["about"]))
                arrays = {name: stored[name] for name in stored.files if name != "about"}
            found = about.pop("format"), about.pop("version")
            if found == (_FORMAT, _VERSION):
                return Replay(**about | {"seed": tuple(about["seed"])}, batch=tree.unflatten(arrays))
        except OSError as error:
            raise UserError(
                f"--batch={path}: cannot be read ({error.strerror or error}); expected a file LOGDIR/replay/STEP.npz "
                f"that training wrote."
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(
                f"--batch={path}: damaged, or no batch that training saved ({type(error).__name__}); expected a file "
                f"LOGDIR/replay/STEP.npz."
            ) from None
        raise UserError(
            f"--batch={path}: {found[0]!r} version {found[1]!r}; this program reads {_FORMAT!r} version {_VERSION}."
        )

    def check_model(self, path: str | pathlib.Path, model: str):
        """Raises UserError where the batch is another model's; `path` is for the message."""
        if self.model != model:
            raise UserError(f"--batch={path} is of {self.model}, not of {model}; pass --model={self.model}.")

    def check_shapes(self, path: str | pathlib.Path, specs: dict[str, dict[str, Spec]]):
        """Raises UserError where the batch is not of these shapes; `path` is for the message."""
        expected = {name: (spec.shape, spec.dtype) for name, spec in tree.flatten(specs).items()}
        found = {name: (array.shape, array.dtype.name) for name, array in tree.flatten(self.batch).items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise UserError(
                    f"--batch={path}: {name} is {_shown(found.get(name))}, the model takes "
                    f"{_shown(expected.get(name))}. Pass the --set with which it was trained."
                )


def path_of(logdir: str | pathlib.Path, step: int) -> pathlib.Path:
    """Where the batch of a step is kept."""
    return pathlib.Path(logdir) / "replay" / f"{step}.npz"


def _shown(array: tuple[tuple[int, ...], str] | None) -> str:
    return f"{array[1]}{list(array[0])}" if array else "absent"
