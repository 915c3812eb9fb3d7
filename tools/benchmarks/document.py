"""The table of a run, for the screen and for docs/performance.md, which keeps its prose outside the markers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from lingvo_moe.utils import columns
from tools import markdown
from tools.benchmarks.comparisons import COMPARISONS, Result

_BY_NAME = {comparison.name: comparison for comparison in COMPARISONS}
_HEAD = ("what", "ours, s", "other, s", "ratio", "quartiles", "goal", "met")


def rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Returns the cells of each row; the numbers of a row that was not measured are empty."""
    found = []
    for result in results:
        comparison = _BY_NAME[result.name]
        goal = f"{comparison.goal:.2f}" if math.isfinite(comparison.goal) else ""
        if result.missing:
            found.append((comparison.title, "", "", "", "", goal, "not measured"))
        else:
            met = "yes" if result.ratio <= comparison.goal else "no"
            found.append(
                (
                    comparison.title,
                    f"{result.ours:.4f}",
                    f"{result.other:.4f}",
                    f"{result.ratio:.2f}",
                    f"{result.low:.2f}-{result.high:.2f}",
                    goal,
                    met if goal else "",
                )
            )
    return found


def for_screen(results: Sequence[Result]) -> str:
    """Returns the table, and below it the facts of the workers."""
    lines = columns.aligned([_HEAD, *rows(results)])
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", *map(_facts, results)])


def for_page(run: Mapping) -> str:
    """Returns the generated part of the page, from a run's JSON."""
    results = [Result(**row) for row in run["results"]]
    lines = [
        f"{run['date']}, {run['machine']}, one core{_peak(results)}, {run['rounds']} rounds: `{run['command']}`",
        "",
        f"Vector instructions of the processor: {', '.join(run['flags'])}.",
        "",
        markdown.table(_HEAD, rows(results)),
        "",
        *(f"- {_facts(result)}" for result in results),
    ]
    return "\n".join(lines)


def _peak(results: Sequence[Result]) -> str:
    """Returns the rate of the product that a training step is compared with, in the same run."""
    for result in results:
        if _BY_NAME[result.name].per == "flop" and not result.missing and not _BY_NAME[result.name].flop:
            return f" with a peak of {result.facts[0]['flop'] / result.other / 1e9:.0f} GFLOP/s in float32"
    return ""


def by_part(profiles: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a table of a step's CPU time by part of the model, ordered by the first profile."""
    names = list(profiles)
    parts = sorted(
        {part for of_parts in profiles.values() for part in of_parts},
        key=lambda part: -profiles[names[0]].get(part, 0.0),
    )
    return markdown.table(
        ("part", *names), [(part, *(_share(profiles[name], part) for name in names)) for part in parts]
    )


def _share(parts: Mapping[str, float], part: str) -> str:
    return f"{parts[part]:.3f} s, {100 * parts[part] / sum(parts.values()):.0f} %" if part in parts else ""


def _facts(result: Result) -> str:
    """Returns weights, losses and versions of a row."""
    if result.missing:
        return f"{result.name}: not measured. {result.missing}"
    shown = []
    for facts in result.facts:
        numbers = [
            f"{facts[name]:,} {label}"
            for name, label in (("weights", "weights"), ("expert_rows", "rows of experts"))
            if name in facts
        ]
        shown.append(", ".join([*numbers, *(f"{package} {version}" for package, version in facts["versions"].items())]))
    losses = (
        "; losses " + " and ".join(f"{first:.2f} to {last:.2f}" for first, last in result.losses)
        if result.losses
        else ""
    )
    return f"{result.name}: {' against '.join(shown)}{losses}"
