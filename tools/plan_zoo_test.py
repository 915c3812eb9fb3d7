"""The plans of the zoo are of models that exist, with settings that they take; each is made by the command that is printed."""

from __future__ import annotations

import subprocess

import pytest

from lingvo_moe import experiment
from lingvo_moe.cli import app
from tools import plan_zoo


@pytest.mark.parametrize("name", plan_zoo.plans())
def test_every_plan_is_of_a_model_with_these_settings(name):
    model, changes = plan_zoo.plans()[name]
    assert experiment.get(model, changes).mesh.size >= 32 and name.startswith(model)


def test_variants_of_reading_and_of_tokens_per_core_are_what_they_say():
    """Twice the sentences are the batch on each side; as many tokens per core are the same policy, and the same capacity in all."""
    plans = plan_zoo.plans()
    for row, batch_tokens in (("m4.MoE128E12L", 2**20), ("m4.MoE512E36L", 2**20), ("m4.MoE2048E36L", 2**22)):
        own, other = (experiment.get(*plans[name]).input for name in (row, f"{row}.each_side"))
        assert own.tokens == batch_tokens and other.batch_size * other.target_length == batch_tokens
    few, many = (experiment.get(*plans[name]) for name in ("m4.MoE128E36L.tokens_per_core", "m4.MoE2048E36L.each_side"))
    assert (
        few.input.tokens / few.mesh.size == many.input.tokens / many.mesh.size and few.model.remat == many.model.remat
    )


def run(monkeypatch, directory, *arguments) -> tuple[int, list]:
    """(exit status, commands that were run); a command writes its file, and one for a dense model fails."""
    commands = []

    def call(command, **options):
        commands.append(command)
        path = command[-1].removeprefix("--json=")
        failed = "Dense" in path
        if not failed:
            open(path, "w").close()
        return subprocess.CompletedProcess(command, int(failed))

    monkeypatch.setattr(plan_zoo, "DIRECTORY", directory)
    monkeypatch.setattr(subprocess, "run", call)
    return app.execute(plan_zoo.main, ["plan_zoo", *arguments], plan_zoo._VALUES), commands


def test_what_is_there_is_left_alone(monkeypatch, tmp_path):
    assert [len(run(monkeypatch, tmp_path, "--only=sparse_lm")[1]) for _ in range(2)] == [4, 0]
    assert len(run(monkeypatch, tmp_path, "--only=sparse_lm", "--again")[1]) == 4


def test_a_failure_is_named_and_keeps_no_other_from_being_made(monkeypatch, tmp_path, capsys):
    status, commands = run(monkeypatch, tmp_path, "--only=m4")
    assert status == 2 and "no plan could be made of m4.Dense96L;" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == len(commands) - 1


def test_a_name_that_is_none_is_told_with_those_that_are(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "--only=m5")[0] == 2
    assert "--only=m5: no plan's name begins so; the names are dense_lm.Dense128B" in capsys.readouterr().err
