"""Protects lines of output from the plural of one, and small files from a size of zero."""

import pytest

from lingvo_moe.utils.counts import counted, file_size, left_out, lines


def test_one_has_no_plural():
    """One is singular, all other numbers are plural."""
    assert [counted(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]


def test_what_is_left_out():
    """The verb agrees with the noun."""
    assert left_out(1, "text", "of 8 tokens or more") == "1 text of 8 tokens or more was left out."
    assert left_out(2, "text", "of 8 tokens or more") == "2 texts of 8 tokens or more were left out."


@pytest.mark.parametrize(
    ("size", "text"), [(100, "0.1 KiB"), (2**20 - 1, "1024.0 KiB"), (2**20, "1.0 MiB"), (3 * 2**29, "1536.0 MiB")]
)
def test_file_sizes(size, text):
    """Sizes below one MiB are in KiB."""
    assert file_size(size) == text


def test_many_lines_are_not_all_named():
    assert [lines(numbers) for numbers in ([], [3], [3, 7])] == ["", "line 3", "lines 3, 7"]
    assert lines(range(1, 13)) == "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more"
