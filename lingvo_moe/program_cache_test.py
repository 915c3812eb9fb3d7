"""A program is found again only where it is the same one; whatever is wrong with the cache, work goes on without it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import stat
from typing import Any

import pytest

from lingvo_moe import program_cache
from lingvo_moe.errors import UserError
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh

lowered: list[str] = []


@dataclasses.dataclass(frozen=True)
class Steps:
    """Notes what it lowers."""

    model: Any = Adafactor()
    optimizer: Any = Adafactor()

    @program_cache.kept
    def train(self, specs: dict) -> Program:
        lowered.append(f"train {specs}")
        return Program("train", DeviceMesh(), (), (), (), f"{self} {specs}".encode())

    @program_cache.kept
    def evaluate(self, specs: dict) -> Program:
        lowered.append(f"evaluate {specs}")
        return Program("evaluate", DeviceMesh(), (), (), (), f"{self} {specs}".encode())


@dataclasses.dataclass(frozen=True)
class OfSomebodyElse:
    """A model of which the digest of the source knows nothing."""

    __module__ = "my_models"


@pytest.fixture
def programs(tmp_path) -> pathlib.Path:
    """The directory of programs of a cache in use."""
    lowered.clear()
    program_cache.use(str(tmp_path / "cache"))
    yield tmp_path / "cache" / "programs"
    program_cache.use(program_cache.OFF)


def test_a_program_is_lowered_once(programs):
    first = Steps().train({"ids": 1})
    assert Steps().train({"ids": 1}) == first and lowered == ["train {'ids': 1}"]
    assert len(list(programs.iterdir())) == 1 and stat.S_IMODE(programs.stat().st_mode) == 0o700


def test_what_differs_in_anything_is_another_program(programs, monkeypatch):
    """The method, its arguments, a hyperparameter, or the source of this package."""
    Steps().train({"ids": 1})
    Steps().train({"ids": 2})
    Steps().evaluate({"ids": 1})
    other = Steps(optimizer=Adafactor(epsilon=1e-20)).train({"ids": 1})
    assert b"epsilon=1e-20" in other.module
    monkeypatch.setattr(program_cache, "_fingerprint", lambda: "of another version")
    Steps().train({"ids": 1})
    assert len(lowered) == 5 == len(list(programs.iterdir()))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut"])
def test_a_damaged_file_is_made_anew(programs, content):
    expected = Steps().train({})
    (path,) = programs.iterdir()
    path.write_bytes(content)
    assert Steps().train({}) == expected and len(lowered) == 2
    assert Steps().train({}) == expected and len(lowered) == 2


@pytest.mark.parametrize(
    "parts", [{"model": OfSomebodyElse()}, {"optimizer": Adafactor(learning_rate=OfSomebodyElse())}]
)
def test_what_is_of_another_package_is_not_kept(programs, parts):
    """Its source may have changed, however deep it lies."""
    Steps(**parts).train({})
    Steps(**parts).train({})
    assert len(lowered) == 2 and not list(programs.iterdir())


def test_off_keeps_nothing(programs):
    program_cache.use(program_cache.OFF)
    assert program_cache.executables() is None
    Steps().train({})
    Steps().train({})
    assert len(lowered) == 2 and not list(programs.iterdir())


def test_a_program_that_cannot_be_written_is_used_all_the_same(programs):
    programs.rmdir()
    assert Steps().train({}).name == "train"


def test_the_oldest_files_go(programs, monkeypatch):
    for number in range(4):
        Steps().train({"number": number})
    for age, path in enumerate(sorted(programs.iterdir())):
        os.utime(path, (1000 - age, 1000 - age))
    youngest = sorted(programs.iterdir())[:2]
    monkeypatch.setattr(program_cache, "_KEPT", 2)
    program_cache.use(str(programs.parent))
    assert sorted(programs.iterdir()) == youngest


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--cache=.*file/below: cannot be written to \(Not a directory\)"):
        program_cache.use(f"{tmp_path}/file/below")


def test_the_default_is_the_users_own(monkeypatch):
    monkeypatch.setenv("LINGVO_MOE_CACHE", "off")
    assert program_cache.default() == program_cache.OFF
    monkeypatch.delenv("LINGVO_MOE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert program_cache.default() == "/somewhere/lingvo_moe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert program_cache.default() == "/home/somebody/.cache/lingvo_moe"
