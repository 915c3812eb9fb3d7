"""Which annotations a training step needs: leaves them out, and compares what the compiler makes of the step.

    python -m tools.partitioning.needed_annotations [--model=hybrid_lm.MoE33B8E]

The model's miniature (`analysis.miniature`) is compiled for eight TPU v3 cores. A site is a function of the library and
the logical axes that it annotates a tensor with. The sites of a file are left out together; if devices then send more
bytes, or compute for more cycles, each half of them is tried by itself. A site that costs nothing stays out while the
next ones are tried. Those that remain are needed; which ones may depend on the order, where two say the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Collection, Iterator, Sequence
from unittest import mock

from absl import flags

from lingvo_moe.analysis import miniature
from lingvo_moe.cli import app
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import Layout
from lingvo_moe.utils import progress

_VALUES = flags.FlagValues()
flags.DEFINE_string("model", "hybrid_lm.MoE33B8E", "a registered model that is made for a slice", flag_values=_VALUES)
_PACKAGE = pathlib.Path(inspect.getfile(Layout)).parents[1]
# They annotate for their callers.
_HELPERS = (
    "sharding/layout.py",
    "ops/context.py",
    "ops/attention.py",
    "ops/activation.py",
    "layers/stage_buffers.py",
    "layers/checkpoint_policy.py",
)
# The inputs and outputs of a program, whose shardings are part of it.
_OF_PROGRAMS = "steps.py"
# A smaller share of the cycles is due to scheduling.
_NOISE = 0.002


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one device in one step: the bytes that its collectives send, and its cycles of computation."""

    bytes: int
    cycles: int

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes, {self.cycles:,} cycles"

    def above(self, base: Cost) -> str:
        """Returns what is more than that of `base`, in words; empty if nothing is."""
        if self.bytes > base.bytes:
            return f"{self.bytes / base.bytes - 1:.1%} more bytes in collectives"
        if self.cycles > base.cycles * (1 + _NOISE):
            return f"{self.cycles / base.cycles - 1:.1%} more cycles"
        return ""


class Sites:
    """The sites of all annotations made within `intercepted`, in the order of the first ones; some are left out."""

    def __init__(self):
        self.seen: dict[str, None] = {}
        self.left_out: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def intercepted(self) -> Iterator[None]:
        """Records annotations inside the block, and makes none of those that are left out."""
        original = Layout.annotate

        def annotate(layout: Layout, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
            site = f"{_caller()} {logical_axes}"
            self.seen.setdefault(site)
            return tensor if site in self.left_out else original(layout, tensor, logical_axes)

        with mock.patch.object(Layout, "annotate", annotate):
            yield


def _caller() -> str:
    """The file and function of the library that annotates: `layers/attention.py MultiHeadAttention.attend`."""
    frame = inspect.currentframe()
    while frame is not None:
        path = pathlib.Path(frame.f_code.co_filename)
        name = path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else ""
        if name and name not in _HELPERS:
            return f"{name} {frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return "elsewhere"


def main(arguments: list[str]):
    """Prints the needed sites, and what each of them saves."""
    app.no_arguments(arguments[1:])
    small, sites = miniature.of(_VALUES.model), Sites()

    def cost(left_out: Collection[str]) -> Cost:
        sites.left_out = frozenset(left_out)
        plan = miniature.make_plan(small)
        assert plan.cycles is not None, "a miniature fits into the memory of eight cores"
        return Cost(sum(collective.bytes for collective in plan.collectives), plan.cycles)

    with sites.intercepted():
        elimination = Elimination(cost, cost(()))
        tried = [site for site in sites.seen if not site.startswith(_OF_PROGRAMS)]
        by_file: dict[str, list[str]] = {}
        for site in tried:
            by_file.setdefault(site.split()[0], []).append(site)
        print(f"with all annotations: {elimination.current}")
        needed = [
            found
            for group in progress.track(by_file.values(), "leaving annotations out")
            for found in elimination.of(group)
        ]
    print(f"{_VALUES.model}: {len(needed)} of {len(tried)} sites are needed; with them alone: {elimination.current}")
    for site, more in needed:
        print(f"{site}: without it {more}")


@dataclasses.dataclass
class Elimination:
    """A search for needed sites.

    Attributes:
      cost: of the step, given the sites that are left out.
      current: the cost without those that were found to cost nothing.
      left_out: these.
    """

    cost: Callable[[Collection[str]], Cost]
    current: Cost
    left_out: set[str] = dataclasses.field(default_factory=set)

    def of(self, group: Sequence[str]) -> list[tuple[str, str]]:
        """Leaves out those of a group of sites that cost nothing; returns the others, and what is more without each."""
        found = self.cost({*self.left_out, *group})
        more = found.above(self.current)
        if not more:
            self.left_out.update(group)
            self.current = found
            return []
        if len(group) == 1:
            return [(group[0], more)]
        middle = len(group) // 2
        return [*self.of(group[:middle]), *self.of(group[middle:])]


if __name__ == "__main__":
    app.run(main, _VALUES)
