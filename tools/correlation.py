"""Spearman's rank correlation, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scipy import stats


def text(series: Mapping[str, Sequence[float]], digits: int = 2) -> str:
    """Returns the correlation of the ranks of two series, where equal values have their mean rank.

    Args:
      series: two by name, of equal lengths.
      digits: after the point.

    Returns:
      The correlation; or why it is not defined, for a series of equal values, as that of one value is.
    """
    for name, values in series.items():
        if len(set(values)) < 2:
            return f"not defined: all {name} are equal"
    first, second = series.values()
    found = stats.spearmanr(first, second)
    return f"{found.statistic:.{digits}f}"  # pyright: ignore[reportAttributeAccessIssue]; SciPy has no stubs
