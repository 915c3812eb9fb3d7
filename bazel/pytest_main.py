"""Runs one test file with pytest, for `bazel test`: `pytest_main.py FILE [ARGUMENT...]`.

Further arguments come from `bazel test --test_arg=...`. If RUN_SIZE is set, a test of another size is not run: it is
only checked that every module of this repository that it imports is there, which is what its target declares. Of the
tests that run, a file without one fails.
"""

from __future__ import annotations

import ast
import os
import pathlib
import symtable
import sys
from collections.abc import Iterator

_PACKAGES = ("lingvo_moe", "params", "tools")


def main(arguments: list[str]) -> int:
    """Returns the exit status: pytest's, or 1 if an import is not declared."""
    size = os.environ["TEST_SIZE"]
    if os.environ.get("RUN_SIZE", size) == size:
        return _run(arguments)
    missing = [
        f"{file}:{line}: {module} is imported, but no dependency of the target has it"
        for file in arguments
        if file.endswith("_test.py")
        for module, line in _modules(pathlib.Path(file))
        if not _exists(module)
    ]
    print("\n".join(missing) or "every import is declared")
    return 1 if missing else 0


def _run(arguments: list[str]) -> int:
    import pytest  # takes longer than the check

    return pytest.main(
        [
            "--config-file=pytest.ini",
            "-p",
            "no:cacheprovider",  # each test runs once, in a directory of its own
            f"--basetemp={os.environ['TEST_TMPDIR']}/pytest",
            *arguments,
        ]
    )


def _modules(file: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Yields the modules of this repository that a file imports anywhere in it, and the lines."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *_modules_from(node.module, [alias.name for alias in node.names])]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.partition(".")[0] in _PACKAGES)


def _modules_from(module: str, names: list[str]) -> list[str]:
    """Returns which names that are imported from a module are modules themselves: of a package, those not set in it."""
    path = _path(module)
    if path.with_suffix(".py").exists() or not path.is_dir():
        return []
    package = path / "__init__.py"
    own = _bound(package) if package.exists() else set()
    return [f"{module}.{name}" for name in names if name not in own]


def _bound(file: pathlib.Path) -> set[str]:
    """Returns the names that a module binds itself: variables, functions, classes and imports."""
    symbols = symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _exists(module: str) -> bool:
    """Whether a module is there; a package is a directory with modules, of which `__init__` may be missing."""
    path = _path(module)
    return path.with_suffix(".py").exists() or any(path.rglob("*.py"))


def _path(module: str) -> pathlib.Path:
    return pathlib.Path(*module.split("."))


def _parsed(file: pathlib.Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
