"""The comparisons: their two sides, how they are run, and what must be equal on both sides."""

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
from tools.benchmarks.work import Learning, Work
from tools.benchmarks.worker import Measurement, Worker

OURS = "ours"
PROFILE = "profile"  # also one of our modules
LEARNER = "learner"  # likewise
OUR_ENVIRONMENT = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}
# Lingvo 0.14.2's UniTransformer took 1.04 s for the step of `work.LANGUAGE_MODEL` on one core whose 1024^3 matrix
# product ran at 95 GFLOP/s. It does not install with current Python, so its step counts as that many operations at the
# peak.
LINGVO_FLOP = 1.04 * 95e9
_LEARNING = ("layers", "expert_layers", "experts", "capacity", "tokens", "batch")
_SEARCHING = ("layers", "expert_layers", "experts", "tokens", "batch", "decoded", "beams")
_FARTHEST_FROM_CHANCE = 0.1
# Share of the capacity: NllbMoe computes only rows that hold a token, and an untrained router leaves experts unused.
_FEWEST_ROWS = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Our work against another's.

    Attributes:
      name: name of the row for `--only`.
      title: title of the row.
      ours, other: the work of the two sides.
      by: the implementation of the other side: a peer of the directory `peers`, or our own.
      goal: upper bound of the ratio ours / other; infinite if the row has no goal.
      equal: facts that must be equal on both sides.
      per: a fact by which the seconds of both sides are divided before they are compared.
      flop: operations of our side if `per` is `flop`; 0 for those that the model asks for.
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


def _against_nllb_moe(name: str, title: str, of: Work, equal: tuple[str, ...], goal: float = math.inf) -> Comparison:
    """A row of the same work on both sides."""
    return Comparison(name=name, title=title, ours=of, other=of, by="nllb_moe", goal=goal, equal=equal)


def _rounded(name: str, of: Work, equal: tuple[str, ...]) -> Comparison:
    """The row after that of `of`, with our products rounded; the peer ignores the setting."""
    title = "the same, our matmuls in bfloat16 with float32 sums, theirs in float32"
    return _against_nllb_moe(name, title, _with(of, matmul_precision="bfloat16"), equal)


