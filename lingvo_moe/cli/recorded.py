"""The model and the hyperparameters that a command takes from its log directory."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import TypeVar

from lingvo_moe import experiment, overrides, registry
from lingvo_moe.cli.run_config import CommandConfig, RunConfig
from lingvo_moe.errors import UserError
from lingvo_moe.training import hyperparameters

Config = TypeVar("Config", bound=CommandConfig)
_log = logging.getLogger(__name__)


def by_default(config: Config) -> Config:
    """Returns `config` with the model and hyperparameters of its log directory, before those of its own flags.

    Raises:
      UserError: the file in the log directory cannot be used, or a flag is wrong.
    """
    if not isinstance(config, RunConfig) or not config.logdir:
        return config
    found = hyperparameters.load(pathlib.Path(config.logdir))
    file = pathlib.Path(config.logdir) / hyperparameters.FILE
    if found is None:
        if not config.model:
            raise UserError(
                f"--model is missing, and there is no {file}: check --logdir, or pass --model, with the --set flags of "
                f"the training if an earlier version made this directory."
            )
        return config
    name = registry.full_name(config.model) if config.model else found.model
    if name != found.model:
        _log.warning("--model=%s: %s has the hyperparameters of %s, which are not used.", name, file, found.model)
        return config
    if found.assignments or not config.model:
        own = len(found.assignments)
        _log.info("%s: %s, of which training changed %d hyperparameter%s.", file, name, own, "" if own == 1 else "s")
    assignments = (*found.assignments, *config.assignments)
    _warn_of_changes(file, name, found.assignments, assignments)
    return dataclasses.replace(config, model=name, assignments=assignments)


def _warn_of_changes(file: pathlib.Path, name: str, recorded: tuple[str, ...], assignments: tuple[str, ...]):
    """Warns of other hyperparameters of the model: the weights were trained with those of the file."""
    trained = dict(overrides.fields(experiment.unchecked(name, recorded)))
    for path, value in overrides.fields(experiment.unchecked(name, assignments)):
        if path.startswith("model.") and value != trained[path]:
            _log.warning("%s is %s here; it is %s in %s.", path, *map(overrides.text, (value, trained[path])), file)
