"""The text of a search for layouts: what the cost model predicts [m], what the compiler reports [c], and the flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lingvo_moe.analysis.layout_search import Found, Ranking
from lingvo_moe.analysis.plan_text import duration, size
from lingvo_moe.sharding.layout import AxisRule

_SHOWN = 8
_LEGEND = (
    "[m] the cost model   [c] the compiler   [c, m] the plan: cycles of the compiler, links of our model\n"
    "GiB and MiB are those of one device."
)


def predictions(ranking: Ranking) -> str:
    """Returns the best choices by the cost model, before anything is compiled."""
    own = ranking.own
    faster = f", {ranking.num_faster(own):,} are faster than the model's own" if own else ""
    lines = [
        _LEGEND,
        f"{ranking.num_candidates:,} legal layouts; {len(ranking.best):,} fit and are not many times slower than the "
        f"fastest{faster}, by the cost model [m]:",
        *(line for number, found in enumerate(_first(ranking), 1) for line in _prediction(str(number), found)),
        *(_prediction("own", own) if own else ["own the model's own settings do not fit this mesh"]),
    ]
    return "\n".join(lines) + "\n"


def compiled(found: Found) -> str:
    """Returns a line for a candidate that has been compiled."""
    return f"{flags(found)}: {_outcome(found)}, predicted {_seconds(found.estimate.seconds)} [m]"


def results(compiled: Sequence[Found]) -> str:
    """Returns the table of the compiled candidates, the fastest first, and the flags of the first."""
    ranked = sorted(compiled, key=lambda found: -found.tokens_per_second)
    lines = [
        "",
        f"{'':>3} {'predicted [m]':>22} {'compiled [c, m]':>22} {'tokens/s':>12}  settings, and what takes time",
    ]
    for number, found in enumerate(ranked, 1):
        estimate, speed = found.estimate, found.tokens_per_second
        predicted = f"{_seconds(estimate.seconds):>10} {size(estimate.bytes):>11}"
        lines.append(f"{number:>3} {predicted:>22} {_short(found):>22} {speed:12,.0f}  {flags(found)}")
        lines.append(f"{'':64}{estimate.reason()}")
    lines += ["", *_advice(ranked)]
    return "\n".join(lines) + "\n"


def flags(found: Found) -> str:
    """Returns the flags of `plan` or `train` that choose a candidate."""
    if not found.changes:
        return "the model's own settings"
    return " ".join(
        f"--{change}" if change.startswith("mesh=") else f"--set={change}" for change in sorted(found.changes)
    )


def registration(rules: Sequence[AxisRule], axes: int) -> str:
    """Returns the lines of a file for `--import` that give a layout a name."""
    lines = [
        f"    AxisRule({rule.logical_axes!r}, {rule.mesh_axes!r}{', fallback=True' if rule.fallback else ''}),"
        for rule in rules
    ]
    return "\n".join(['register_layout("found", (', *lines, f"), num_mesh_axes={axes})"])


def _first(ranking: Ranking) -> Iterator[Found]:
    for _, found in zip(range(_SHOWN), ranking.choices()):
        yield found


def _prediction(label: str, found: Found) -> Iterator[str]:
    estimate = found.estimate
    predicted = f"{_seconds(estimate.seconds):>10} {size(estimate.bytes):>11}"
    if found.may_fit:
        yield f"{label:>3} {predicted} {estimate.tokens_per_second:12,.0f} tokens/s  {flags(found)}"
    else:
        yield f"{label:>3} {predicted} DOES NOT FIT, a device has {size(estimate.available)}  {flags(found)}"
    yield f"{'':17}{estimate.reason()}"


def _outcome(found: Found) -> str:
    """The result of the compiler, in words."""
    made = found.plan
    if made is None:
        return f"refused: {found.refusal}"
    if not made.fits:
        return f"DOES NOT FIT, {size(made.memory.needed or 0)} needed [c]"
    return f"{_seconds(made.step_seconds)} [c, m], {size(made.memory.total)} [c]"


def _short(found: Found) -> str:
    made = found.plan
    if made is None:
        return "refused"
    if not made.fits:
        return f"no fit {size(made.memory.needed or 0)}"
    return f"{_seconds(made.step_seconds):>10} {size(made.memory.total):>11}"


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds).strip()


def _advice(ranked: Sequence[Found]) -> Iterator[str]:
    """How to use the fastest."""
    best = ranked[0]
    if not best.tokens_per_second:
        yield "none of the compiled candidates fits; raise --budget or --top, or take a larger --topology."
        return
    if not best.changes:
        yield "the model's own settings are the fastest of the compiled ones."
        return
    own = next((found for found in ranked if not found.changes), None)
    if own and own.tokens_per_second:
        gain = best.tokens_per_second / own.tokens_per_second
        yield f"{gain:.2f} times as fast as the model's own settings. To use it:"
    else:
        yield "the model's own settings do not fit or were not compiled. To use the fastest:"
    yield f"  {flags(best)}"
    yield "or, in a file for --import, with --set=layout=found:"
    layout = best.candidate.layout
    yield from (f"  {line}" for line in registration(layout.rules, len(layout.mesh.shape)).splitlines())
