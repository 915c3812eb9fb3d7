"""Dates of Chinese, Japanese and Korean texts are written in numbers."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines.dates import with_numbers


@pytest.mark.parametrize(
    "line, expected",
    [
        ("更新时间:2023年11月5日", "更新时间:2023-11-05"),
        ("2024 年 3 月 12 日に", "2024-03-12に"),
        ("２０２４年３月１２日", "2024-03-12"),
        ("2024년 3월 12일까지", "2024-03-12까지"),
        ("2024年13月1日, 4月1日, 12024年1月1日", "2024年13月1日, 4月1日, 12024年1月1日"),
    ],
)
def test_dates_are_in_numbers(line, expected):
    """Complete ones: without a year, or with a month that does not exist, the text stays."""
    assert with_numbers(line) == expected
