"""A tree and its flat form have the same content, in one order."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from lingvo_moe import tree

NAMES = strategies.text("abcxyz_0123", min_size=1, max_size=4)
TREES = strategies.recursive(
    strategies.dictionaries(NAMES, strategies.integers(), min_size=1, max_size=4),
    lambda nodes: strategies.dictionaries(NAMES, strategies.integers() | nodes, min_size=1, max_size=4),
    max_leaves=12,
)


def test_flatten_joins_names_with_slashes_and_sorts_them():
    """Paths are names of checkpoints and metrics."""
    nested = {"theta": {"encoder": {"wo": 2, "wi": 1}, "a": 0}, "step": 3}
    assert list(tree.flatten(nested).items()) == [
        ("step", 3),
        ("theta/a", 0),
        ("theta/encoder/wi", 1),
        ("theta/encoder/wo", 2),
    ]
    assert list(tree.flatten({"b": 1}, "below/")) == ["below/b"]


@hypothesis.given(TREES)
def test_unflatten_is_the_inverse(nested):
    """No leaf is lost."""
    assert tree.unflatten(tree.flatten(nested)) == nested


@hypothesis.given(TREES, strategies.randoms())
def test_equal_trees_flatten_in_equal_order(nested, random):
    """Programs bind inputs by position."""

    def shuffled(node):
        names = list(node)
        random.shuffle(names)
        return {name: shuffled(node[name]) if isinstance(node[name], dict) else node[name] for name in names}

    assert list(tree.flatten(shuffled(nested)).items()) == list(tree.flatten(nested).items())


def test_map_leaves_matches_leaves_by_path():
    """The order of insertion does not matter."""
    first, second = {"a": {"x": 1, "y": 2}, "b": 3}, {"b": 30, "a": {"y": 20, "x": 10}}
    assert tree.map_leaves(lambda one, other: one + other, first, second) == {"a": {"x": 11, "y": 22}, "b": 33}


def test_map_leaves_of_trees_with_other_paths_is_an_error():
    """A missing leaf is not skipped."""
    with pytest.raises(KeyError, match="b"):
        tree.map_leaves(lambda one, other: one, {"a": 1, "b": 2}, {"a": 1})
