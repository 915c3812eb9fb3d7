"""What of CUDA is on this machine: XLA's compiler for GPUs is enough to plan for them, and not enough to use one."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util


def remedy() -> str:
    """Returns the command that installs CUDA for this version of JAX."""
    return f"pip install 'jax[cuda13]=={importlib.metadata.version('jax')}'"


def has_compiler() -> bool:
    """Returns whether XLA's compiler for GPUs is installed."""
    return importlib.util.find_spec("jax_plugins") is not None and _is_installed("jax_plugins.xla_cuda13")


def has_runtime() -> bool:
    """Returns whether JAX can run programs on a GPU, if there is one."""
    return _is_installed("jax_cuda13_plugin") or _is_installed("jax_cuda12_plugin")


def has_unusable_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU that JAX cannot use, because CUDA is not installed for it."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) and not has_runtime()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
