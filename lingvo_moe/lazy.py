"""TensorFlow, imported at first use.

Importing TensorFlow takes seconds and hundreds of megabytes; `--help`, `list`, `show` and every error in a model's name or
fields need none of it. Modules write `from lingvo_moe.lazy import tf` and use `tf` inside functions as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING


class _Lazy:
    """Stands for a module and imports it at the first attribute access."""

    def __init__(self, name: str, prepare: Callable[[types.ModuleType], None] = lambda module: None):
        self._name, self._prepare = name, prepare
        self._module: types.ModuleType | None = None

    def __getattr__(self, attribute: str):
        if self._module is None:
            with _quiet():
                module = importlib.import_module(self._name)
                self._prepare(module)
            self._module = module
        return getattr(self._module, attribute)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what C++ writes to standard error, unless the import fails.

    TensorFlow reports on CPU features and absent GPUs before any of its log settings holds; that would break progress bars and
    says nothing about the program, which runs on PJRT.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(kept, said.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _leave_gpus_to_jax(tensorflow: types.ModuleType):
    """TensorFlow traces and reads data here; the memory of a GPU, which it would take whole, is for the programs."""
    tensorflow.config.set_visible_devices([], "GPU")


if TYPE_CHECKING:
    import tensorflow as tf
    import tensorflow_text as tf_text
else:
    tf = _Lazy("tensorflow", _leave_gpus_to_jax)
    tf_text = _Lazy("tensorflow_text")
