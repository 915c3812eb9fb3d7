"""Trees: nested dicts, and their flat form, a dict of leaves by path such as `theta/encoder/0/query`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves by path. Every level is sorted by name, so equal trees flatten in equal order."""
    leaves: dict[str, Any] = {}
    for name in sorted(tree):
        if isinstance(tree[name], Mapping):
            leaves.update(flatten(tree[name], f"{prefix}{name}/"))
        else:
            leaves[prefix + name] = tree[name]
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of leaves by path; the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def map_leaves(function: Callable[..., Any], tree: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of `function(leaf, *leaves of the other trees)`; all trees have the same paths."""
    rest = [flatten(other) for other in others]
    return unflatten({path: function(leaf, *(other[path] for other in rest)) for path, leaf in flatten(tree).items()})
