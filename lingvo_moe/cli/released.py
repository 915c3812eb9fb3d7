"""The model that `translate` and `eval` use if none is named: the released one, if this copy of the package has it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

from lingvo_moe import overrides
from lingvo_moe.cli import app
from lingvo_moe.cli.run_config import RunConfig
from lingvo_moe.errors import UserError
from lingvo_moe.inference import released

Config = TypeVar("Config", bound=RunConfig)


@contextlib.contextmanager
def by_default(config: Config) -> Iterator[Config]:
    """Yields `config`; if it names no model and no log directory, with those of the released model, if there is one.

    The log directory is temporary: to make it from the file takes a second or two. So that it is removed, SIGTERM and
    SIGHUP are as Ctrl-C meanwhile.

    Raises:
      UserError: the assignments of `config` give the model other weights than the released ones, or `config` names
        tokenizers, or the released model without a log directory.
    """
    if not applies(config):
        _check_logdir(config)
        yield config
        return
    if config.tokenizers or overrides.assigned(config.assignments, "tokenizers") is not None:
        raise UserError(
            "--tokenizers: the released model has its own; leave the flag out, or pass --model and the --logdir of a "
            "training run with these."
        )
    mesh = config.device_mesh()
    released.check(config.assignments, mesh, "--set")
    with app.terminated_as_interrupted(), released.logdir(mesh) as logdir:
        yield dataclasses.replace(
            config, model=released.MODEL, logdir=str(logdir), tokenizers=str(released.tokenizers())
        )


def applies(config: RunConfig) -> bool:
    """Whether `by_default` yields the released model."""
    return not config.model and not config.logdir and released.is_available()


def _check_logdir(config: RunConfig):
    """Raises UserError for the released model by name, whose log directory a user does not have."""
    if config.model and not config.logdir and config.full_name() == released.MODEL and released.is_available():
        raise UserError(
            f"--logdir is missing: the log directory of a training run of {released.MODEL}. For the weights that come "
            f"with the package, leave --model out."
        )
