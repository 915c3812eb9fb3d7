"""Reads the outputs of `steps.diagnose_function`: a table by layer, and the first number that is not finite.

A scope is a path in the tree of weights, for stacked weights with the index of the repeat:
`decoder/layer_1/feed_forward[2]` is the third repeat of that layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lingvo_moe import tree
from lingvo_moe.layers.base import Weight
from lingvo_moe.utils import columns, output_files

_COLUMNS = ("rms", "max", "gradient", "weights", "router_entropy", "load_entropy")
_HEADER = ("after", "rms", "max", "gradient", "weights' rms", "router entropy", "load entropy")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One number of a diagnosis.

    Attributes:
      kind: `weight`, `activation`, `loss` or `gradient`.
      scope: where in the model, see the module; empty for the loss.
      value: a weight's root mean square, an activation's largest absolute value, the loss, or a gradient's norm.
    """

    kind: str
    scope: str
    value: float

    def __str__(self) -> str:
        quantity = {
            "weight": "the root mean square of weight",
            "activation": "the largest activation after",
            "loss": "the loss",
            "gradient": "the norm of the gradient of",
        }[self.kind]
        return f"{quantity} {self.scope}".rstrip() + f" is {self.value:.6g}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The summaries of one training step.

    Attributes:
      metrics: the model's metrics, `loss` and `gradient_norm`, by name.
      blocks: `rms`, `max` and, for experts, `router_entropy` and `load_entropy` of each block, by scope, in forward
        order.
      weights: the root mean square of each weight, by scope, in forward order.
      gradients: the norm of each weight's gradient, by scope, in backward order.
      sizes: the number of elements of each weight, by scope.
    """

    metrics: dict[str, float]
    blocks: dict[str, dict[str, float]]
    weights: dict[str, float]
    gradients: dict[str, float]
    sizes: dict[str, int] = dataclasses.field(repr=False)

    @staticmethod
    def of(outputs: Mapping[str, Any], weights: Mapping[str, Any]) -> Diagnosis:
        """Makes a diagnosis of the outputs of `diagnose`, for a model with this tree of `Weight`s."""
        declared = dict(_leaves(weights))
        sizes = {
            path: np.full(_repeats(weight), weight.size // math.prod(_repeats(weight)))
            for path, weight in declared.items()
        }
        order = _prefixes(declared)
        blocks: dict[str, dict[str, float]] = {}
        for path, values in tree.flatten(outputs.get("blocks", {})).items():  # absent without summaries
            block, _, quantity = path.rpartition("/")
            for scope, value in _by_scope({block: values}, order).items():
                blocks.setdefault(scope, {})[quantity] = value
        gradients = _by_scope(tree.flatten(outputs["gradients"]), order)
        return Diagnosis(
            metrics={name: float(value) for name, value in sorted(outputs["metrics"].items())},
            blocks={scope: blocks[scope] for scope in sorted(blocks, key=_key(order))},
            weights=_by_scope(tree.flatten(outputs["weights"]), order),
            gradients=dict(reversed(gradients.items())),
            sizes={scope: int(size) for scope, size in _by_scope(sizes, order).items()},
        )

    def not_finite(self) -> Finding | None:
        """Returns the first number that is NaN or infinite: among weights, activations, the loss, then gradients."""
        return next((finding for finding in self._findings() if not math.isfinite(finding.value)), None)

    def largest(self) -> Finding:
        """Returns the largest of the activations and of the gradients' norms."""
        return max(
            (finding for finding in self._findings() if finding.kind in ("activation", "gradient")),
            key=lambda finding: finding.value,
        )

    def summary(self) -> str:
        """Returns where to look, as a sentence without a full stop."""
        first = self.not_finite()
        if first is not None:
            return f"the first number that is not finite: {first}"
        if not math.isfinite(self.metrics["gradient_norm"]):
            return f"all numbers are finite, but not the gradient's squared norm; the largest: {self.largest()}"
        return f"all numbers are finite; the largest: {self.largest()}"

    def text(self) -> str:
        """Returns a table, one block a line in forward order, then the metrics and the summary."""
        first = self.not_finite()
        rows = [(scope, *self._row(scope)) for scope in self.blocks]
        table = [_HEADER, *((scope, *(_shown(value) for value in values)) for scope, *values in rows)]
        marked = first and self._block_of(first)
        lines = [
            f"{line}  <- {first}" if row[0] == marked else line for line, row in zip(columns.aligned(table), table)
        ]
        metrics = dict(self.metrics)
        if "softmax" in self.blocks:
            metrics["logits, largest"] = self.blocks["softmax"]["max"]
        values = columns.aligned([(name, f"{value:.6g}") for name, value in metrics.items()], has_numbers=False)
        return "\n".join([*lines, "", *values, "", self.summary()])

    def as_json(self) -> dict[str, Any]:
        """Returns a tree for `json.dump`, see `output_files.as_json`."""
        first = self.not_finite()
        fields = {"metrics": self.metrics, "blocks": self.blocks, "weights": self.weights, "gradients": self.gradients}
        worst = dataclasses.asdict(first or self.largest())
        return output_files.as_json(
            {**fields, "finite": first is None and math.isfinite(self.metrics["gradient_norm"]), "worst": worst}
        )

    def _findings(self) -> Iterator[Finding]:
        yield from (Finding("weight", scope, value) for scope, value in self.weights.items())
        activations = ((scope, block["max"]) for scope, block in self.blocks.items() if "max" in block)
        yield from (Finding("activation", scope, value) for scope, value in activations)
        yield Finding("loss", "", self.metrics["loss"])
        yield from (Finding("gradient", scope, value) for scope, value in self.gradients.items())

    def _row(self, block: str) -> Iterator[float | None]:
        own = [scope for scope in self.weights if _is_inside(scope, block)]
        gathered = {
            "gradient": math.sqrt(_squares(self.gradients[scope] for scope in own)),
            "weights": math.sqrt(
                _squares(self.weights[scope] * math.sqrt(self.sizes[scope]) for scope in own)
                / max(sum(self.sizes[scope] for scope in own), 1)
            ),
        }
        return ((self.blocks[block] | gathered).get(name) for name in _COLUMNS)

    def _block_of(self, finding: Finding) -> str | None:
        """Returns the row of the table that a finding belongs to."""
        return next(
            (block for block in self.blocks if finding.scope == block or _is_inside(finding.scope, block)), None
        )


