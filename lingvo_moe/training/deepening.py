"""Weights for a deeper model from those of a shallower one, so that training goes on with more layers ("stacking").

A new layer begins as a copy of an old one (as in Gong et al. 2019, "Efficient training of BERT by progressively
stacking") that adds only a quarter as much to the residual stream. So the deeper model begins near the function of the
shallower one, if there are few new layers and none ends with a normalisation (Chen et al. 2016, "Net2Net").
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lingvo_moe.errors import UserError

# Factor of the last weight of each sublayer of a new layer. Not zero: Adafactor's updates are relative to the size of a
# weight.
_OUTPUT_SCALE = 0.25
_OUTPUTS = ("output", "output_bias", "wo", "wo_bias")
_STACKED = re.compile(r"(?P<stack>[^/]+)/(?P<layer>layer_\d+)/(?P<name>.+)")


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer: its prefix, as `encoder/layer_0`, the index of its repeat, and the shapes of its weights."""

    prefix: str
    repeat: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


def deepen(values: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns weights for a model whose stacks have more layers.

    The old layers keep their order: each becomes the first layer of its kind after the one before. Any other layer is a
    copy of the nearest old one of its kind before it or, if there is none, after it. Layers whose weights have the same
    names and shapes are of one kind.

    Args:
      values: the weights of the shallower model, by path; those of stacks are `[R, ...]`.
      shapes: the shapes of the deeper model's weights, by path.

    Returns:
      The weights, by path. Those outside of layers are as they were, whatever their shape.

    Raises:
      UserError: an old layer has no place in the model, or a new one is of a kind that there was not.
    """
    old, new = _stacks({path: value.shape for path, value in values.items()}), _stacks(shapes)
    result = {path: value for path, value in values.items() if not _STACKED.fullmatch(path)}
    parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for stack in sorted(old.keys() | new.keys()):
        for layer, source, is_new in _sources(stack, old.get(stack, []), new.get(stack, [])):
            for name, _ in source.shapes:
                value = values[f"{source.prefix}/{name}"][source.repeat]
                is_output = is_new and name.rsplit("/", 1)[-1] in _OUTPUTS
                parts[f"{layer.prefix}/{name}"].append(value * np.float32(_OUTPUT_SCALE) if is_output else value)
    return result | {path: np.stack(of_repeats) for path, of_repeats in parts.items()}


def _stacks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[_Layer]]:
    """Returns the layers of each stack, in the order of computation."""
    found: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {}
    for path, shape in shapes.items():
        if match := _STACKED.fullmatch(path):
            pattern = found.setdefault(match["stack"], {})
            pattern.setdefault(match["layer"], {})[match["name"]] = tuple(shape)
    return {stack: list(_unrolled(stack, pattern)) for stack, pattern in found.items()}


def _unrolled(stack: str, pattern: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Iterator[_Layer]:
    (repeats,) = {shape[0] for layer in pattern.values() for shape in layer.values()}
    for repeat in range(repeats):
        for name in sorted(pattern, key=lambda name: int(name.removeprefix("layer_"))):
            shapes = tuple(sorted((weight, shape[1:]) for weight, shape in pattern[name].items()))
            yield _Layer(f"{stack}/{name}", repeat, shapes)


def _sources(stack: str, old: Sequence[_Layer], new: Sequence[_Layer]) -> Iterator[tuple[_Layer, _Layer, bool]]:
    """Yields for each new layer (itself, the old one whose weights it takes, whether it is a copy)."""
    left = list(old)
    last: dict[tuple, _Layer] = {}  # the last old layer of each kind so far
    for index, layer in enumerate(new):
        if left and left[0].shapes == layer.shapes:
            last[layer.shapes] = left.pop(0)
            yield layer, last[layer.shapes], False
            continue
        source = last.get(layer.shapes) or next((each for each in left if each.shapes == layer.shapes), None)
        if source is None:
            raise UserError(
                f"layer {index + 1} of the {stack} has weights of other names or shapes than all {len(old)} layers of "
                f"the initial weights, so it cannot be a copy of one."
            )
        yield layer, source, True
    if left:
        raise UserError(
            f"the {stack} has {len(new)} layers, without a place for {len(left)} of the {len(old)} layers of the "
            f"initial weights: they keep their order, and each needs a layer of its kind (dense, moe)."
        )
