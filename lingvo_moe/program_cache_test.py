"""A cached program is used only for equal inputs and code, and a cache that fails is not an error."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

import pytest

from lingvo_moe import program_cache
from lingvo_moe.errors import UserError
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import processor

lowered: list[str] = []


@dataclasses.dataclass(frozen=True)
class Steps:
    """Records what it lowers."""

    model: Any = Adafactor()
    optimizer: Any = Adafactor()

    @program_cache.cached
    def train(self, specs: dict) -> Program:
        lowered.append(f"train {specs}")
        return Program("train", DeviceMesh(), (), (), (), f"{self} {specs}".encode())

    @program_cache.cached
    def evaluate(self, specs: dict) -> Program:
        lowered.append(f"evaluate {specs}")
        return Program("evaluate", DeviceMesh(), (), (), (), f"{self} {specs}".encode())


@dataclasses.dataclass(frozen=True)
class UserCode:
    """Code that the digest of this package does not cover."""

    __module__ = "my_models"


@pytest.fixture
def programs(tmp_path) -> Iterator[pathlib.Path]:
    """Turns the cache on; its directory of programs."""
    lowered.clear()
    program_cache.use(str(tmp_path / "cache"))
    yield tmp_path / "cache" / "programs"
    program_cache.use(program_cache.OFF)


def test_program_is_lowered_once(programs):
    """The second time it comes from the cache, which other users cannot read."""
    first = Steps().train({"ids": 1})
    assert Steps().train({"ids": 1}) == first and lowered == ["train {'ids': 1}"]
    assert len(list(programs.iterdir())) == 1 and stat.S_IMODE(programs.stat().st_mode) == 0o700


def test_key_contains_all_that_a_program_depends_on(programs, monkeypatch):
    """The method, its arguments, a hyperparameter, the processor's instructions, and the source of this package."""
    Steps().train({"ids": 1})
    Steps().train({"ids": 2})
    Steps().evaluate({"ids": 1})
    other = Steps(optimizer=Adafactor(epsilon=1e-20)).train({"ids": 1})
    assert b"epsilon=1e-20" in other.module
    for has_instructions in (False, True):
        monkeypatch.setattr(processor, "multiplies_bfloat16", lambda found=has_instructions: found)
        Steps().train({"ids": 3})
    monkeypatch.setattr(program_cache, "_fingerprint", lambda: "another version")
    Steps().train({"ids": 1})
    assert len(lowered) == 7 == len(list(programs.iterdir()))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 truncated"])
def test_corrupt_file_is_replaced(programs, content):
    """A program is lowered again where the file is corrupt."""
    expected = Steps().train({})
    (path,) = programs.iterdir()
    path.write_bytes(content)
    assert Steps().train({}) == expected and len(lowered) == 2
    assert Steps().train({}) == expected and len(lowered) == 2


@pytest.mark.parametrize("parts", [{"model": UserCode()}, {"optimizer": Steps(optimizer=UserCode())}])
def test_program_with_user_code_is_not_cached(programs, parts):
    """User code may have changed, however deep in the configuration it is."""
    Steps(**parts).train({})
    Steps(**parts).train({})
    assert len(lowered) == 2 and not list(programs.iterdir())


def test_off_caches_nothing(programs):
    """`--cache=off`."""
    program_cache.use(program_cache.OFF)
    assert program_cache.executables() is None
    Steps().train({})
    Steps().train({})
    assert len(lowered) == 2 and not list(programs.iterdir())


def test_program_that_cannot_be_cached_is_used(programs):
    """A failed write does not end a run."""
    programs.rmdir()
    assert Steps().train({}).name == "train"


def test_oldest_files_are_deleted(programs, monkeypatch):
    """The cache does not grow without bound."""
    for number in range(4):
        Steps().train({"number": number})
    for age, path in enumerate(sorted(programs.iterdir())):
        os.utime(path, (1000 - age, 1000 - age))
    youngest = sorted(programs.iterdir())[:2]
    monkeypatch.setattr(program_cache, "_MAX_FILES", 2)
    program_cache.use(str(programs.parent))
    assert sorted(programs.iterdir()) == youngest


def test_no_file_of_the_user_is_deleted(programs, monkeypatch):
    """`--cache` may name a directory of theirs, which may have files where the cache has its own."""
    monkeypatch.setattr(program_cache, "_MAX_FILES", 1)
    executables = programs.parent / "executables" / "0123456789abcdef"
    own = [
        programs / ("0" * 64),
        programs / ("2" * 64),
        executables / f"jit_call-{'1' * 64}-cache",
        executables / f"jit_call-{'1' * 64}-atime",
    ]
    users = [programs / "thesis.tex", programs / "below" / ("0" * 64), executables / "notes", programs.parent / "a"]
    for path in (*own, *users):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    program_cache.use(str(programs.parent))
    assert sum(path.exists() for path in own) == 2 and all(path.exists() for path in users)


def test_unwritable_directory_is_an_error(tmp_path):
    """The message names the flag, the path and the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--cache=.*file/below: cannot be written to \(Not a directory\)"):
        program_cache.use(f"{tmp_path}/file/below")


def test_default_directory_is_the_users(monkeypatch):
    """The environment variable comes first, then the XDG base directory specification."""
    monkeypatch.setenv("LINGVO_MOE_CACHE", "off")
    assert program_cache.default() == program_cache.OFF
    monkeypatch.delenv("LINGVO_MOE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert program_cache.default() == "/somewhere/lingvo_moe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert program_cache.default() == "/home/somebody/.cache/lingvo_moe"
