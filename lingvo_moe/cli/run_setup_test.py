"""What a command runs follows its flags: the program cache, the engine, and the platform that programs are made for."""

from __future__ import annotations

import types

import pytest
from absl import flags

from lingvo_moe import program_cache
from lingvo_moe.cli import command_flags, run_config, run_setup
from lingvo_moe.engines import registry as engines
from lingvo_moe.errors import UserError
from lingvo_moe.testing.fake_engine import FakeEngine


def _config(*arguments: str) -> run_config.TrainConfig:
    values = flags.FlagValues()
    command_flags.define_flags(run_config.TrainConfig, values)
    values(["train", *arguments])
    return command_flags.read(run_config.TrainConfig, values)


@pytest.fixture(autouse=True)
def cache_is_off_afterwards():
    yield
    program_cache.use(program_cache.OFF)


def test_the_default_cache_directory_may_be_unusable(tmp_path, monkeypatch, caplog):
    """A read-only home directory does not prevent training; a warning says that programs are recompiled."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LINGVO_MOE_CACHE", f"{tmp_path}/file/below")
    run_setup._use_cache(_config())
    assert program_cache.executables() is None
    assert f"recompiled in each run: --cache={tmp_path}/file/below: cannot be written to" in caplog.text


def test_a_named_cache_directory_must_be_usable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/below: cannot be written to"):
        run_setup._use_cache(_config(f"--cache={tmp_path}/file/below"))


def test_a_usable_cache_directory_is_used(tmp_path, caplog):
    run_setup._use_cache(_config(f"--cache={tmp_path / 'cache'}"))
    assert program_cache.executables() == tmp_path / "cache" / "executables" and not caplog.records


@pytest.mark.parametrize(("assignments", "expected"), [((), "gpu"), (("--set=platform=tpu",), "tpu")])
def test_programs_are_made_for_the_engines_platform_unless_another_is_set(monkeypatch, assignments, expected):
    engine = types.SimpleNamespace(platform="gpu", devices=[None, None])
    monkeypatch.setattr(run_setup, "_make_engine", lambda *_: engine)
    config = _config("--model=m4.Quickstart", "--devices=2", *assignments)
    _, experiment, _ = run_setup.set_up(config, "train", {})
    assert experiment.platform == experiment.steps.platform == expected


@pytest.mark.parametrize(("flag", "mesh"), [("--set=mesh=2x2", (2, 2)), ("--mesh=2x2", (2, 2)), (None, (8,))])
def test_a_mesh_that_the_user_names_is_kept_on_more_accelerators(flag, mesh):
    """All of them are taken if the user names none."""
    config = _config("--model=m4.Small", "--engine=mine", *filter(None, [flag]))
    with engines.ENGINES.isolated():
        engines.register_engine("mine")(
            lambda options: FakeEngine(8 if options.all_accelerators else options.num_devices)
        )
        _, experiment, engine = run_setup.set_up(config, "train", {})
    assert experiment.mesh.shape == mesh and len(engine.devices) == experiment.mesh.size


def test_an_engine_is_found_by_its_name_and_given_the_flags():
    """An engine of `--import` needs no change of the command line; it receives every flag that concerns engines."""
    asked, engine = [], FakeEngine(2)
    config = _config(
        "--model=m4.Quickstart", "--engine=mine", "--devices=2", "--platform=cpu", "--tpu=x", "--cache=off"
    )
    with engines.ENGINES.isolated():
        engines.register_engine("mine")(lambda options: asked.append(options) or engine)
        assert run_setup.set_up(config, "evaluate", {})[2] is engine
    assert asked == [engines.EngineOptions(purpose="evaluate", num_devices=2, platform="cpu", tpu="x")]


def test_an_unknown_engine_is_named():
    with pytest.raises(UserError, match="engine 'pjtr' is unknown. Did you mean pjrt"):
        run_setup.configure(_config("--model=m4.Quickstart", "--engine=pjtr"), {})
