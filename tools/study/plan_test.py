"""Protects the file that describes a study: the one of the repository fits its models, and mistakes are named."""

from __future__ import annotations

import pathlib

import pytest

from lingvo_moe.errors import UserError
from tools.study import plan
from tools.study.trial import Trial

_M4 = pathlib.Path(__file__).with_name("m4.toml")
_SMALL = """
model = "m4.Quickstart"
vocabulary = 8000
[languages]
de = 0
fr = 100
[[baselines]]
language = "fr"
set = ["model.residual_dropout=0.1"]
[[models]]
name = "16 experts"
seeds = [0, 3]
"""


def _load(directory: pathlib.Path, text: str) -> plan.Study:
    (directory / "study.toml").write_text(text, encoding="utf-8")
    return plan.load(directory / "study.toml")


def test_models_of_the_repository_s_study_are_those_of_the_paper():
    """Each is a valid experiment; expert counts, depth, baselines and seeds are what docs/study.md promises."""
    study = plan.load(_M4)
    models = {run.name: Trial(study, run, pathlib.Path("x")).experiment().model for run in study.runs}
    assert [models[name].num_experts for name in ("dense", "4_experts", "16_experts", "64_experts")] == [0, 4, 16, 64]
    deep, usual = models["16_experts_twice_the_depth"], models["16_experts"]
    assert (deep.num_layers, deep.num_experts) == (2 * usual.num_layers, usual.num_experts)
    assert {"16_experts_seed1", "16_experts_seed2", "dense_seed1", "dense_seed2"} <= set(models)
    # 0.01 E^2: a weight of 1 in perfect balance, whatever the number of experts.
    assert all(m.aux_loss_weight == pytest.approx(0.01 * m.num_experts**2) for m in models.values() if m.num_experts)
    limits = [study.languages[run.language] for run in study.baselines]
    assert sorted(limits) == [0, 0, 2000, 2000, 20_000, 20_000]
    assert all(models[run.name].num_experts == 0 for run in study.baselines)
    # The less data, the less time, as docs/study.md says.
    by_size = sorted(study.baselines, key=lambda run: study.languages[run.language] or 1e9)
    assert [run.share for run in by_size] == [0.05, 0.05, 0.25, 0.25, 1.0, 1.0]


def test_the_learning_rate_is_constant():
    """0.02 for longer than any run of an hour, so that models with quicker steps have no other schedule."""
    study = plan.load(_M4)
    rates = [Trial(study, run, pathlib.Path("x")).experiment().optimizer.learning_rate for run in study.runs]
    assert {rate.peak_value for rate in rates} == {0.02}
    assert min(rate.decay_after for rate in rates) >= 1_000_000
    assert {rate.cooldown_steps for rate in rates} == {0}


def test_runs_come_with_one_of_each_model_first(tmp_path):
    """So that a study that ends early has the whole picture, without its second seeds."""
    study = _load(tmp_path, _SMALL)
    assert [run.name for run in study.runs] == ["bilingual_fr", "16_experts", "16_experts_seed3"]
    assert study.runs[0].assignments == ("model.num_experts=0", "model.residual_dropout=0.1")
    assert dict(study.languages) == {"de": 0, "fr": 100} and study.max_pairs == 100 and study.losses == ()


def test_losses_fall(tmp_path):
    assert _load(tmp_path, f"losses = [3, 4.5]\n{_SMALL}").losses == (4.5, 3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("vocabulary = 8000", "", "`vocabulary` is missing"),
        ("vocabulary = 8000", "vocabulary = '8000'", "vocabulary is '8000'; expected a whole number"),
        ("vocabulary = 8000", "vocabulary = true", "vocabulary is True; expected a whole number"),
        ("vocabulary = 8000", "vocabulary = 8000\nmax_pair = 3", "`max_pair` is unknown. Did you mean max_pairs"),
        ("fr = 100", "fr = 'all'", "languages: fr is 'all'; expected a whole number"),
        ('language = "fr"', 'language = "fr"\nshare = 0', "share is 0; expected a number above 0, and at most 1"),
        ('language = "fr"', 'language = "fr"\nshare = 1.5', "baselines: share is 1.5; expected a number above 0"),
        ('language = "fr"', 'language = "it"', "baselines: it is not among the study's languages"),
        ("seeds = [0, 3]", "seeds = [3, 3]", "two runs are named 16_experts_seed3"),
        ("seeds = [0, 3]", "seed = [0, 3]", "models: `seed` is unknown. Did you mean seeds"),
        ('name = "16 experts"', 'name = "--"', "a model's name is empty"),
        ('[[models]]\nname = "16 experts"\nseeds = [0, 3]', "models = []", "expected one language and one of `models`"),
        ("[languages]", "[languages", "not TOML"),
        ("vocabulary = 8000", "vocabulary = 0", "vocabulary is 0; expected 1 or more"),
        ("vocabulary = 8000", "vocabulary = 8000\nmax_pairs = 0", "max_pairs is 0; expected 1 or more"),
        (
            "vocabulary = 8000",
            "vocabulary = 8000\nlosses = [3, nan]",
            "losses: an item is nan; expected a finite number",
        ),
        ("fr = 100", "fr = -1", "languages: fr is -1; expected 0 or more"),
        ("seeds = [0, 3]", "seeds = []", "models: seeds is empty; expected a seed for each run"),
        ("seeds = [0, 3]", "seeds = [0, -3]", "models: seeds: an item is -3; expected 0 or more"),
    ],
)
def test_mistakes_are_named(old, new, message, tmp_path):
    assert old in _SMALL
    text = _SMALL.replace(old, new) if "models = []" not in new else f"{new}\n{_SMALL.replace(old, '')}"
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        _load(tmp_path, text)


def test_a_name_that_no_run_has_is_an_error(tmp_path):
    study = _load(tmp_path, _SMALL)
    plan.check_names(study, ["16_experts_seed3", "bilingual_fr"])
    message = "no run is named '16_expert'; known: bilingual_fr, 16_experts.* Did you mean 16_experts"
    with pytest.raises(UserError, match=message):
        plan.check_names(study, ["bilingual_fr", "16_expert"])
