"""Elements of the report's page; every text in them is escaped when the page is written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

# Elements after which the source has a new line, for people who read it.
_BLOCKS = frozenset(
    (
        "html",
        "head",
        "body",
        "meta",
        "title",
        "style",
        "header",
        "footer",
        "main",
        "nav",
        "section",
        "h1",
        "h2",
        "h3",
        "p",
        "figure",
        "figcaption",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "div",
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
    )
)
Child = Element | str | None


def element(tag: str, *children: Child, **attributes: str) -> Element:
    """An element with texts and elements in it; None is left out, and `class_`, `aria_label` stand for `class`, `aria-label`."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, str):
            _append_text(made, child)
        elif child is not None:
            made.append(child)
    made.tail = "\n" if tag in _BLOCKS else None
    return made


def _append_text(parent: Element, text: str):
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def code(text: str) -> Element:
    """A command or a name as one types it."""
    return element("code", text)


def write(page: Element) -> bytes:
    """The page as HTML 5."""
    text = ElementTree.tostring(page, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text.strip()}\n".encode("utf-8", "xmlcharrefreplace")


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      head: what it shows.
      source: whose figure that is, in brackets; empty for what names the row.
      group: `paper`, `here` or another heading that neighbouring columns share.
      words: whether it shows words, aligned left.
    """

    head: str
    source: str = ""
    group: str = ""
    words: bool = False


@dataclasses.dataclass(frozen=True)
class Span:
    """One cell over so many columns, with words in place of their numbers."""

    columns: int
    content: tuple[Child, ...]


Cell = str | Span


def table(caption: Iterable[Child], columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> Element:
    """A table that can be scrolled sideways on a narrow screen; the first cell of a row is its heading."""
    body = element("tbody", *(_row(cells, columns) for cells in rows))
    made = element("table", element("caption", *caption), element("thead", *_heads(columns)), body)
    return element(
        "div", made, class_="scroll", tabindex="0", role="region", aria_label="table, can be scrolled sideways"
    )


def _heads(columns: Sequence[Column]) -> list[Element]:
    heads = element("tr")
    for index, column in enumerate(columns):
        source = element("small", column.source) if column.source else None
        heads.append(
            element(
                "th",
                f"{column.head} " if source is not None else column.head,
                source,
                scope="col",
                class_=_classes(column) if index else "words",
            )
        )
    if not any(column.group for column in columns):
        return [heads]
    groups = element("tr")
    for group, members in itertools.groupby(columns, key=lambda column: column.group):
        groups.append(
            element("th", group, colspan=str(len(list(members))), scope="colgroup", class_=f"group {group}".strip())
            if group
            else element("td", colspan=str(len(list(members))))
        )
    return [groups, heads]


def _row(cells: Sequence[Cell], columns: Sequence[Column]) -> Element:
    made = element("tr", element("th", str(cells[0]), scope="row"))
    at = 1
    for cell in cells[1:]:
        if isinstance(cell, Span):
            made.append(
                element("td", *cell.content, colspan=str(cell.columns), class_=f"words {columns[at].group}".strip())
            )
            at += cell.columns
        else:
            made.append(element("td", cell, class_=_classes(columns[at])))
            at += 1
    if at != len(columns):
        raise ValueError(f"{at} cells in a row of {len(columns)} columns, {cells[0]}")
    return made


def _classes(column: Column) -> str:
    return " ".join(filter(None, ("words" if column.words else "number", column.group)))
