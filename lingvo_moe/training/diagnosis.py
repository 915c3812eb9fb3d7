"""What `steps.diagnose_function` measured, read: a table by layer, and the place where a step went wrong.

A place is a path among the weights, of a stacked one with its repeat: `decoder/layer_1/feed_forward[2]` is row 2, the third, of
what lies there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lingvo_moe import tree
from lingvo_moe.layers.base import Weight

_COLUMNS = ("rms", "max", "gradient", "weights", "router_entropy", "load_entropy")
_HEADER = ("after", "rms", "max", "gradient", "weights' rms", "router entropy", "load entropy")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One number of a diagnosis.

    Attributes:
      kind: `weight`, `activation`, `loss` or `gradient`.
      place: of what, see the module; empty for the loss.
      value: root mean square, largest absolute value, the loss itself, or norm.
    """

    kind: str
    place: str
    value: float

    def __str__(self) -> str:
        measure = {
            "weight": "the root mean square of weight",
            "activation": "the largest activation after",
            "loss": "the loss",
            "gradient": "the norm of the gradient of",
        }[self.kind]
        return f"{measure} {self.place}".rstrip() + f" is {self.value:.6g}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A training step looked at.

    Attributes:
      metrics: the model's, `loss` and `gradient_norm`, by name.
      blocks: `rms`, `max` and, of experts, `router_entropy` and `load_entropy`, by place, in forward order.
      weights: root mean squares by place, in forward order.
      gradients: norms by place, in backward order.
      sizes: the number of elements of each weight, by place.
    """

    metrics: dict[str, float]
    blocks: dict[str, dict[str, float]]
    weights: dict[str, float]
    gradients: dict[str, float]
    sizes: dict[str, int] = dataclasses.field(repr=False)

    @staticmethod
    def of(outputs: Mapping[str, Any], weights: Mapping[str, Any]) -> Diagnosis:
        """Reads the outputs of `diagnose` of a model with this tree of `Weight`s."""
        declared = dict(_leaves(weights))
        sizes = {
            path: np.full(_repeats(weight), weight.size // math.prod(_repeats(weight)))
            for path, weight in declared.items()
        }
        order = _prefixes(declared)
        blocks: dict[str, dict[str, float]] = {}
        for path, values in tree.flatten(outputs["blocks"]).items():
            block, _, quantity = path.rpartition("/")
            for place, value in _by_place({block: values}, order).items():
                blocks.setdefault(place, {})[quantity] = value
        gradients = _by_place(tree.flatten(outputs["gradients"]), order)
        return Diagnosis(
            metrics={name: float(value) for name, value in sorted(outputs["metrics"].items())},
            blocks={place: blocks[place] for place in sorted(blocks, key=_key(order))},
            weights=_by_place(tree.flatten(outputs["weights"]), order),
            gradients=dict(reversed(gradients.items())),
            sizes={place: int(size) for place, size in _by_place(sizes, order).items()},
        )

    def not_finite(self) -> Finding | None:
        """The first number that is NaN or infinite: of the weights, on the way forward, on the way back."""
        return next((finding for finding in self._findings() if not math.isfinite(finding.value)), None)

    def largest(self) -> Finding:
        """The largest of the activations and of the gradients' norms."""
        return max(
            (finding for finding in self._findings() if finding.kind in ("activation", "gradient")),
            key=lambda finding: finding.value,
        )

    def verdict(self) -> str:
        """The place to look at, in a sentence without a full stop."""
        first = self.not_finite()
        if first is not None:
            return f"the first number that is not finite: {first}"
        if not math.isfinite(self.metrics["gradient_norm"]):
            return f"all numbers are finite, but not the gradient's squared norm; the largest: {self.largest()}"
        return f"all numbers are finite; the largest: {self.largest()}"

    def text(self) -> str:
        """The table, a block a line in forward order, then what concerns the whole."""
        first = self.not_finite()
        rows = [(place, *self._row(place)) for place in self.blocks]
        table = [_HEADER, *((place, *(_shown(value) for value in values)) for place, *values in rows)]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
            ).rstrip()
            for row in table
        ]
        marked = first and self._block_of(first)
        lines = [f"{line}  <- {first}" if row[0] == marked else line for line, row in zip(lines, table)]
        lines += ["", *(f"{name:16} {value:.6g}" for name, value in self.metrics.items())]
        if "softmax" in self.blocks:
            lines.append(f"{'logits, largest':16} {self.blocks['softmax']['max']:.6g}")
        return "\n".join([*lines, "", self.verdict()])

    def as_json(self) -> dict[str, Any]:
        """A tree for `json.dumps`; numbers that are not finite, which JSON has not, are strings."""
        first = self.not_finite()
        fields = {"metrics": self.metrics, "blocks": self.blocks, "weights": self.weights, "gradients": self.gradients}
        worst = dataclasses.asdict(first or self.largest())
        return _plain(
            {**fields, "finite": first is None and math.isfinite(self.metrics["gradient_norm"]), "worst": worst}
        )

    def _findings(self) -> Iterator[Finding]:
        yield from (Finding("weight", place, value) for place, value in self.weights.items())
        yield from (Finding("activation", place, block["max"]) for place, block in self.blocks.items())
        yield Finding("loss", "", self.metrics["loss"])
        yield from (Finding("gradient", place, value) for place, value in self.gradients.items())

    def _row(self, block: str) -> Iterator[float | None]:
        own = [place for place in self.weights if _inside(place, block)]
        gathered = {
            "gradient": math.sqrt(_squares(self.gradients[place] for place in own)),
            "weights": math.sqrt(
                _squares(self.weights[place] * math.sqrt(self.sizes[place]) for place in own)
                / max(sum(self.sizes[place] for place in own), 1)
            ),
        }
        return ((self.blocks[block] | gathered).get(name) for name in _COLUMNS)

    def _block_of(self, finding: Finding) -> str | None:
        """The row of the table where a finding belongs."""
        return next((block for block in self.blocks if finding.place == block or _inside(finding.place, block)), None)


