"""Shows docs/layer_pairs.json, the results of tools.partitioning.layer_pairs, as GShard figure 8 does."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tools.report import files
from tools.report.tables import Column, Table, percent

# The bars of GShard figure 8, from the model's parts; a part in no group counts in the last one.
GROUPS = {
    "attention": ("self_attention",),
    "feed-forward": ("feed_forward",),
    "experts": ("experts",),
    "gating, gate einsums": ("gating", "dispatch", "combine"),
    "other compute": (),
}
COLLECTIVES = {"AllToAll": "all-to-all", "other collectives": ""}


@dataclasses.dataclass(frozen=True)
class LayerPair:
    """The forward pass of an MoE layer and the Transformer layer beside it, in seconds.

    Attributes:
      model: the registered model whose layers they are.
      experts, cores: of the model and of the slice.
      tokens: of the batch.
      compute: by part of the model, by the compiler's cycles.
      roofline: by part, each kernel at the peak of matrix products or of memory.
      collectives: by kind, at the links' full bandwidth.
    """

    model: str
    experts: int
    cores: int
    tokens: int
    compute: Mapping[str, float]
    roofline: Mapping[str, float]
    collectives: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The time of both layers, by the compiler's cycles."""
        return sum(self.compute.values()) + sum(self.collectives.values())

    @property
    def roofline_seconds(self) -> float:
        """The time of both layers at their roofline, with the same collectives."""
        return sum(self.roofline.values()) + sum(self.collectives.values())

    @property
    def all_to_all(self) -> float:
        """Seconds of AllToAll."""
        return self.collectives.get("all-to-all", 0.0)

    @property
    def gating(self) -> float:
        """Seconds of the router, with the projection of tokens to logits."""
        return self.compute.get("gating", 0.0)

    def values(self, is_roofline: bool) -> dict[str, float]:
        """Returns seconds keyed by the names of GROUPS and COLLECTIVES."""
        group_of = {part: group for group, parts in GROUPS.items() for part in parts}
        found = dict.fromkeys((*GROUPS, *COLLECTIVES), 0.0)
        for part, value in (self.roofline if is_roofline else self.compute).items():
            found[group_of.get(part, list(GROUPS)[-1])] += value
        name_of = {kind: name for name, kind in COLLECTIVES.items()}
        for kind, value in self.collectives.items():
            found[name_of.get(kind, list(COLLECTIVES)[-1])] += value
        return found


def save(pairs: Sequence[LayerPair], path: pathlib.Path):
    """Writes the results."""
    files.save([dataclasses.asdict(pair) for pair in pairs], path)


def load(path: pathlib.Path) -> list[LayerPair]:
    """Reads what `save` wrote; raises UserError as `files.load` does."""
    return files.load("--layer_pairs", path, "tools.partitioning.layer_pairs", _made)


def _made(content: Any) -> list[LayerPair]:
    pairs = [LayerPair(**values) for values in files.listed(content)]
    for pair in pairs:
        if not files.mistyped(pair):
            # The statements of the page divide by these.
            files.check_above_0(pair, ("experts", "cores", "tokens", "seconds", "all_to_all"))
    return pairs


def table(pairs: Sequence[LayerPair]) -> Table:
    """GShard figure 8 in milliseconds, each pair above its roofline."""
    columns = [
        Column("layers of"),
        Column("cores"),
        *(Column(name, "[c]", "milliseconds of the forward pass") for name in GROUPS),
        *(Column(name, "[m]", "milliseconds of the forward pass") for name in COLLECTIVES),
        Column("together", "[c, m]", "milliseconds of the forward pass"),
        Column("roofline / compiled", "[c, m]"),
    ]
    rows = []
    for pair in pairs:
        for is_roofline, total in ((False, pair.seconds), (True, pair.roofline_seconds)):
            values = [f"{1e3 * value:.2f}" for value in (*pair.values(is_roofline).values(), total)]
            label = "roofline [m]" if is_roofline else pair.model
            rows.append([label, f"{pair.cores}", *values, percent(total / pair.seconds) if is_roofline else ""])
    return Table(
        "The forward pass of an MoE layer and the Transformer layer beside it: the chart above.", columns, rows
    )


def growth(pairs: Sequence[LayerPair]) -> tuple[LayerPair, LayerPair] | None:
    """Returns the pairs with the fewest and the most experts; None without two."""
    ordered = sorted(pairs, key=lambda pair: pair.experts)
    return (ordered[0], ordered[-1]) if len(ordered) > 1 else None
