"""Other names in training pairs, so that a model learns to copy names that it has never seen.

A name is a word in Latin letters with a capital that stands on both sides of a pair, such as "Firefox" or "HTML". A
corpus has few of them, each in many pairs, so a model learns them by heart and misspells others. With name
substitution, a share of the pairs with names has new ones, the same on both sides. They are made of the beginning of
one name of the corpus and the end of another ("Ubuntu" and "Firefox": "Ubuefox"), so hardly any is read twice.
"""

from __future__ import annotations

import collections
import random
import re
from collections.abc import Iterator, Sequence

from lingvo_moe.data.sentence_balance import PairList

# A letter or digit, but for the scripts that attach theirs to a Latin word: Chinese, Japanese, Korean.
_JOINED = r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]"
_LATIN = r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
# Not a part of a longer word, of an identifier (x_Name), a tag, a path, an address, an entity (&Name;), an escape
# (\Name) or a placeholder (%Name, $Name, {Name}, %(Name)s): those must stay as they are.
_NAME = re.compile(
    rf"(?<!{_JOINED})(?<![_%&\\$@./:{{<#-])(?<![%$]\()"
    rf"[A-Z\u00c0-\u00d6\u00d8-\u00de][{_LATIN}0-9]{{2,}}"
    rf"(?!{_JOINED}|[_/&@}}(]|[.-]\w|::|://)"
)
_WORD = re.compile(rf"[{_LATIN}0-9]{{3,}}")
_READ_PAIRS = 4000  # of each language, for the names of the corpus
_LONGEST_PART = 6  # characters, of a new name


class NameSubstitution:
    """Writes new names into a share of the pairs, as a pure function of (seed, number of the example)."""

    def __init__(self, languages: Sequence[PairList], share: float, seed: int):
        """Collects the names of the corpus.

        Args:
          languages: the training pairs of each language.
          share: of the pairs with names, 0 to 1.
          seed: of the choice.
        """
        sample = [pair for pairs in languages for pair in _spread(pairs)]
        words = collections.Counter(word for _, english in sample for word in _WORD.findall(english))
        found = {name for pair in sample for name in shared_names(*pair)}
        # A word that English mostly writes in lower case is none ("Color" in a title).
        self._ordinary = {name for name in found if not name.isupper() and words[name.lower()] > words[name]}
        names = found - self._ordinary
        # Acronyms are made of acronyms, as they are split into pieces in another way.
        self._names = {upper: sorted(name for name in names if name.isupper() == upper) for upper in (True, False)}
        self._share, self._seed = share, seed

    def __call__(self, number: int, source: str, english: str) -> tuple[str, str]:
        """Returns the texts of example `number`, with new names or as they are."""
        names = [name for name in shared_names(source, english) if name not in self._ordinary]
        if not names:
            return source, english
        choose = random.Random(f"{self._seed} {number}")
        if choose.random() >= self._share:
            return source, english
        others = {name: self._new_name(name, choose) for name in names}

        def other(match: re.Match[str]) -> str:
            return others.get(match[0], match[0])

        return _NAME.sub(other, source), _NAME.sub(other, english)

    def _new_name(self, name: str, choose: random.Random) -> str:
        """Returns a new name for `name`, or `name` itself if the corpus has no others of its kind."""
        names = self._names[name.isupper()] or [name]
        first, second = choose.choice(names), choose.choice(names)
        return first[: len(first) // 2][:_LONGEST_PART] + second[len(second) // 2 :][-_LONGEST_PART:]


def shared_names(source: str, english: str) -> list[str]:
    """Returns the names of a pair, each once: those that both sides have equally often, and in no longer word."""
    there, here = (collections.Counter(_NAME.findall(text)) for text in (source, english))
    return [name for name, count in here.items() if count == there[name] == source.count(name) == english.count(name)]


def _spread(pairs: PairList) -> Iterator[tuple[str, str]]:
    """Yields at most twice `_READ_PAIRS` pairs, from the first to the last at equal distances."""
    return (pairs[index] for index in range(0, len(pairs), max(len(pairs) // _READ_PAIRS, 1)))
