"""The model that `translate` and `eval` use if none is named: that of `released` in this package, if it is there.

The directory has `weights.safetensors`, in int8 as `checkpoint convert --dtype=int8` writes it, and `tokenizers`, whose
models may be compressed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TypeVar

from lingvo_moe import experiment, overrides, tree
from lingvo_moe.cli import app
from lingvo_moe.cli.run_config import RunConfig
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Spec
from lingvo_moe.steps import weight_specs

Config = TypeVar("Config", bound=RunConfig)
MODEL = "m4.Pocket"
DIRECTORY = pathlib.Path(__file__).parent.parent / "released"
_WEIGHTS = "weights.safetensors"


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
    changed, specs = (_specs(assignments, mesh) for assignments in (config.assignments, ()))
    if path := next((path for path in sorted(changed | specs) if changed.get(path) != specs.get(path)), None):
        raise UserError(
            f"--set: the released weights are of {MODEL} as it is; with these settings its weight {path} differs. "
            f"Leave them out, or pass --model and the --logdir of a training run with them."
        )
    # Slow to import; a mistake in --set is reported before.
    from lingvo_moe.engines import pjrt
    from lingvo_moe.training import checkpoint_tools

    if mesh:
        pjrt.request_cpu_devices(mesh.size)  # writing the log directory starts JAX
    file = DIRECTORY / _WEIGHTS
    with app.terminated_as_interrupted(), checkpoint_tools.as_logdir(file, MODEL, tree.unflatten(specs)) as logdir:
        yield dataclasses.replace(config, model=MODEL, logdir=str(logdir), tokenizers=str(DIRECTORY / "tokenizers"))


def applies(config: RunConfig) -> bool:
    """Whether `by_default` yields the released model."""
    return not config.model and not config.logdir and _is_there()


def _is_there() -> bool:
    return (DIRECTORY / _WEIGHTS).is_file()


def _check_logdir(config: RunConfig):
    """Raises UserError for the released model by name, whose log directory a user does not have."""
    if config.model and not config.logdir and config.full_name() == MODEL and _is_there():
        raise UserError(
            f"--logdir is missing: the log directory of a training run of {MODEL}. For the weights that come with the "
            "package, leave --model out."
        )


def _specs(assignments: tuple[str, ...], mesh: DeviceMesh | None) -> dict[str, Spec]:
    """Returns the shape and dtype of each weight of the released model with some settings, by path."""
    return tree.flatten(weight_specs(experiment.get(MODEL, assignments, mesh).model.weights()))
