"""TensorFlow, imported at first use.

Importing TensorFlow takes seconds and hundreds of megabytes; `--help`, `list`, `show` and every error in a model's name or
fields need none of it. Modules write `from lingvo_moe.lazy import tf` and use `tf` inside functions as usual.
"""

from __future__ import annotations

import importlib
import types


class _Lazy:
    """Stands for a module and imports it at the first attribute access."""

    def __init__(self, name: str):
        self._name = name
        self._module: types.ModuleType | None = None

    def __getattr__(self, attribute: str):
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)


tf = _Lazy("tensorflow")
tf_text = _Lazy("tensorflow_text")
