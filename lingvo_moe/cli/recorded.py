"""The model and the hyperparameters that a command takes from its log directory."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import TypeVar

from absl import flags

from lingvo_moe import experiment, extensions, overrides, registry
from lingvo_moe.cli import command_flags
from lingvo_moe.cli.command_flags import CommandConfig
from lingvo_moe.cli.run_config import CorpusConfig, DiagnoseConfig, ExportConfig, RunConfig, TrainConfig
from lingvo_moe.errors import UserError
from lingvo_moe.training import hyperparameters
from lingvo_moe.utils.counts import counted

Config = TypeVar("Config", bound=CommandConfig)
_logger = logging.getLogger(__name__)
# What a new training with the weights of another has of its own: its data, and how it trains.
_OF_TRAINING = ("corpus", "optimizer", "training", hyperparameters.LAYOUT)


def read(config: type[Config], values: flags.FlagValues) -> Config:
    """Returns the configuration that parsed flags stand for, with what `by_default` adds.

    The modules of --import are imported first, as they may register the model.

    Raises:
      UserError: as `command_flags.read`, `extensions.import_module` and `by_default`.
    """
    given = command_flags.read(config, values)
    for where in given.imports:
        extensions.import_module(where)
    return by_default(given)


def by_default(config: Config) -> Config:
    """Returns `config` with the model and hyperparameters of its log directory, before those of its own flags.

    Those of a new training without --model are of the log directory that --initial_weights names, but for the corpus,
    the optimizer and the schedule.

    Raises:
      UserError: the file in the log directory cannot be used, or names a directory that is gone and that the command
        would read; or a flag is wrong, or names initial weights that do not exist.
    """
    if not isinstance(config, (RunConfig, ExportConfig)) or not config.logdir:
        return config
    file = pathlib.Path(config.logdir) / hyperparameters.FILE
    found = hyperparameters.load(file.parent)
    if found is None and isinstance(config, TrainConfig) and config.initial_weights and not config.model:
        config.check_initial_weights()
        file = pathlib.Path(config.initial_weights) / hyperparameters.FILE
        found = _of_model(hyperparameters.load(file.parent))
        if found is None:
            raise UserError(
                f"--model is missing, and --initial_weights={config.initial_weights} is no log directory with "
                f"{hyperparameters.FILE}, which has the model; pass --model."
            )
    if found is None:
        if not config.model:
            raise UserError(
                f"--model is missing, and there is no {file}: check --logdir, or pass --model and the --set flags of "
                f"the training. There is none if it ended before its first step, or if an earlier version ran it."
            )
        return config
    if config.model and registry.full_name(config.model) != found.model:
        _logger.warning(
            "--model=%s: %s has the hyperparameters of %s, which are not used.", config.model, file, found.model
        )
        return config
    name, own = found.resolve(str(file))
    own = _of_this_machine(config, own, file)
    count = len([each for each in own if _path(each) not in hyperparameters.DIRECTORIES])
    if count or not config.model:
        changed = f", with {counted(count, 'hyperparameter')} of its own" if count else ""
        _logger.info("%s: %s%s.", file, name, changed)
    assignments = (*own, *config.assignments)
    _warn_of_changes(file, name, own, assignments)
    if isinstance(config, TrainConfig):
        _warn_of_layout(found.values.get(hyperparameters.LAYOUT), name, assignments)
    return dataclasses.replace(config, model=name, assignments=assignments)


def _of_model(found: hyperparameters.Recorded | None) -> hyperparameters.Recorded | None:
    """Returns the hyperparameters without those of one training."""
    if found is None:
        return None
    return found._replace(
        values={path: value for path, value in found.values.items() if path.partition(".")[0] not in _OF_TRAINING}
    )


def _of_this_machine(
    config: RunConfig | ExportConfig, assignments: Sequence[str], file: pathlib.Path
) -> tuple[str, ...]:
    """Returns the assignments without directories that are gone.

    Raises:
      UserError: the command would read one of them, and no flag names another. The registered model's own is no
        substitute: results would be those of other texts.
    """
    kept = []
    for each in assignments:
        path, _, directory = each.partition("=")
        if path in hyperparameters.DIRECTORIES and directory and not os.path.isdir(directory):
            named = getattr(config, path, None) or overrides.assigned(config.assignments, path)
            if named is None and _reads(config, path):
                verb = "is" if path == "corpus" else "are"
                raise UserError(
                    f"{file}: the {path} of the training, {directory}, {verb} gone; pass --{path}=DIRECTORY."
                )
        else:
            kept.append(each)
    return tuple(kept)


def _reads(config: RunConfig | ExportConfig, path: str) -> bool:
    """Whether a command reads the corpus or the tokenizers; `diagnose` finds both in the batch that it is given."""
    if isinstance(config, DiagnoseConfig) and config.batch:
        return False
    return isinstance(config, RunConfig if path == "tokenizers" else CorpusConfig)


def _warn_of_changes(file: pathlib.Path, name: str, recorded: Sequence[str], assignments: Sequence[str]):
    """Warns of other hyperparameters of the model: the weights were trained with those of the file."""
    trained = dict(overrides.fields(experiment.unchecked(name, list(recorded))))
    for path, value in overrides.fields(experiment.unchecked(name, list(assignments))):
        if path.startswith("model.") and value != trained[path]:
            _logger.warning("%s is %s here; it is %s in %s.", path, *map(overrides.text, (value, trained[path])), file)


def _warn_of_layout(last: str | None, name: str, assignments: Sequence[str]):
    """Warns of another layout than that of the last run: the training may not fit into memory with it."""
    layout = experiment.unchecked(name, list(assignments)).layout
    if last is not None and last != layout:
        _logger.warning("layout is %s; the last run had %s (--set=layout=%s).", layout, last, last)


def _path(assignment: str) -> str:
    return assignment.partition("=")[0]
