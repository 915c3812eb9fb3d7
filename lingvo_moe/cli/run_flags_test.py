"""A cache that was asked for must be usable; without one that nobody asked for, work goes on. Programs are made for the engine's
platform."""

from __future__ import annotations

import types

import pytest
from absl import flags

from lingvo_moe import program_cache
from lingvo_moe.cli import run_flags
from lingvo_moe.errors import UserError


def _values(default: str, *arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("cache", default, "", flag_values=values)
    values(["train", *arguments])
    return values


@pytest.fixture(autouse=True)
def no_cache_stays():
    yield
    program_cache.use(program_cache.OFF)


def test_the_users_own_place_may_be_unusable(tmp_path, capsys):
    """A home directory that is read-only stops no training; that every program is compiled anew is told."""
    (tmp_path / "file").write_text("")
    run_flags._use_cache(_values(f"{tmp_path}/file/below"))
    assert program_cache.executables() is None
    assert f"compiled anew each time: --cache={tmp_path}/file/below: cannot be written to" in capsys.readouterr().err


def test_a_place_that_was_named_may_not(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/below: cannot be written to"):
        run_flags._use_cache(_values(str(tmp_path / "cache"), f"--cache={tmp_path}/file/below"))


def test_a_place_that_can_be_used_is(tmp_path, capsys):
    run_flags._use_cache(_values(str(tmp_path / "cache")))
    assert program_cache.executables() == tmp_path / "cache" / "executables" and not capsys.readouterr().err


@pytest.mark.parametrize(("assignments", "expected"), [((), "gpu"), (("--set=platform=tpu",), "tpu")])
def test_programs_are_made_for_the_platform_they_run_on_unless_another_is_named(monkeypatch, assignments, expected):
    values = flags.FlagValues()
    for name in ("model", "mesh"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    flags.DEFINE_multi_string("set", [], "", flag_values=values)
    flags.DEFINE_integer("devices", None, "", flag_values=values)
    values(["train", "--model=m4.Quickstart", "--devices=2", *assignments])
    engine = types.SimpleNamespace(platform="gpu", devices=[None, None])
    monkeypatch.setattr(run_flags, "_engine", lambda *_: engine)
    _, own, _ = run_flags.set_up(values, {})
    assert own.platform == own.steps.platform == own.steps._context().platform == expected
