"""Flags become typed configurations, without loss."""

from __future__ import annotations

import dataclasses

import pytest
from absl import flags

from lingvo_moe.cli import command_flags, main, run_config
from lingvo_moe.errors import UserError


def _read(config: type[command_flags.Config], *arguments: str) -> command_flags.Config:
    values = flags.FlagValues()
    command_flags.define_flags(config, values)
    values(["command", *arguments])
    return command_flags.read(config, values)


def test_defaults_are_those_of_the_dataclass(monkeypatch):
    """A configuration that is made without flags is the one of a command line without flags."""
    monkeypatch.setenv("LINGVO_MOE_CACHE", "/somewhere")
    for command in main.COMMANDS.values():
        assert _read(command.config) == command.config()
    assert _read(run_config.TrainConfig).cache == "/somewhere"


def test_values_have_their_types_and_given_names_the_flags_that_were_passed():
    config = _read(
        run_config.EvalConfig,
        "--languages=de,fr",
        "--max_pairs=3",
        "--summary",
        "--set=a=1",
        "--set=b=2",
        "--import=x.py",
    )
    assert (config.languages, config.max_pairs, config.summary) == (("de", "fr"), 3, True)
    assert (config.assignments, config.imports) == (("a=1", "b=2"), ("x.py",))
    assert config.given == {"languages", "max_pairs", "summary", "set", "import"}


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _read(run_config.TrainConfig).steps = 3


@pytest.mark.parametrize(
    ("config", "flag", "assignment"),
    [
        (run_config.TrainConfig, "--steps=5", "training.steps=9"),
        (run_config.TrainConfig, "--steps=5", "steps=9"),
        (run_config.EvalConfig, "--corpus=x", "corpus=y"),
        (run_config.TranslateConfig, "--tokenizers=x", "tokenizers=y"),
        (run_config.TranslateConfig, "--beam_size=2", "search.beam_size=4"),
    ],
)
def test_a_hyperparameter_is_given_once(config, flag, assignment):
    """One of two values would be ignored."""
    with pytest.raises(UserError, match=f"^{flag} and --set {assignment} are mutually exclusive; pass one of them"):
        _read(config, flag, f"--set={assignment}")
    assert _read(config, flag, "--set=training.log_every=5").given


def test_the_mesh_is_either_a_number_of_devices_or_a_shape():
    """`--set mesh` chooses it as `--mesh` does."""
    assert _read(run_config.TrainConfig).device_mesh() is None
    assert _read(run_config.TrainConfig, "--devices=8").device_mesh().shape == (8,)
    assert _read(run_config.TrainConfig, "--mesh=4x2").device_mesh().shape == (4, 2)
    assert _read(run_config.TrainConfig, "--set=mesh=8", "--set=mesh = 2x2").device_mesh().shape == (2, 2)
    for arguments, message in (
        (["--mesh=4x2", "--devices=8"], "--mesh=4x2 and --devices=8 are mutually exclusive; pass one of them"),
        (["--set=mesh=4x2", "--devices=8"], "--set mesh=4x2 and --devices=8 are mutually exclusive"),
        (["--devices=0"], "at least one"),
    ):
        with pytest.raises(UserError, match=message):
            _read(run_config.TrainConfig, *arguments).device_mesh()


@pytest.mark.parametrize("config", [run_config.TrainConfig, run_config.PlanConfig])
@pytest.mark.parametrize("flag, prefix", [("--mesh", "--mesh"), ("--set=mesh", "--set mesh")])
@pytest.mark.parametrize("value, remedy", [("4x", "expected the number of devices"), ("0", "give sizes >= 1, e.g. 8")])
def test_a_wrong_mesh_is_an_error_that_names_the_flag(config, flag, prefix, value, remedy):
    """A command line, or a script around it, may have many values; the shape alone does not say which one is wrong."""
    with pytest.raises(UserError, match=f"^{prefix}={value}: device mesh .*{remedy}"):
        _read(config, f"{flag}={value}").device_mesh()
