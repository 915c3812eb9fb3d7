"""What is compared with what, how a comparison is run, and what must be equal for it to mean anything."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

from lingvo_moe.errors import UserError
from tools.benchmarks import environments, work
from tools.benchmarks.work import Work
from tools.benchmarks.worker import Measurement, Worker

OURS = "ours"
PROFILE = "profile"  # ours, too
OUR_ENVIRONMENT = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}
# Lingvo 0.14.2's UniTransformer took 1.04 s for the step of `work.LANGUAGE_MODEL` on one core whose own 1024^3 product ran at
# 95 GFLOP/s. It no longer installs beside today's Python, so its step counts as that many operations at the peak.
LINGVO_FLOP = 1.04 * 95e9
_LEARNING = ("layers", "expert_layers", "experts", "capacity", "tokens", "batch")
_FARTHEST_FROM_CHANCE = 0.1
# Of all places: NllbMoe computes those alone that hold a token, and an untrained router fills some experts and leaves others.
_FEWEST_ROWS = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Our work against another's.

    Attributes:
      name: for `--only`.
      title: what the row is called.
      ours, other: the two works.
      by: who does the other: a peer of the directory `peers`, or ourselves.
      goal: the ratio ours / other is to be at most this; infinite where it is only told.
      equal: facts that both must tell alike.
      per: a fact: seconds are divided by it on both sides before they are compared.
      flop: the operations that ours count as where `per` is `flop`; 0 for those that the model asks for.
    """

    name: str
    title: str
    ours: Work
    other: Work
    by: str = OURS
    goal: float
    equal: tuple[str, ...] = ()
    per: str = ""
    flop: float = 0.0


def _with(of: Work, **changes) -> Work:
    return dataclasses.replace(of, **changes)


