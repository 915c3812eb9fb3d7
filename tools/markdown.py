"""Markdown: tables, and the generated parts of a page, between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table, without a line break at its end."""
    return "\n".join(map(row, (header, ["---"] * len(header), *rows)))


def row(cells: Sequence[str]) -> str:
    """Returns the line of a row."""
    return f"| {' | '.join(cells)} |"


def replace(page: pathlib.Path, name: str, text: str):
    """Replaces the text between the markers `name` of a page; raises UserError as `around` does."""
    before, after = around(page, name)
    with output_files.atomic_writer(str(page)) as file:
        file.write(f"{before}\n{text}\n{after}")


def check(flag: str, page: str | pathlib.Path, *names: str):
    """Raises UserError unless the page that a flag names has all these markers; call this before the work."""
    for name in names:
        try:
            around(pathlib.Path(page), name)
        except UserError as error:
            raise UserError(f"{flag}={error}") from None


def around(page: pathlib.Path, name: str) -> tuple[str, str]:
    """Returns a page up to its first marker `name` and from the second one on, with the markers.

    Raises:
      UserError: the page cannot be read, or a marker is missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    try:
        before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"{page}: {reason}; expected a page with the markers `{begin}` and `{end}`.") from None
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise UserError(f"{page}: the markers `{begin}` and `{end}` are missing; put them where the tables belong.")
    return f"{before}{begin}", f"{end}{after}"
