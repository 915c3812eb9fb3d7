"""Other names in training pairs, so that a model learns to copy names that it has never seen.

A name is a capitalised word that stands on both sides of a pair: of a program, a person, a place. A corpus has few of
them, each in many pairs, so a model learns them by heart and misspells others. With name substitution, a share of the
pairs with names has new ones, the same on both sides. They are made of the beginning of one name of the corpus and the
end of another ("Ubuntu" and "Firefox": "Ubufox"), so hardly any is read twice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from lingvo_moe.data.sentence_balance import PairList

# Not a part of a longer word, of an identifier (x_Name), a path, an address, an entity (&Name;), an escape (\Name) or a
# placeholder (%Name, $Name).
_NAME = re.compile(r"(?<![\w%&\\$@./-])[A-Z][^\W_]{2,}(?![\w/]|-\w)")
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
        found = {name for pairs in languages for pair in _spread(pairs) for name in shared_names(*pair)}
        # Acronyms are made of acronyms, as they are split into pieces in another way.
        self._names = {upper: sorted(name for name in found if name.isupper() == upper) for upper in (True, False)}
        self._share, self._seed = share, seed

    def __call__(self, number: int, source: str, english: str) -> tuple[str, str]:
        """Returns the texts of example `number`, with new names or as they are."""
        names = shared_names(source, english)
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
    """Returns the names of a pair, each once: capitalised words of three characters or more that both sides have."""
    there = set(_NAME.findall(source))
    return [name for name in dict.fromkeys(_NAME.findall(english)) if name in there]


def _spread(pairs: PairList) -> Iterator[tuple[str, str]]:
    """Yields at most twice `_READ_PAIRS` pairs, from the first to the last at equal distances."""
    return (pairs[index] for index in range(0, len(pairs), max(len(pairs) // _READ_PAIRS, 1)))
