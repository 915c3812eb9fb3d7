"""Protects the prose of pages with generated parts."""

from __future__ import annotations

import pytest

from lingvo_moe.errors import UserError
from tools import markdown


def test_table():
    """Its parser needs the line of dashes."""
    assert markdown.table(("a", "b"), [("1", "2"), ("3", "")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 |  |"


def test_page_keeps_its_prose(tmp_path):
    """Only the text between the markers is replaced."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n", encoding="utf-8")
    markdown.replace(page, "measured", "new")
    assert page.read_text(encoding="utf-8") == "before\n<!-- measured: begin -->\nnew\n<!-- measured: end -->\nafter\n"
    with pytest.raises(UserError, match=r"page.md: the markers `<!-- profiled: begin -->` and .* are missing"):
        markdown.replace(page, "profiled", "new")


def test_missing_page_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"none.md: No such file or directory; expected a page with the markers"):
        markdown.around(tmp_path / "none.md", "measured")
    with pytest.raises(UserError, match=r"^--page=.*none.md: No such file or directory; expected a page with the mark"):
        markdown.check("--page", tmp_path / "none.md", "measured")


def test_page_in_another_encoding_is_an_error(tmp_path):
    """A tool would end with a traceback, some after hours of measurements."""
    (tmp_path / "page.md").write_bytes("Ähre".encode("latin-1"))
    with pytest.raises(UserError, match=r"page.md: not UTF-8; expected a page with the markers"):
        markdown.around(tmp_path / "page.md", "measured")