_ALL_EXPERTS = _with(work.TRANSLATION, kind="decode", capacity_factor=None)
_MANY = _with(work.TRANSLATION, experts=64)
# The dimensions of NLLB-200's smallest model. Its weights do not fit in a cache.
_WIDE = _with(_ALL_EXPERTS, model_dim=1024, hidden_dim=4096, heads=16, vocabulary=64_000)
# Weak scaling: each of 8 devices has the tokens, and the capacity, of `work.TRANSLATION`.
_EIGHT_TIMES = _with(work.TRANSLATION, groups=8, rows=8 * work.TRANSLATION.rows)
# Strong scaling: the same work split into 8, 64 tokens each.
_IN_EIGHT = _with(work.TRANSLATION, groups=8)
COMPARISONS = (
    _against_nllb_moe(
        "translation_8", "training step, 8 experts, against NllbMoe", work.TRANSLATION, _LEARNING, goal=0.75
    ),
    _rounded("translation_8_bfloat16", work.TRANSLATION, _LEARNING),
    _against_nllb_moe("translation_64", "training step, 64 experts, against NllbMoe", _MANY, _LEARNING, goal=0.1),
    Comparison(
        name="peak_8",
        title="training step, 8 experts, against the peak of a matmul",
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
    _against_nllb_moe("decoding", "beam search, against NllbMoe's generate", _ALL_EXPERTS, _SEARCHING, goal=0.4),
    _rounded("decoding_bfloat16", _ALL_EXPERTS, _SEARCHING),
    _against_nllb_moe(
        "decoding_wide",
        "beam search of a wide model (M 1024, H 4096, V 64,000), against NllbMoe's generate",
        _WIDE,
        _SEARCHING,
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
        for name, of, tokens, goal in (
            ("weak_scaling", _EIGHT_TIMES, "8 x 512", 1.3),
            ("strong_scaling", _IN_EIGHT, "512", math.inf),
        )
        for mesh in ("8", "4x2")
    ),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """A row: seconds of the work on both sides and their ratio, or the reason why there is none.

    Attributes:
      ours, other: the least CPU seconds of all rounds; `other` is scaled as `Comparison.per` says.
      ratio: ours / other.
      low, high: quartiles of the ratios of single rounds.
      facts: the facts of the two workers.
      losses: (first, last) of each side that trains.
      missing: why there are no numbers, or empty.
      is_failure: whether that is an error of the measurement, not a peer that cannot be installed here.
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
    is_failure: bool = False


@dataclasses.dataclass(frozen=True)
class Directories:
    """The directories of a run: `directory` for logs and the cache of our programs, `venvs` for the peers."""

    directory: pathlib.Path
    venvs: pathlib.Path

    def worker(self, name: str, who: str, work: Work | Learning) -> Worker:
        """Returns a ready worker: the peer `who`, or our module of that name."""
        if who in (OURS, PROFILE, LEARNER):
            command = [sys.executable, "-m", f"tools.benchmarks.{who}"]
            environment = {**OUR_ENVIRONMENT, "LINGVO_MOE_CACHE": str(self.directory / "cache")}
        else:
            command = [str(environments.python_of(who, self.venvs)), "-m", f"tools.benchmarks.peers.{who}"]
            environment = {}
        return Worker(name, command, dataclasses.asdict(work), self.directory / "logs", environment)


def run(comparison: Comparison, rounds: int, directories: Directories, advance: Callable[[], None]) -> Result:
    """Measures both sides, one after the other in each of the rounds.

    Raises:
      PeerMissingError: a peer's environment cannot be made.
      UserError: a worker ends early, or what they did cannot be compared.
    """
    with contextlib.ExitStack() as stack:
        asked = (("ours", OURS, comparison.ours), ("other", comparison.by, comparison.other))
        sides = [
            (stack.enter_context(directories.worker(f"{comparison.name}.{side}", who, work)), work.times)
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
        for works, known, list_of in zip((comparison.ours, comparison.other), facts, measured)
        if (pair := check_losses(comparison.name, works, known, list_of))
    )
    return summary(comparison, facts, [[m.seconds for m in list_of] for list_of in measured], losses)


def summary(
    comparison: Comparison,
    facts: Sequence[dict],
    seconds: Sequence[Sequence[float]],
    losses: tuple[tuple[float, float], ...] = (),
) -> Result:
    """Returns the row of a comparison from the seconds of all rounds of both sides."""
    factor = 1.0
    if comparison.per:
        factor = (comparison.flop or facts[0][comparison.per]) / facts[1][comparison.per]
    ours, other = seconds[0], [factor * value for value in seconds[1]]
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours, other)], n=4, method="inclusive")
    return Result(comparison.name, min(ours), min(other), min(ours) / min(other), low, high, tuple(facts), losses)


def check_equal(comparison: Comparison, facts: Sequence[dict]):
    """Raises UserError if the two sides do not do the same work."""
    differ = [name for name in comparison.equal if facts[0][name] != facts[1][name]]
    if differ:
        listed = ", ".join(f"{name} {facts[0][name]} and {facts[1][name]}" for name in differ)
        raise UserError(f"{comparison.name}: the two sides differ in {listed}; their ratio is meaningless.")
    rows = [side["expert_rows"] for side in facts if "expert_rows" in side]
    if len(rows) == 2 and not _FEWEST_ROWS <= rows[1] / rows[0] <= 1.0:
        raise UserError(
            f"{comparison.name}: our experts compute {rows[0]} rows, the other's {rows[1]}; a side skips work."
        )


def check_losses(name: str, work: Work, facts: dict, measured: Sequence[Measurement]) -> tuple[float, float] | None:
    """Returns the (first, last) loss of a training run; None for work without a loss.

    Raises:
      UserError: the loss does not start near chance, or does not fall.
    """
    if "first_loss" not in facts:
        return None
    first, last = facts["first_loss"], measured[-1].losses[-1]
    if not (math.isfinite(first) and math.isfinite(last) and first > 0):
        raise UserError(f"{name}: the losses are {first} and {last}, expected finite ones.")
    chance = math.log(work.vocabulary)
    if work.kind == "train" and (abs(first / chance - 1) > _FARTHEST_FROM_CHANCE or last >= first):
        raise UserError(
            f"{name}: the loss starts at {first:.2f} and ends at {last:.2f}; expected near ln {work.vocabulary} "
            f"= {chance:.2f}, and falling; its time is meaningless."
        )
    return first, last
