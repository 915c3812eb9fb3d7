"""The peers' environments are the same wherever and whenever they are made."""

from __future__ import annotations

import pathlib
import re

import pytest

FILES = sorted(pathlib.Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_package_is_pinned_and_has_its_worker(file):
    packages = " ".join(line.partition("#")[0] for line in file.read_text(encoding="utf-8").splitlines()).split()
    assert packages and all(re.fullmatch(r"[\w.-]+==[\w.]+", package) for package in packages)
    assert file.with_suffix(".py").exists()
