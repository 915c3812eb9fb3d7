"""TensorFlow, imported at first use.

Importing TensorFlow takes seconds and hundreds of megabytes, and `--help`, `list`, `show` and every error in a model's
name or fields need none of it. Modules write `from lingvo_moe.lazy import tf` and use `tf` inside functions as usual.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module and imports it at the first access to an attribute."""

    def __init__(self, name: str):
        self._name = name
        self._module: types.ModuleType | None = None
        self._importing: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self._imported: Callable[[types.ModuleType], None] | None = None

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._load(), attribute)

    def _load(self) -> types.ModuleType:
        if self._module is None:
            with self._importing():
                module = importlib.import_module(self._name)
                if self._imported:
                    self._imported(module)
            self._module = module
        return self._module

    def configure_import(
        self,
        importing: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        imported: Callable[[types.ModuleType], None] | None = None,
    ):
        """Sets the context that the import runs in, and what is called with the module right after it."""
        self._importing, self._imported = importing, imported


# Another thread than the importing one holds it while it writes to file descriptor 2, or its lines might be discarded.
STDERR = threading.RLock()
_TENSORFLOW, _TENSORFLOW_TEXT = LazyModule("tensorflow"), LazyModule("tensorflow_text")
if TYPE_CHECKING:
    import tensorflow as tf
    import tensorflow_text as tf_text
else:
    tf, tf_text = _TENSORFLOW, _TENSORFLOW_TEXT


def configure_tensorflow():
    """Makes the import of TensorFlow silent and faster, and hides GPUs; the command line calls this at its start.

    TensorFlow traces and reads data here, and programs run through JAX, which needs the GPUs' memory. The settings
    concern the whole process, so importing this module makes none: file descriptor 2 is redirected while TensorFlow is
    imported, and Keras cannot be imported; TensorFlow Text, which has layers of Keras, does import it.
    """
    _TENSORFLOW.configure_import(_importing_without_keras, _hide_gpus)
    _TENSORFLOW_TEXT.configure_import(_importing)


def import_tensorflow():
    """Imports TensorFlow now, where a silent file descriptor 2 at the first use would hide what must be seen."""
    for module in (_TENSORFLOW, _TENSORFLOW_TEXT):
        module._load()


@contextlib.contextmanager
def deferred_stderr() -> Iterator[None]:
    """Discards what is written to file descriptor 2 inside the block, unless the block raises.

    TensorFlow's C++ code reports CPU features and absent GPUs before any of its log settings applies. Such lines break
    progress bars and say nothing about the program, which runs on PJRT. Where the import fails they are written after
    all. The block holds `STDERR`.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with STDERR, tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        except BaseException:
            output.seek(0)
            os.write(stderr, output.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    with deferred_stderr(), _without_collecting():
        yield


@contextlib.contextmanager
def _importing_without_keras() -> Iterator[None]:
    with _importing(), _without_keras():
        yield


@contextlib.contextmanager
def _without_keras() -> Iterator[None]:
    """Makes Keras absent inside the block, which TensorFlow allows; `tf.keras` still imports it when it is used.

    Otherwise TensorFlow imports Keras, and Keras imports Matplotlib, for optimizers in saved models, which are not used
    here. It takes a fifth of the time of the import.
    """
    if "keras" in sys.modules:
        yield
        return
    sys.modules["keras"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["keras"]


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Saves a tenth of the time of an import: Python would look for garbage among objects of which hardly any is."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _hide_gpus(tensorflow: types.ModuleType):
    tensorflow.config.set_visible_devices([], "GPU")
