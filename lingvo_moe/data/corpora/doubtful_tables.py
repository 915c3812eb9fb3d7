"""Tables of texts (.tsv) that look like something else than source and English: swapped columns, or a header.

They are read as they are, and a sentence says what they look like.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import py3langid

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import catalogs

_MOST_ROWS = 300  # that are looked at: of the beginning, as a table in another order has its columns swapped everywhere
_FEWEST_LETTERS = 50  # of each side: the language of a shorter text is uncertain
_ENGLISH = ("en", "pcm")  # Nigerian Pidgin has English words
_OTHER_TITLES = frozenset("source target translation original text lang language".split())
_NAMES = frozenset(
    "afrikaans albanian amharic arabic armenian azerbaijani basque belarusian bengali bosnian breton bulgarian burmese "
    "catalan chinese croatian czech danish dutch english esperanto estonian finnish french galician georgian german "
    "greek gujarati hebrew hindi hungarian icelandic indonesian irish italian japanese kannada kazakh khmer korean "
    "kurdish kyrgyz lao latin latvian lithuanian macedonian malay malayalam marathi mongolian nepali norwegian occitan "
    "persian polish portuguese punjabi romanian russian serbian sinhala slovak slovenian spanish swahili swedish tajik "
    "tamil tatar telugu thai turkish turkmen ukrainian urdu uzbek vietnamese welsh".split()
)


def warnings(inputs: Iterable[str | Path]) -> list[str]:
    """Returns sentences about the tables among the user's directories and files, which can be read."""
    found = []
    for root in dict.fromkeys(Path(os.path.realpath(path)) for path in inputs):
        for path in [root] if root.is_file() else sorted(root.rglob("*.tsv")):
            # Links out of the directory are not read.
            if path.suffix == ".tsv" and path.is_file() and path.resolve().is_relative_to(root):
                rows = list(itertools.islice(catalogs.table_rows(path), _MOST_ROWS))
                found += _problems(Path(root.name, path.relative_to(root)), [row for _, row in rows])
    return found


def _problems(name: Path, rows: list[list[str]]) -> Iterator[str]:
    if rows and all(map(_is_title, rows[0])):
        shown = "<TAB>".join(rows[0])
        yield f"{name}:1: {shown} looks like a header, and is read as a pair of texts. Remove it."
    sources, english = ("\n".join(row[column] for row in rows) for column in (-2, -1))
    if _is_english(sources) and _is_english(english) is False:
        yield (
            f"{name}: most sources are English, and most texts of the English column are not. Expected "
            f"source<TAB>English: swap the columns."
        )


def _is_title(cell: str) -> bool:
    """Whether a cell is the name or the label of a language, or a usual title of a column."""
    title = cell.strip().casefold()
    return title in _NAMES or title in _OTHER_TITLES or (len(title) == 2 and languages.names_language(title))


def _is_english(text: str) -> bool | None:
    """Returns whether most of a text is English, by the character n-grams of py3langid; None of a short one."""
    if sum(map(str.isalpha, text)) < _FEWEST_LETTERS:
        return None
    return py3langid.classify(text)[0] in _ENGLISH