_ALL_EXPERTS = _with(work.TRANSLATION, kind="decode", capacity_factor=None)
_MANY = _with(work.TRANSLATION, experts=64)
# As work grows with devices: each of 8 has the tokens, and the room, that one has of `work.TRANSLATION`.
_EIGHT_TIMES = _with(work.TRANSLATION, groups=8, rows=8 * work.TRANSLATION.rows)
# The same work cut in 8: 64 tokens each.
_IN_EIGHT = _with(work.TRANSLATION, groups=8)
COMPARISONS = (
    Comparison(
        name="translation_8",
        title="training step, 8 experts, against NllbMoe",
        ours=work.TRANSLATION,
        other=work.TRANSLATION,
        by="nllb_moe",
        goal=0.75,
        equal=_LEARNING,
    ),
    Comparison(
        name="translation_64",
        title="training step, 64 experts, against NllbMoe",
        ours=_MANY,
        other=_MANY,
        by="nllb_moe",
        goal=0.1,
        equal=_LEARNING,
    ),
    Comparison(
        name="peak_8",
        title="training step, 8 experts, against the peak of a product",
        ours=work.TRANSLATION,
        other=work.PRODUCT,
        goal=1 / 0.75,
        per="flop",
    ),
    Comparison(
        name="layer_deepspeed",
        title="one layer, against DeepSpeed",
        ours=work.LAYER,
        other=work.LAYER,
        by="deepspeed_moe",
        goal=0.9,
        equal=("experts", "capacity", "tokens", "batch"),
    ),
    Comparison(
        name="layer_mesh_tensorflow",
        title="one layer, against Mesh-TensorFlow",
        ours=work.LAYER,
        other=work.LAYER,
        by="mesh_tensorflow_moe",
        goal=0.6,
        equal=("weights", "experts", "capacity", "tokens", "batch"),
    ),
    *(
        Comparison(
            name=f"layer_{experts}",
            title=f"one layer, a token among {experts} experts against one among 8",
            ours=work.wide_layer(experts),
            other=work.wide_layer(8),
            goal=1.15,
            per="tokens",
        )
        for experts in (64, 256)
    ),
    Comparison(
        name="language_model",
        title="language model's step, against Lingvo's record",
        ours=work.LANGUAGE_MODEL,
        other=work.PRODUCT,
        goal=0.5,
        per="flop",
        flop=LINGVO_FLOP,
    ),
    Comparison(
        name="decoding",
        title="beam search, against NllbMoe's generate",
        ours=_ALL_EXPERTS,
        other=_ALL_EXPERTS,
        by="nllb_moe",
        goal=0.4,
        equal=("layers", "expert_layers", "experts", "tokens", "batch", "decoded", "beams"),
    ),
    *(
        Comparison(
            name=f"{name}_{mesh}",
            title=f"training step of {tokens} tokens a side, {mesh} devices against 1",
            ours=_with(of, mesh=mesh),
            other=of,
            goal=goal,
            equal=(*_LEARNING, "weights"),
        )
        for name, of, tokens, goal in (("grown", _EIGHT_TIMES, "8 x 512", 1.3), ("cut", _IN_EIGHT, "512", math.inf))
        for mesh in ("8", "4x2")
    ),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """A row: seconds of one piece of work and their ratio, or why there is none.

    Attributes:
      ours, other: the least CPU seconds of all rounds; `other` in seconds that ours compare with, see `Comparison.per`.
      ratio: of these two.
      low, high: quartiles of the ratios of single rounds: how much it spreads.
      facts: what the two workers told.
      losses: (first, last) of each of the two, where there are any.
      missing: why there are no figures; empty where there are.
    """

    name: str
    ours: float = 0.0
    other: float = 0.0
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    facts: tuple[dict, ...] = ()
    losses: tuple[tuple[float, float], ...] = ()
    missing: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run keeps things: below `directory` what workers say and a cache of our programs, below `venvs` the peers."""

    directory: pathlib.Path
    venvs: pathlib.Path

    def worker(self, name: str, who: str, work: Work) -> Worker:
        """A worker called `name`, ready: a peer, or of this package's own modules the one that `who` names."""
        if who in (OURS, PROFILE):
            command = [sys.executable, "-m", f"tools.benchmarks.{who}"]
            environment = {**OUR_ENVIRONMENT, "LINGVO_MOE_CACHE": str(self.directory / "cache")}
        else:
            command = [str(environments.python_of(who, self.venvs)), "-m", f"tools.benchmarks.peers.{who}"]
            environment = {}
        return Worker(name, command, dataclasses.asdict(work), self.directory / "logs", environment)


def run(comparison: Comparison, rounds: int, place: Place, advance: Callable[[], None]) -> Result:
    """Measures both sides, one after the other in each of the rounds.

    Raises:
      UserError: a worker ends early, or what they did cannot be compared.
    """
    with contextlib.ExitStack() as stack:
        asked = (("ours", OURS, comparison.ours), ("other", comparison.by, comparison.other))
        sides = [
            (stack.enter_context(place.worker(f"{comparison.name}.{side}", who, work)), work.times)
            for side, who, work in asked
        ]
        facts = tuple(worker.facts for worker, _ in sides)
        check_equal(comparison, facts)
        measured: tuple[list[Measurement], ...] = ([], [])
        for _ in range(rounds):
            for list_of, (worker, times) in zip(measured, sides):
                list_of.append(worker.run(times))
            advance()
    losses = tuple(
        pair
        for works, told, list_of in zip((comparison.ours, comparison.other), facts, measured)
        if (pair := check_losses(comparison.name, works, told, list_of))
    )
    return summary(comparison, facts, [[m.seconds for m in list_of] for list_of in measured], losses)


def summary(
    comparison: Comparison,
    facts: Sequence[dict],
    seconds: Sequence[Sequence[float]],
    losses: tuple[tuple[float, float], ...] = (),
) -> Result:
    """The row of a comparison from the seconds of all rounds, ours and the other's."""
    factor = 1.0
    if comparison.per:
        factor = (comparison.flop or facts[0][comparison.per]) / facts[1][comparison.per]
    ours, other = seconds[0], [factor * value for value in seconds[1]]
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours, other)], n=4, method="inclusive")
    return Result(comparison.name, min(ours), min(other), min(ours) / min(other), low, high, tuple(facts), losses)


def check_equal(comparison: Comparison, facts: Sequence[dict]):
    """Raises UserError where the two sides did not make the same thing, or one skips work."""
    differ = [name for name in comparison.equal if facts[0][name] != facts[1][name]]
    if differ:
        told = ", ".join(f"{name} {facts[0][name]} and {facts[1][name]}" for name in differ)
        raise UserError(f"{comparison.name}: the two sides differ in {told}; their ratio would mean nothing.")
    rows = [side["expert_rows"] for side in facts if "expert_rows" in side]
    if len(rows) == 2 and not _FEWEST_ROWS <= rows[1] / rows[0] <= 1.0:
        raise UserError(
            f"{comparison.name}: our experts compute {rows[0]} rows, the other's {rows[1]}; a side skips work."
        )


def check_losses(name: str, work: Work, facts: dict, measured: Sequence[Measurement]) -> tuple[float, float] | None:
    """(first, last) loss of a training, which begins near chance and falls; None for what has no loss.

    Raises:
      UserError: it does not.
    """
    if "first_loss" not in facts:
        return None
    first, last = facts["first_loss"], measured[-1].losses[-1]
    if not (math.isfinite(first) and math.isfinite(last) and first > 0):
        raise UserError(f"{name}: losses are {first} and then {last}; that is no training.")
    chance = math.log(work.vocabulary)
    if work.kind == "train" and (abs(first / chance - 1) > _FARTHEST_FROM_CHANCE or last >= first):
        raise UserError(
            f"{name}: the loss begins at {first:.2f} and ends at {last:.2f}; expected near ln {work.vocabulary} "
            f"= {chance:.2f}, and falling. Its time means nothing."
        )
    return first, last
