"""Replays: the batch of a skipped step, saved so that the step can be repeated: `LOGDIR/replay/STEP.npz`.

The file holds the batch's arrays by path (`target/ids`) and `about`, JSON: which step it was, and its loss.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np

from lingvo_moe import tree
from lingvo_moe.data.batching import Batch
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.utils import output_files

_FORMAT, _VERSION = "lingvo_moe replay", 1


@dataclasses.dataclass(frozen=True)
class Replay:
    """One training step that was skipped.

    Attributes:
      model: the registered name.
      step: its number, counted from 1 as in the curves.
      seed: of the training state.
      checkpoint: the step of the checkpoint that holds the weights with which the step began.
      loss: that training computed.
      gradient_norm: that training computed.
      batch: of the step.
      path: the file that it was loaded from, for messages.
    """

    model: str
    step: int
    seed: tuple[int, int]
    checkpoint: int
    loss: float
    gradient_norm: float
    batch: Batch = dataclasses.field(repr=False)
    path: str = ""

    def save(self, path: pathlib.Path):
        """Writes the file, which replaces `path` only when it is complete; raises OSError if it cannot be written."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("batch", "path")]
        about = {name: getattr(self, name) for name in names}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "version": _VERSION, **about})
        # NumPy would add .npz to the name of a file.
        with output_files.atomic_path(path, sync=True) as partial, open(partial, "wb") as file:
            np.savez_compressed(file, about=text, **tree.flatten(self.batch))

    @staticmethod
    def load(path: str | pathlib.Path) -> Replay:
        """Reads a file that `save` wrote; raises UserError for one that is missing, corrupt or something else."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                about = json.loads(str(stored["about"]))
                arrays = {name: stored[name] for name in stored.files if name != "about"}
            actual = about.pop("format"), about.pop("version")
            if actual == (_FORMAT, _VERSION):
                return Replay(**about | {"seed": tuple(about["seed"])}, batch=tree.unflatten(arrays), path=str(path))
        except OSError as error:
            raise UserError(
                f"--batch={path}: cannot be read ({error.strerror or error}); expected a file LOGDIR/replay/STEP.npz "
                f"that training wrote."
            ) from None
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            EOFError,
            RuntimeError,  # zipfile's, for a file that seems to be encrypted or of another version
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise UserError(
                f"--batch={path}: corrupt, or not a batch that training saved ({type(error).__name__}); expected a "
                f"file LOGDIR/replay/STEP.npz."
            ) from None
        raise UserError(
            f"--batch={path}: {actual[0]!r} version {actual[1]!r}; this program reads {_FORMAT!r} version {_VERSION}."
        )

    def check_model(self, model: str):
        """Raises UserError if the batch is another model's."""
        if self.model != model:
            raise UserError(f"--batch={self.path} is of {self.model}, not of {model}; pass --model={self.model}.")

    def check_shapes(self, specs: Mapping[str, Mapping[str, Spec]]):
        """Raises UserError if the arrays of the batch do not have these shapes and dtypes."""
        expected = {name: (spec.shape, spec.dtype) for name, spec in tree.flatten(specs).items()}
        actual = {name: (array.shape, array.dtype.name) for name, array in tree.flatten(self.batch).items()}
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                raise UserError(
                    f"--batch={self.path}: {name} is {_shown(actual.get(name))}, the model takes "
                    f"{_shown(expected.get(name))}. Pass the --set with which it was trained."
                )


def path_of(logdir: str | pathlib.Path, step: int) -> pathlib.Path:
    """Returns the file of the replay of a step."""
    return pathlib.Path(logdir) / "replay" / f"{step}.npz"


def _shown(array: tuple[tuple[int, ...], str] | None) -> str:
    return f"{array[1]}{list(array[0])}" if array else "absent"
