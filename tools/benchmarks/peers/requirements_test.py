"""Tests that the peers' environments are reproducible."""

from __future__ import annotations

import pathlib
import re

import pytest

FILES = sorted(pathlib.Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_package_is_pinned(file):
    """Every requirement names a version, and every file of requirements has a worker."""
    packages = " ".join(line.partition("#")[0] for line in file.read_text(encoding="utf-8").splitlines()).split()
    assert packages and all(re.fullmatch(r"[\w.-]+==[\w.]+", package) for package in packages)
    assert file.with_suffix(".py").exists()
