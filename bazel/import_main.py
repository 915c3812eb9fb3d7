"""Imports the named modules, for `bazel test`: each finds only what its package declares that it depends on."""

from __future__ import annotations

import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