def _leaves(weights: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Weight]]:
    """The weights by path, in the order of their declaration, which is that of their use."""
    for name, node in weights.items():
        if isinstance(node, Weight):
            yield prefix + name, node
        else:
            yield from _leaves(node, f"{prefix}{name}/")


def _repeats(weight: Weight) -> tuple[int, ...]:
    """`(R,)` of stacked weights, otherwise `()`."""
    return weight.shape[:1] if weight.logical_axes.startswith("R") else ()


def _prefixes(paths: Iterable[str]) -> dict[str, int]:
    """Of every path and all that it lies in, the place in the order."""
    order: dict[str, int] = {}
    for path in paths:
        parts = path.split("/")
        for length in range(1, len(parts) + 1):
            order.setdefault("/".join(parts[:length]), len(order))
    return order


def _by_place(values: Mapping[str, Any], order: Mapping[str, int]) -> dict[str, Any]:
    """One entry for each repeat of each path, in forward order."""
    places = {}
    for path, value in values.items():
        array = np.asarray(value)
        places |= (
            {f"{path}[{row}]": array[row].item() for row in range(len(array))} if array.ndim else {path: array.item()}
        )
    return {place: places[place] for place in sorted(places, key=_key(order))}


def _key(order: Mapping[str, int]):
    """Of forward order: all of one repeat before the next, and what is not repeated, a stack's norm, after them."""

    def key(place: str) -> tuple[int, float, int]:
        path, _, row = place.partition("[")
        return order[path.partition("/")[0]], float(row.rstrip("]") or "inf"), order[path]

    return key


def _inside(place: str, block: str) -> bool:
    """Whether a weight's place is below a block's: `a/b/wi[1]` is in `a/b[1]`."""
    path, _, row = block.partition("[")
    return place.startswith(f"{path}/") and place.partition("[")[2] == row


def _squares(values: Iterable[float]) -> float:
    return sum(value * value for value in values)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