def _leaves(weights: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Weight]]:
    """Yields weights by path, in the order of their declaration, which is the order of their use."""
    for name, node in weights.items():
        if isinstance(node, Weight):
            yield prefix + name, node
        else:
            yield from _leaves(node, f"{prefix}{name}/")


def _repeats(weight: Weight) -> tuple[int, ...]:
    """Returns `(R,)` for stacked weights, otherwise `()`."""
    return weight.shape[:1] if weight.is_repeated else ()


def _prefixes(paths: Iterable[str]) -> dict[str, int]:
    """Returns the position of every path, and of each of its prefixes, in forward order."""
    order: dict[str, int] = {}
    for path in paths:
        parts = path.split("/")
        for length in range(1, len(parts) + 1):
            order.setdefault("/".join(parts[:length]), len(order))
    return order


def _by_scope(values: Mapping[str, Any], order: Mapping[str, int]) -> dict[str, Any]:
    """Returns one entry for each repeat of each path, in forward order."""
    scopes = {}
    for path, value in values.items():
        array = np.asarray(value)
        scopes |= (
            {f"{path}[{row}]": array[row].item() for row in range(len(array))} if array.ndim else {path: array.item()}
        )
    return {scope: scopes[scope] for scope in sorted(scopes, key=_key(order))}


def _key(order: Mapping[str, int]) -> Callable[[str], tuple[int, float, int, int]]:
    """Returns a sort key of forward order: all of one repeat before the next, then what is not repeated.

    A block may have no weights of its own. What a layer summarises precedes the layer's output.
    """

    def key(scope: str) -> tuple[int, float, int, int]:
        path, _, row = scope.partition("[")
        part = path.partition("/")[0]
        position = next((order[outer] for outer in _outward(path) if outer in order), _unweighted(part, order))
        return order.get(part, position), float(row.rstrip("]") or "inf"), position, -path.count("/")

    return key


def _outward(path: str) -> Iterator[str]:
    """Yields a path and those that it is inside of, the innermost first."""
    parts = path.split("/")
    return ("/".join(parts[:length]) for length in range(len(parts), 0, -1))


def _unweighted(part: str, order: Mapping[str, int]) -> int:
    """Returns the position of a part of a model without weights: tied embeddings are first, their logits last."""
    return -1 if part.endswith("embedding") else len(order)


def _is_inside(scope: str, block: str) -> bool:
    """Returns whether a weight's scope is inside a block's: `a/b/wi[1]` is in `a/b[1]`."""
    path, _, row = block.partition("[")
    return scope.startswith(f"{path}/") and scope.partition("[")[2] == row


def _squares(values: Iterable[float]) -> float:
    return sum(value * value for value in values)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
