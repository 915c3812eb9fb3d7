"""Complete dates are written in numbers, whatever the language of the month."""

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
        ("2022年8月7日9時5分, 14时30分", "2022-08-07 9:05, 14:30"),
        ("2024年13月1日, 4月1日, 12024年1月1日", "2024年13月1日, 4月1日, 12024年1月1日"),
        ("Stand: 5. Februar 2023, 9:15 Uhr", "Stand: 2023-02-05, 9:15 Uhr"),
        ("Version 2.4.0 (12. März 2024)", "Version 2.4.0 (2024-03-12)"),
        ("Valable jusqu’au 1er mai 2025", "Valable jusqu’au 2025-05-01"),
        ("el 3 de octubre de 1990", "el 1990-10-03"),
        ("Обновлено 5 февраля 2023 г.", "Обновлено 2023-02-05"),
        ("3 октября 1990 года", "1990-10-03"),
        ("Ważne do 30 czerwca 2025 r.", "Ważne do 2025-06-30"),
        ("30 Haziran 2025'e kadar", "2025-06-30'e kadar"),
        ("2024. március 12. és 2024 m. kovo 12 d.", "2024-03-12 és 2024-03-12"),
        ("12. maaliskuuta 2024", "2024-03-12"),
    ],
)
def test_dates_are_in_numbers(line, expected):
    """Complete ones: without a year, or with a month that does not exist, the text stays."""
    assert with_numbers(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "12. März",
        "3 Dateien 2024",
        "45 mai 2024",
        "1 listopada 2024",  # November in Polish, October in Croatian
        "Seite 12 von 2024",
        "1.12 mars 2024",
    ],
)
def test_other_texts_stay(line):
    assert with_numbers(line) == line
