"""Plan knows the models of this repository, and predicts layouts without compiling."""

from __future__ import annotations

import pytest

from lingvo_moe import registry
from lingvo_moe.cli import main

pytestmark = pytest.mark.slow


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", *arguments])


def test_a_model_of_another_class_is_shown_and_not_planned(capsys, tmp_path):
    """A class of one's own needs what the protocol lists, and no base class; a plan knows our models only."""
    (tmp_path / "unigrams.py").write_text(
        "import dataclasses\n"
        "from lingvo_moe import registry\n"
        "from lingvo_moe.data.batching import InputConfig\n"
        "from lingvo_moe.experiment import Experiment, Recipe\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Unigram:\n"
        "    target_vocabulary: int = 8\n"
        "    sides, vocabularies = ('target',), {'target': 8}\n"
        "    num_layers, num_experts, pipeline, stages, microbatches = 1, 0, 'none', 1, 1\n"
        "    def weights(self): return {}\n"
        "    def loss(self, theta, batch, context): ...\n"
        "    def num_weights(self): return 8\n"
        "    def positions_of(self, path, lengths): return 1\n"
        "    def settings_of_layers(self, field): return []\n"
        "@registry.register\n"
        "class Uni(Recipe):\n"
        "    def experiment(self):\n"
        "        return Experiment(model=Unigram(), input=InputConfig(source_length=0))\n"
    )
    registry.names()  # imports the models of the repository
    with registry.MODELS.isolated():
        assert _run("show", "unigrams.Uni", f"--import={tmp_path}/unigrams.py") == 0
        assert capsys.readouterr().out.startswith("unigrams.Uni: 8 weights\nmodel.target_vocabulary = 8\n")
        assert _run("plan", "unigrams.Uni", f"--import={tmp_path}/unigrams.py") == 2
        assert "plan counts the work of a Transformer or UNet; unigrams.Uni is a Unigram" in capsys.readouterr().err


def test_plan_predicts_layouts_without_compiling(capsys):
    """`--top=0` prints the best and the model's own, and their reasons; given settings stay."""
    arguments = ("--topology=v3:2x2x1", "--mesh=4x2", "--set=model.remat=full", "--set=model.pipeline=none")
    assert _run("plan", "dense_lm.Small", "--search=layout", "--top=0", *arguments) == 0
    printed = capsys.readouterr().out
    assert "legal layouts; " in printed and "self_attention" in printed and "\nown " in printed
    assert "--set=layout=" in printed and "mesh=" not in printed and "remat=" not in printed


@pytest.mark.parametrize("flag", ["--price_per_hour=2.5", "--tokens=1e+12"])
def test_a_search_that_compiles_nothing_has_no_cost(flag, capsys):
    """Predictions have no cost of training: the flag would do nothing, without a word."""
    assert _run("plan", "dense_lm.Small", "--search=layout", "--top=0", "--topology=v3:2x2x1", flag) == 2
    assert f"error: {flag} is for the cost of a compiled plan, and --top=0 compiles nothing" in capsys.readouterr().err
