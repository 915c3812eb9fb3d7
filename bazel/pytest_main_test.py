"""The imports of tests that Bazel does not run are found in its files, and reported where they are missing."""

from __future__ import annotations

import pathlib

import pytest

from bazel import pytest_main

PACKAGE = """
import os
from lingvo_moe.other import borrowed, long as short

CONSTANT, (FIRST, *REST) = 1, (2, 3)

def function(argument):
    return CONSTANT + unbound

class Class:
    attribute = 1
"""


@pytest.fixture(autouse=True)
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """A tree as a target sees it: a package, a package without its `__init__`, and a directory without modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEST_SIZE", "large")
    monkeypatch.setenv("RUN_SIZE", "small")
    for name, text in {
        "lingvo_moe/__init__.py": "",
        "lingvo_moe/package/__init__.py": PACKAGE,
        "lingvo_moe/package/module.py": "VALUE = 1",
        "lingvo_moe/other/deeper/module.py": "",
        "lingvo_moe/numbers/table.txt": "1",
    }.items():
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "statement",
    [
        "import os, tensorflow.nowhere",
        "import lingvo_moe.package.module",
        "from lingvo_moe import package",
        "from lingvo_moe.package import module",
        "from lingvo_moe.package import module as renamed, CONSTANT",
        "from lingvo_moe.package.module import VALUE",
        "from lingvo_moe.package import CONSTANT, FIRST, REST",
        "from lingvo_moe.package import function, Class",
        "from lingvo_moe.package import os, borrowed, short",
        "from lingvo_moe.other import deeper",
        "from lingvo_moe.other.deeper import module",
    ],
)
def test_what_is_there_is_found(statement):
    """Modules, packages with and without `__init__`, and what a package binds itself; other packages do not matter."""
    assert _status(statement) == 0


@pytest.mark.parametrize(
    "statement, module",
    [
        ("import lingvo_moe.absent", "lingvo_moe.absent"),
        ("from lingvo_moe import absent", "lingvo_moe.absent"),
        ("from lingvo_moe.package import CONSTANT, absent", "lingvo_moe.package.absent"),
        ("def f():\n    from lingvo_moe.absent import f", "lingvo_moe.absent"),
        # Names that the package reads, or binds in another scope, are none of its own.
        ("from lingvo_moe.package import unbound", "lingvo_moe.package.unbound"),
        ("from lingvo_moe.package import attribute", "lingvo_moe.package.attribute"),
        ("from lingvo_moe.package import argument", "lingvo_moe.package.argument"),
        ("from lingvo_moe.package import long", "lingvo_moe.package.long"),
        ("from lingvo_moe import numbers", "lingvo_moe.numbers"),
    ],
)
def test_what_is_missing_is_reported_with_its_line(statement, module, capsys):
    assert _status(statement) == 1
    line = 1 + statement.count("\n")
    assert (
        capsys.readouterr().out == f"one_test.py:{line}: {module} is imported, but no dependency of the target has it\n"
    )


def _status(statement: str) -> int:
    pathlib.Path("one_test.py").write_text(statement, encoding="utf-8")
    return pytest_main.main(["one_test.py"])
