"""Descriptions of hyperparameters, from the docstrings of the classes that have them: `show --explain`."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

from lingvo_moe import overrides
from lingvo_moe.data.batching import BatchConfig
from lingvo_moe.layers.base import Layer

_ENTRY = re.compile(r"^  (\w+(?:, \w+)*): (.*(?:\n {4,}.*)*)", re.MULTILINE)
_SEE = re.compile(r"see `(\w+)`\.?")


def descriptions(config: Any) -> dict[str, str]:
    """Returns the description of every plain field, by its path (`model.num_experts`); empty for one that has none."""
    return {path: _description(config, path) for path, _ in overrides.fields(config)}


def of_field(cls: type, name: str) -> str:
    """Returns what the `Attributes:` of a class, or of a class that it is made of, say of a field.

    An entry of several fields is returned with their names. One that only refers to another class, of layers or of an
    input, is replaced by that class's.
    """
    for names, text in (entry for base in cls.__mro__ for entry in _entries(base)):
        if name in names.split(", "):
            other = _referred(text)
            return of_field(other, name) if other else text if names == name else f"{names}: {text}"
    return ""


def _description(config: Any, path: str) -> str:
    *parents, name = path.split(".")
    return of_field(type(functools.reduce(getattr, parents, config)), name)


def _entries(cls: type) -> Iterator[tuple[str, str]]:
    """Yields (names, text) of the entries of a docstring's `Attributes:`."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    for names, text in _ENTRY.findall(section):
        yield names, " ".join(text.split())


def _referred(text: str) -> type | None:
    """Returns the class that the text refers to, if that is all it does."""
    if (reference := _SEE.fullmatch(text)) is None:
        return None
    known = itertools.chain(_subclasses(Layer), _subclasses(BatchConfig))
    return next((cls for cls in known if cls.__name__ == reference[1]), None)


def _subclasses(cls: type) -> Iterator[type]:
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)
