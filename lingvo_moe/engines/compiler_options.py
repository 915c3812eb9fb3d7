"""Options of XLA's compilers that a user names, `NAME=VALUE`, for programs that are compiled to be planned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe.errors import UserError

_FLAG = "--compiler_option"
_BOOLEANS = {"true": True, "false": False}


def parse(options: Sequence[str]) -> dict[str, str | bool]:
    """Returns options by name; `true` and `false` become booleans, as XLA's own options need them.

    Args:
      options: each `NAME=VALUE`; one that is named twice has its last value.

    Raises:
      UserError: an option has another form.
    """
    found = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not (separator and value) or not name.isidentifier():
            raise UserError(f"{_FLAG}={option}: expected NAME=VALUE, for instance xla_tpu_run_space_to_batch=false.")
        found[name] = _BOOLEANS.get(value, value)
    return found


def of_environment(variable: str, prefix: str) -> tuple[str, ...]:
    """Returns the options in an environment variable that a compiler obeys, each `NAME=VALUE`.

    Args:
      variable: `XLA_FLAGS` of XLA's CUDA compiler, or `LIBTPU_INIT_ARGS` of libtpu, which also takes `--noNAME`.
      prefix: of the names; others are left out.
    """
    flags = [flag.lstrip("-") for flag in os.environ.get(variable, "").split()]
    named = [f"{flag.removeprefix('no')}=false" if flag.startswith(f"no{prefix}") else flag for flag in flags]
    return tuple(flag if "=" in flag else f"{flag}=true" for flag in named if flag.startswith(prefix))


def merge(defaults: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Returns the defaults that no option names, then the options; each `NAME=VALUE`."""
    named = {option.partition("=")[0] for option in options}
    return (*(default for default in defaults if default.partition("=")[0] not in named), *options)


def check(options: Sequence[str], device: object, target: str):
    """Compiles an empty program with options, so that a mistake is found before the long work.

    Args:
      options: each `NAME=VALUE`.
      device: to compile for, which need not exist here.
      target: its name for the error.

    Raises:
      UserError: the device's compiler has no such option, or does not take its value.
    """
    for option, error in _refusals(options, device):
        raise UserError(
            f"{_FLAG}={option}: the compiler for {target} refuses it: {_reason(error)} The options "
            f"of TPUs start with xla_tpu_, those of GPUs with xla_gpu_."
        )


def accepted(options: Sequence[str], device: object) -> tuple[str, ...]:
    """Returns those options that the compiler for a device accepts, which need not exist here; each `NAME=VALUE`.

    Others are flags of the whole compiler, such as where it writes its dumps.
    """
    refused = {option for option, _ in _refusals(options, device)}
    return tuple(option for option in options if option not in refused)


def _refusals(options: Sequence[str], device: object) -> Iterator[tuple[str, Exception]]:
    """Yields each option with which an empty program does not compile, and the compiler's error."""
    if not options:
        return
    sharding = NamedSharding(Mesh(np.array([device]), "x"), PartitionSpec())
    argument = jax.ShapeDtypeStruct((), np.float32, sharding=sharding)
    lowered = jax.jit(lambda x: x + 1).lower(argument)
    for option in options:
        try:
            lowered.compile(compiler_options=parse([option]))
        except JaxRuntimeError as error:
            yield option, error


def _reason(error: Exception) -> str:
    """Returns the compiler's words without its error code, as a sentence."""
    return f"{str(error).partition(': ')[2].rstrip(' .:') or error}."
