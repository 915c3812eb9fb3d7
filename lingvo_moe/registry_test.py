"""Any unambiguous part of a name selects a model, an unknown name gets the nearest ones, and user files add models."""

from __future__ import annotations

import sys

import pytest

from lingvo_moe import experiment, extensions, registry
from lingvo_moe.errors import UserError


@pytest.fixture(autouse=True)
def isolated_registry():
    """Other tests walk over all names, so what a test registers is removed after it."""
    registry.names()  # imports the models of the repository
    with registry.MODELS.isolated():
        yield


@pytest.mark.parametrize(
    "name", ["m4.MoE2048E36L", "MoE2048E36L", "2048E36L", "MoE(2048E, 36L)", "moe2048e36l", "2048e_36l"]
)
def test_exact_partial_and_paper_names_select_the_same_model(name):
    """The paper's notation for a model selects it."""
    assert registry.full_name(name) == "m4.MoE2048E36L"


def test_exact_class_name_wins_over_longer_ones(tmp_path):
    """A model whose name is part of another's can still be selected."""
    own = tmp_path / "two_names.py"
    own.write_text(
        "from lingvo_moe import registry\n"
        "@registry.register\nclass Zebra:\n    def experiment(self): pass\n"
        "@registry.register\nclass ZebraLarge(Zebra): pass\n"
    )
    extensions.import_module(str(own))
    assert registry.full_name("zebra") == "two_names.Zebra"


def test_ambiguous_part_lists_the_matches():
    """No model is picked silently."""
    with pytest.raises(UserError, match="ambiguous: m4.MoE128E12L, m4.MoE128E36L"):
        registry.get("128E")


@pytest.mark.parametrize(
    ("name", "near"), [("quikstart", "Quickstart"), ("m4.MoE2048E36", "m4.MoE2048E36L"), ("m4.Smll", "m4.Small")]
)
def test_unknown_name_suggests_the_nearest(name, near):
    """The message corrects a typing mistake."""
    try:
        assert near in registry.full_name(name)  # an unambiguous part selects the model
    except UserError as error:
        assert "Did you mean" in str(error) and near in str(error)


def test_name_without_near_match_points_to_the_list():
    """There is a remedy even where there is no suggestion."""
    with pytest.raises(UserError, match="lingvo_moe list"):
        registry.get("???")


def test_user_file_registers_models(tmp_path):
    """A model from outside the tree is selected by module and class name like any other."""
    own = tmp_path / "my_models.py"
    own.write_text(
        "import params.m4\nfrom lingvo_moe import registry\n"
        "@registry.register\nclass Mine(params.m4.Quickstart): pass\n"
    )
    extensions.import_module(str(own))
    assert registry.full_name("my_models.Mine") == "my_models.Mine"
    assert experiment.get("Mine") == experiment.get("m4.Quickstart")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "()\nclass A(Recipe): pass",
            "expects a class: write @registry.register without \\(\\) above a subclass of Recipe",
        ),
        ("('a')\nclass A(Recipe): pass", "expects a class: write @registry.register without"),
        ("\ndef a(): pass", "expects a class"),
        ("\nclass A(Recipe): pass", "model 'mistake.A' has no experiment, .*{file}, line 3"),
        ("\nclass A: pass", "model 'mistake.A' has no experiment, "),
        (
            "\nclass A(Recipe):\n    def experiment(): pass",
            r"'mistake.A': experiment takes \(\); it is called with \(self\)",
        ),
        (
            "\nclass A(Recipe):\n    def __init__(self, n): pass\n    def experiment(self): pass",
            r"'mistake.A' takes \(n\); it is called with \(\)",
        ),
    ],
)
def test_what_is_no_recipe_is_refused_at_once(text, message, tmp_path):
    """Otherwise the command that uses it first would end with a traceback."""
    own = tmp_path / "mistake.py"
    own.write_text(
        f"from lingvo_moe import registry\nfrom lingvo_moe.experiment import Recipe\n@registry.register{text}\n"
    )
    with pytest.raises(UserError, match=f"^--import=.*{message.format(file=own)}"):
        extensions.import_module(str(own))
    assert not [name for name in registry.names() if name.startswith("mistake")]


def test_a_failing_recipe_is_named(tmp_path):
    """With its file and line, in one line: other commands and models do not depend on it."""
    failing = {
        "return 3": r"the result of experiment\(\) is an int; expected an Experiment .*, line 5\)",
        "return Experiment(modell=3)": r"TypeError: .* unexpected keyword argument 'modell' .*, line 11\)",
        "return {}['a']": r"KeyError: 'a' .*, line 15\)",
        "return TrainingSchedule(steps=0)": r"training.steps is 0; expected at least 1 .*, line 17\)",
    }
    own = tmp_path / "failing.py"
    own.write_text(
        "from lingvo_moe import registry\nfrom lingvo_moe.experiment import Experiment, Recipe\n"
        "from lingvo_moe.training_schedule import TrainingSchedule\n"
        + "".join(
            f"\n@registry.register\nclass A{number}(Recipe):\n    def experiment(self): {body}\n"
            for number, body in enumerate(failing)
        )
    )
    extensions.import_module(str(own))
    for number, message in enumerate(failing.values()):
        with pytest.raises(UserError, match=f"^model 'failing.A{number}': {message}"):
            experiment.get(f"failing.A{number}")


def test_two_classes_cannot_share_a_name():
    """A second registration does not silently replace the first."""
    kind = type("Quickstart", (), {"__module__": "elsewhere.m4", "experiment": lambda self: None})
    registry.names()
    with pytest.raises(UserError, match="model 'm4.Quickstart' is already registered; choose another name"):
        registry.register(kind)


def test_names_need_no_tensorflow():
    """Start-up stays quick: `list`, `show` and a mistyped name import no TensorFlow."""
    import subprocess

    script = (
        "import sys; from lingvo_moe import experiment, registry\n"
        "for name in registry.names(): experiment.text(name, experiment.get(name))\n"
        "sys.exit('tensorflow' in sys.modules or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
