"""Protects `show --explain`: every hyperparameter has a description, that of the class that has it."""

import dataclasses

import pytest

from lingvo_moe import experiment, explanations


@dataclasses.dataclass(frozen=True)
class Base:
    """A part.

    Attributes:
      size: of the base.
      height, width: of a window, in
        two lines.
    """

    size: int = 1
    height: int = 2
    width: int = 3


@dataclasses.dataclass(frozen=True)
class Part(Base):
    """A part of a part.

    Attributes:
      size: of the part: its own.

    More text.
    """

    colour: str = "red"


@dataclasses.dataclass(frozen=True)
class Whole:
    """The whole."""

    part: Part = dataclasses.field(default_factory=Part)


def test_descriptions_are_those_of_the_class_then_of_its_bases():
    """Lines are joined, an entry of several fields has their names, and a field without one has an empty text."""
    assert explanations.descriptions(Whole()) == {
        "part.size": "of the part: its own.",
        "part.height": "height, width: of a window, in two lines.",
        "part.width": "height, width: of a window, in two lines.",
        "part.colour": "",
    }


@pytest.mark.parametrize("name", ["m4.Small", "dense_lm.Small", "conformer.Small", "unet.Small"])
def test_every_hyperparameter_has_a_description(name):
    """And none of them only refers to another class."""
    found = explanations.descriptions(experiment.get(name))
    assert [path for path, text in found.items() if not text or text.startswith("see `")] == []


def test_a_reference_to_another_class_is_followed():
    """The model's fields that are a layer's are described there."""
    found = explanations.descriptions(experiment.get("m4.Small"))
    assert found["model.capacity_factor"].startswith("an expert takes C = factor * S / E tokens")
