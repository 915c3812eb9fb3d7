"""Models are found by any unambiguous part of their name, misses name the nearest, and one's own modules can be added."""

from __future__ import annotations

import sys

import pytest

from lingvo_moe import experiment, registry
from lingvo_moe.errors import UserError


@pytest.fixture(autouse=True)
def only_the_zoo_stays():
    """What a test registers is gone after it: other tests walk over all names."""
    registry.names()
    before = dict(registry._classes)
    yield
    registry._classes.clear()
    registry._classes.update(before)


@pytest.mark.parametrize(
    "name", ["m4.MoE2048E36L", "MoE2048E36L", "2048E36L", "MoE(2048E, 36L)", "moe2048e36l", "2048e_36l"]
)
def test_exact_partial_and_paper_names_find_the_same_model(name):
    """The paper's way of writing a model is a way of selecting it."""
    assert registry.full_name(name) == "m4.MoE2048E36L"


def test_an_exact_class_name_wins_over_longer_ones(tmp_path):
    """A model whose name is a part of another's can still be selected."""
    own = tmp_path / "two_names.py"
    own.write_text(
        "from lingvo_moe import registry\n"
        "@registry.register\nclass Zebra: pass\n@registry.register\nclass ZebraLarge: pass\n"
    )
    registry.import_module(str(own))
    assert registry.full_name("zebra") == "two_names.Zebra"


def test_an_ambiguous_part_lists_what_it_could_be():
    """Nothing is picked silently."""
    with pytest.raises(UserError, match="could be m4.MoE128E12L, m4.MoE128E36L"):
        registry.get("128E")


@pytest.mark.parametrize(
    ("name", "near"), [("quikstart", "Quickstart"), ("m4.MoE2048E36", "m4.MoE2048E36L"), ("m4.Smll", "m4.Small")]
)
def test_a_miss_names_the_nearest(name, near):
    """A typing mistake is mended by reading the message."""
    try:
        assert near in registry.full_name(name)  # an unambiguous part is no miss
    except UserError as error:
        assert "Did you mean" in str(error) and near in str(error)


def test_a_name_like_nothing_points_to_the_list():
    """Even a hopeless name gets a remedy."""
    with pytest.raises(UserError, match="lingvo_moe list"):
        registry.get("???")


def test_modules_outside_the_tree_register_models(tmp_path):
    """A user's own file is as good as the zoo's, and is found by module and class name."""
    own = tmp_path / "my_models.py"
    own.write_text(
        "import params.m4\nfrom lingvo_moe import registry\n"
        "@registry.register\nclass Mine(params.m4.Quickstart): pass\n"
    )
    registry.import_module(str(own))
    assert registry.full_name("my_models.Mine") == "my_models.Mine"
    assert experiment.get("Mine") == experiment.get("m4.Quickstart")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("no_such_module", "No module named"),
        ("no/such/file.py", "no such file"),
        ("{tmp}/broken.py", "ZeroDivisionError"),
        ("{tmp}/leaves.py", "SystemExit while importing it: 3"),
    ],
)
def test_modules_that_cannot_be_imported_say_why(tmp_path, where, said):
    """The flag, the module and the reason are named."""
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match=f"--import=.*{said}"):
        registry.import_module(where.format(tmp=tmp_path))


def test_two_classes_cannot_share_a_name():
    """A second registration does not quietly replace the first."""
    kind = type("Quickstart", (), {"__module__": "elsewhere.m4"})
    registry.names()
    with pytest.raises(ValueError, match="registered twice"):
        registry.register(kind)


def test_names_need_no_tensorflow():
    """Start-up stays quick: listing, showing and mistyping import no TensorFlow."""
    import subprocess

    script = (
        "import sys; from lingvo_moe import experiment, registry\n"
        "for name in registry.names(): experiment.text(name, experiment.get(name))\n"
        "sys.exit('tensorflow' in sys.modules or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
