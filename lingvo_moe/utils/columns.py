"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], has_numbers: bool = True) -> list[str]:
    """Returns a line for each row, without spaces at its end; columns are two spaces apart.

    Args:
      rows: of equal length, at least one.
      has_numbers: whether all columns but the first are aligned on the right, otherwise on the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.rjust(width) if has_numbers and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
