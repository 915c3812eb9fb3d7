"""The profiler's trace of some training steps, for tools that train without TensorFlow: XProf and Perfetto read it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import jax

from lingvo_moe.errors import UserError

_STEPS = 2


def prepare(directory: pathlib.Path):
    """Makes the directory of --trace before anything is measured, so that no figures are lost; or raises UserError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trace={directory}: this directory cannot be made ({error.strerror}).") from None


def trace(directory: pathlib.Path, step: Callable[[], object]):
    """Writes the trace of two calls of `step`, which returns when its step has been computed."""
    with jax.profiler.trace(directory):
        for _ in range(_STEPS):
            step()
