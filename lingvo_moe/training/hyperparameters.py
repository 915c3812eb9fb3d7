"""The hyperparameters of a log directory: with them, commands read its weights, and training resumes.

`LOGDIR/hyperparameters.json` has the registered name of the model and every hyperparameter of its last training. It is
read before TensorFlow and JAX are imported. Files of `checkpoint convert` hold the same, without directories.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from lingvo_moe import experiment, overrides, registry
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files

FILE = "hyperparameters.json"
DIRECTORIES = ("corpus", "tokenizers")
OWN_TOKENIZERS = "tokenizers"  # the directory below the log directory of an imported model
# Recorded, so that training which resumes with another one can say so; it fits one number of mesh axes.
LAYOUT = "layout"
# Where and how long a run computes: each run has its own, like the flags of devices.
_OF_A_RUN = ("mesh", LAYOUT, "platform", "windowed_einsum_mib", "training.steps")
# Fields of a model that change how it trains or is computed, but not what its weights mean.
_OF_COMPUTATION = (
    "input_dropout",
    "residual_dropout",
    "attention_dropout",
    "word_dropout",
    "label_smoothing",
    "sampled_softmax",
    "aux_loss_weight",
    "num_groups",
    "inference_num_groups",
    "capacity_factor",
    "inference_capacity_factor",
    "inference_min_capacity",
    "activation_dtype",
    "dispatch",
    "unroll",
    "remat",
    "pipeline",
    "stages",
    "microbatches",
)
# Fields that were removed, with the value that had no effect.
_REMOVED = {"search.first_id": None}
_PLAIN = (bool, int, float, str, type(None), tuple)


class Recorded(NamedTuple):
    """The hyperparameters of a training run.

    Attributes:
      model: the registered name.
      values: by path, as JSON has them.
    """

    model: str
    values: Mapping[str, Any]

    @property
    def portable(self) -> Recorded:
        """Those that mean the same on another machine: without directories."""
        return self._replace(values={path: value for path, value in self.values.items() if path not in DIRECTORIES})

    @property
    def completed(self) -> Recorded:
        """With the registered model's values of fields that it lacks, as `resolve` reads it.

        An earlier version of this program, which had fewer fields, may have written it. That of a model that is not
        registered here stays as it is.
        """
        try:
            own = of(self.model, experiment.unchecked(registry.full_name(self.model)))
        except UserError:
            return self
        known = json.loads(json.dumps(dict(own.values)))  # lists for tuples, as those that are read
        return self._replace(values={**known, **self.values})

    @property
    def of_weights(self) -> dict[str, Any]:
        """Those of the model on which the meaning of its weights depends; not dropout, for instance."""
        others = {f"model.{field}" for field in _OF_COMPUTATION}
        return {path: value for path, value in self.values.items() if path.startswith("model.") and path not in others}

    def resolve(self, where: str) -> tuple[str, tuple[str, ...]]:
        """Returns the model's full name, and `field=value` for each value that is not the registered model's.

        Args:
          where: what holds the hyperparameters, with which errors begin.

        Raises:
          UserError: this program does not know the model, or does not accept one of the values.
        """
        try:
            name = registry.full_name(self.model)
            own = experiment.unchecked(name)
            assignments = _differences(own, self.values)
            overrides.apply(own, assignments)
        except UserError as error:
            problem = str(error).removeprefix("--set ").removeprefix("--model=")
            raise UserError(
                f"{where}: {problem} It may come from another version of this program, or need the file of an --import."
            ) from None
        return name, assignments


def of(name: str, trained: experiment.Experiment) -> Recorded:
    """Returns the hyperparameters of an experiment; directories are absolute, to be found from elsewhere."""
    # Those of an extension may be of types that no flag can set.
    fields = (field for field in overrides.fields(trained) if isinstance(field[1], _PLAIN))
    values = {path: value for path, value in fields if path not in _OF_A_RUN or path == LAYOUT}
    return Recorded(name, values | {path: _absolute(values[path]) for path in DIRECTORIES})


def save(logdir: pathlib.Path, recorded: Recorded):
    """Writes the file of an existing log directory, unless it is the same already."""
    content = f"{json.dumps({'model': recorded.model, 'hyperparameters': dict(recorded.values)}, indent=1)}\n"
    file = logdir / FILE
    if file.exists() and file.read_bytes() == content.encode():
        return
    with output_files.atomic_path(file, sync=True) as partial:
        partial.write_text(content, encoding="utf-8")


def load(logdir: pathlib.Path) -> Recorded | None:
    """Reads the file of a log directory; None if there is none. Raises UserError if it cannot be read.

    Tokenizers below a log directory that was moved or copied are found where they are.
    """
    path = logdir / FILE
    try:
        content = json.loads(path.read_bytes())
        return Recorded(str(content["model"]), _with_own_tokenizers(dict(content["hyperparameters"]), logdir))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(
            f"{path}: expected the model and the hyperparameters that training wrote. Restore the file from a copy; or "
            f"remove it, and pass --model with the --set flags of the training."
        ) from None


def _with_own_tokenizers(values: dict[str, Any], logdir: pathlib.Path) -> dict[str, Any]:
    """Returns `values` with the tokenizers below `logdir` in the place of those below where it was."""
    recorded, own = values.get("tokenizers"), logdir / OWN_TOKENIZERS
    if not isinstance(recorded, str) or os.path.basename(recorded) != own.name or not own.is_dir():
        return values
    if os.path.isdir(recorded) and pathlib.Path(recorded).is_relative_to(logdir.absolute()):
        return values  # its own, or those of a log directory below it
    # Another log directory may have been made there meanwhile.
    are_of_logdir = not os.path.isdir(recorded) or os.path.isfile(os.path.join(os.path.dirname(recorded), FILE))
    return {**values, "tokenizers": os.path.abspath(own)} if are_of_logdir else values


def _differences(own: experiment.Experiment, values: Mapping[str, Any]) -> tuple[str, ...]:
    known = {path: overrides.text(value) for path, value in overrides.fields(own)}
    known |= {path: _absolute(known[path]) for path in DIRECTORIES}
    values = {path: value for path, value in values.items() if path not in _REMOVED or value != _REMOVED[path]}
    recorded = {path: overrides.text(value) for path, value in values.items() if path not in _OF_A_RUN}
    return tuple(f"{path}={text}" for path, text in recorded.items() if text != known.get(path))


def _absolute(directory: str) -> str:
    """Returns a directory's absolute path; an empty one, of a model without a corpus, stays empty."""
    return directory and os.path.abspath(directory)
