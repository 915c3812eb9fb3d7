"""Imports the named modules, for `bazel test`: each finds what it imports only among its package's declared dependencies."""

from __future__ import annotations

import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
