"""The hyperparameters of a log directory: with them, commands read its weights, and training resumes.

`LOGDIR/hyperparameters.json` has the registered name of the model and every hyperparameter of its last training. It is
read before TensorFlow and JAX are imported.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any, NamedTuple

from lingvo_moe import experiment, overrides, registry
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files

_log = logging.getLogger(__name__)
FILE = "hyperparameters.json"
# Where and how long a run computes: each run has its own, like the flags of devices.
_OF_A_RUN = ("mesh", "layout", "platform", "windowed_einsum_mib", "training.steps")
_DIRECTORIES = ("corpus", "tokenizers")
_PLAIN = (bool, int, float, str, type(None), tuple)


class Recorded(NamedTuple):
    """What a file holds.

    Attributes:
      model: the registered name.
      assignments: `field=value` for each hyperparameter whose value is not that of the registered model.
    """

    model: str
    assignments: tuple[str, ...]

    @property
    def portable(self) -> list[str]:
        """The assignments that mean the same on another machine: those of no directory."""
        return [each for each in self.assignments if each.partition("=")[0] not in _DIRECTORIES]


def save(logdir: pathlib.Path, name: str, trained: experiment.Experiment):
    """Writes the file of a log directory; replaces an existing one.

    Directories are absolute, so that they are found from another working directory.

    Args:
      logdir: an existing directory.
      name: the registered name.
      trained: the experiment.
    """
    # Those of an extension may be of types that no flag can set.
    fields = (field for field in overrides.fields(trained) if isinstance(field[1], _PLAIN))
    values = {path: value for path, value in fields if path not in _OF_A_RUN}
    for path in _DIRECTORIES:
        values[path] = values[path] and os.path.abspath(values[path])
    with output_files.atomic_writer(str(logdir / FILE)) as file:
        json.dump({"model": name, "hyperparameters": values}, file, indent=1)
        file.write("\n")


def copy(source: pathlib.Path, target: pathlib.Path):
    """Copies the file of one log directory, if it has one, to another."""
    if (source / FILE).exists():
        with output_files.atomic_writer(str(target / FILE)) as file:
            file.write((source / FILE).read_text(encoding="utf-8"))


def load(logdir: pathlib.Path) -> Recorded | None:
    """Reads the file of a log directory; None if there is none.

    A directory that has been moved or removed since is left out, with a warning.

    Raises:
      UserError: the file cannot be read, or its model or one of its values is none of this program.
    """
    path = logdir / FILE
    try:
        content = json.loads(path.read_bytes())
        model, values = str(content["model"]), dict(content["hyperparameters"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(
            f"{path}: expected the model and the hyperparameters that training wrote. Restore the file from a copy; or "
            f"remove it, and pass --model with the --set flags of the training."
        ) from None
    try:
        name = registry.full_name(model)
        return Recorded(name, _differences(experiment.unchecked(name), values))
    except UserError as error:
        raise UserError(
            f"{path}: {error} Another version of this program may have written the file, or the model be one of an "
            f"--import. Without the file, pass --model with the --set flags of the training."
        ) from None


def _differences(own: experiment.Experiment, values: dict[str, Any]) -> tuple[str, ...]:
    """Returns the assignments that give `own` these values; raises UserError if it cannot have them."""
    known = {path: overrides.text(value) for path, value in overrides.fields(own)}
    known |= {path: known[path] and os.path.abspath(known[path]) for path in _DIRECTORIES}
    recorded = {path: overrides.text(value) for path, value in values.items() if path not in _OF_A_RUN}
    differing = {path: text for path, text in recorded.items() if text != known.get(path)}
    for path in _DIRECTORIES:
        if differing.get(path) and not os.path.isdir(differing[path]):
            _log.warning("%s=%s: this directory of the training is gone.", path, differing.pop(path))
    assignments = tuple(f"{path}={text}" for path, text in differing.items())
    overrides.apply(own, assignments)
    return assignments
