"""Train, validation and test sets that share no English sentence.

The same English text stands in many languages' catalogs, so a split by pair would put almost every test sentence into
the training set of some other language. Here the English key decides, once for all languages.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from lingvo_moe.data.cleaning import PLACEHOLDER, count_placeholders
from lingvo_moe.utils import progress

MIN_WORDS, MAX_WORDS = 4, 40  # of a held-out key
MIN_WORDS_OF_OVERLAP = 8
MAX_OVERLAP = 0.8
_GRAM = 4
_WILDCARD = "*"

_TAG = re.compile(r"<[^<>]*>")
# Deleted rather than made a space: inside a word they do not part it (don't, E_xit).
_INSIDE_WORD = re.compile("[_&~'’\u200c\u200d]")
_DIGITS = re.compile(r"\d+")
_WORD = re.compile(r"[^\W_]+")


class Share(NamedTuple):
    """How much of the eligible keys a held-out split gets."""

    usual: float  # of the keys
    most: float  # of the keys, in a small corpus
    enough: int  # keys; with fewer than this the share grows up to `most`


TEST = Share(usual=0.05, most=0.10, enough=60)
VALID = Share(usual=0.02, most=0.05, enough=30)


class Split(NamedTuple):
    """Which English keys are whose. A key in none of the sets is a training key."""

    test: frozenset[str]
    valid: frozenset[str]
    near: frozenset[str]  # within one word of a held-out key: not in any split
    overlapping: frozenset[str]  # would be held out, but a training sentence has nearly all of it: not in any split
    eligible: int  # how many keys might have been held out
    all: int  # how many keys there are

    def counts(self) -> dict[str, int]:
        """How many keys are in each set, by its name."""
        return {name: value if isinstance(value, int) else len(value) for name, value in self._asdict().items()}


@functools.lru_cache(maxsize=1 << 20)
def english_key(english: str) -> str:
    """Returns what wordings of one sentence share: lower-case words, numbers as 0, no placeholder, tag or mark."""
    text = PLACEHOLDER.sub(" ", english) if count_placeholders(english) else english
    text = _INSIDE_WORD.sub("", _TAG.sub(" ", text).lower())
    return " ".join(_WORD.findall(_DIGITS.sub("0", text)))


def can_be_held_out(english: str) -> bool:
    """Whether this text may stand in a test or validation set: 4 to 40 words and no placeholder."""
    return MIN_WORDS <= english_key(english).count(" ") + 1 <= MAX_WORDS and not count_placeholders(english)


def position(text: str) -> float:
    """Returns a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / (1 << 56)


def split_keys(english: Iterable[str]) -> Split:
    """Decides about all keys.

    A key's position (a hash) decides: the lowest 5 % of the eligible ones are test keys, the highest 2 % validation
    keys. Where that gives fewer than 60 and 30 keys, the range grows until it does, up to 10 % and 5 %.

    Args:
      english: every English text of the corpus.
    """
    eligible, keys = set(), set()
    for text in english:
        key = english_key(text)
        keys.add(key)
        if can_be_held_out(text):
            eligible.add(key)
    positions = {key: position(key) for key in eligible}
    test_end = _reach(sorted(positions.values()), TEST)
    valid_start = 1 - _reach(sorted(1 - at for at in positions.values()), VALID)
    test = {key for key, at in positions.items() if at <= test_end}
    valid = {key for key, at in positions.items() if at >= valid_start} - test
    near = within_one_word(keys - test - valid, test | valid)
    overlapping = contained(test | valid, keys - test - valid - near)
    return Split(
        frozenset(test - overlapping),
        frozenset(valid - overlapping),
        frozenset(near),
        frozenset(overlapping),
        len(eligible),
        len(keys),
    )


def _reach(distances: list[float], share: Share) -> float:
    """Returns how far a split's range goes: the usual share, or up to its key number `enough`, but at most `most`."""
    if not distances:
        return 0.0
    far_enough = distances[min(share.enough, len(distances)) - 1]
    return min(max(share.usual, far_enough), share.most)


def within_one_word(candidates: Collection[str], held_out: Iterable[str]) -> set[str]:
    """Returns the candidates that one word's substitution, insertion or deletion turns into a held-out key.

    Every held-out key is filed under itself, under itself less each word, and under itself with each word masked; the
    neighbours of a candidate are then found by look-up, not by comparing all with all.
    """
    whole, shorter, masked = set(held_out), set(), set()
    for key in whole:
        words = key.split(" ")
        shorter.update(_less_one(words))
        masked.update(_masked(words))
    near = set()
    for key in progress.track(candidates, "comparing with held-out sentences", unit="sentences"):
        words = key.split(" ")
        if len(words) > MAX_WORDS + 1:
            continue
        if key in shorter or not whole.isdisjoint(_less_one(words)) or not masked.isdisjoint(_masked(words)):
            near.add(key)
    return near


def _less_one(words: list[str]) -> Iterator[str]:
    return (" ".join(words[:i] + words[i + 1 :]) for i in range(len(words)))


def _masked(words: list[str]) -> Iterator[str]:
    return (" ".join(words[:i] + [_WILDCARD] + words[i + 1 :]) for i in range(len(words)))


def contained(held_out: Collection[str], training: Collection[str]) -> set[str]:
    """Returns the held-out keys of at least 8 words that have 80 % of their 4-grams in one training key."""
    grams_of = {key: _grams(key) for key in held_out if key.count(" ") + 1 >= MIN_WORDS_OF_OVERLAP}
    keys_with: Mapping[str, list[str]] = collections.defaultdict(list)
    for key, grams in grams_of.items():
        for gram in grams:
            keys_with[gram].append(key)
    found = set()
    for sentence in progress.track(training, "looking for their parts in training sentences", unit="sentences"):
        shared = collections.Counter(key for gram in _grams(sentence) for key in keys_with.get(gram, ()))
        found.update(key for key, count in shared.items() if count >= MAX_OVERLAP * len(grams_of[key]))
    return found


def _grams(key: str) -> set[str]:
    words = key.split(" ")
    return {" ".join(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)}
