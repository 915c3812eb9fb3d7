"""Protects the file of `eval --translations`: what is written is what is read, whatever the texts contain."""

from __future__ import annotations

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.inference import translation_file
from lingvo_moe.inference.evaluation import Translated
from lingvo_moe.inference.lines.translation import Translation


def test_a_file_is_read_as_it_was_written(tmp_path):
    """Tabs, line ends and Unicode's line separators in a text end neither its field nor its line."""
    path = str(tmp_path / "read.tsv")
    sentences = [
        Translated("de", "ein\tTabulator", Translation("a\ntab", -1.0, confidence=0.25), "one\u2028tab "),
        Translated("ja", "", Translation("", 0.0), "\r\n"),
    ]
    translation_file.write(path, sentences)
    assert translation_file.read(path) == [
        ("de", "0.2500", "ein Tabulator", "a tab", "one tab"),
        ("ja", "1.0000", "", "", ""),
    ]


def test_a_line_with_other_fields_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "read.tsv"
    path.write_text("de\t0.5\ta\tb\tc\nde\t0.5\tone\ttwo\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2 has 4 fields; expected the 5 of `eval --translations`: language, conf"):
        translation_file.read(str(path))
