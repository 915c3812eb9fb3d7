"""The train/valid/test split: no English sentence is in two splits, and no training sentence is nearly a held-out one.

The same English text occurs in many languages' catalogs, so a split by pair would put almost every test sentence into
the training set of some other language. Here the English key decides, once for all languages; near-duplicates of
held-out sentences are not trained on. A validation sentence may be nearly the same as a test sentence: the two
held-out splits are not compared with each other.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from lingvo_moe.data.corpora.cleaning import PLACEHOLDER, count_placeholders
from lingvo_moe.utils import progress

MIN_WORDS, MAX_WORDS = 4, 40  # of a held-out key
MIN_WORDS_FOR_OVERLAP = 8
MAX_OVERLAP = 0.8
_NGRAM = 4
_WILDCARD = "*"

_TAG = re.compile(r"<[^<>]*>")
# Deleted, not replaced by a space: inside a word they do not separate it (don't, E_xit).
_INSIDE_WORD = re.compile("[_&~'’\u200c\u200d]")
_DIGITS = re.compile(r"\d+")
_WORD = re.compile(r"[^\W_]+")


class HeldOutFraction(NamedTuple):
    """The fraction of the eligible keys that a held-out split gets.

    Attributes:
      fraction: in a large corpus.
      max_fraction: in a small corpus.
      min_keys: with fewer keys than this, the fraction grows up to `max_fraction`.
    """

    fraction: float
    max_fraction: float
    min_keys: int


TEST = HeldOutFraction(fraction=0.05, max_fraction=0.10, min_keys=60)
VALID = HeldOutFraction(fraction=0.02, max_fraction=0.05, min_keys=30)


class KeySplit(NamedTuple):
    """The split of the English keys. A key in none of the sets is a training key.

    Attributes:
      test, valid: keys of the held-out splits.
      near_duplicates: keys that are not held out and within one word of a held-out key; in no split.
      overlapping: keys that a training sentence contains nearly completely, so they are not held out; in no split.
      eligible: the number of keys that could be held out.
      all: the number of all keys.
      given: those of the held-out keys that others have chosen.
    """

    test: frozenset[str]
    valid: frozenset[str]
    near_duplicates: frozenset[str]
    overlapping: frozenset[str]
    eligible: int
    all: int
    given: frozenset[str] = frozenset()

    def counts(self) -> dict[str, int]:
        """Returns the number of keys in each set, by its name."""
        return {name: value if isinstance(value, int) else len(value) for name, value in self._asdict().items()}


@functools.lru_cache(maxsize=1 << 20)
def english_key(english: str) -> str:
    """Returns the deduplication key of a text: lower-case words, numbers as 0, no placeholders, tags or punctuation."""
    text = PLACEHOLDER.sub(" ", english) if count_placeholders(english) else english
    text = _INSIDE_WORD.sub("", _TAG.sub(" ", text).lower())
    return " ".join(_WORD.findall(_DIGITS.sub("0", text)))


def can_be_held_out(english: str) -> bool:
    """Returns whether this text is eligible for the test or validation split: 4 to 40 words and no placeholder."""
    key = english_key(english)
    return _is_long(key) and key.count(" ") + 1 <= MAX_WORDS and not count_placeholders(english)


def _is_long(key: str) -> bool:
    return key.count(" ") + 1 >= MIN_WORDS


def hash_fraction(text: str) -> float:
    """Returns a number in [0, 1) that is a hash of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / (1 << 56)


def split_keys(english: Iterable[str], given: Mapping[str, Collection[str]] = types.MappingProxyType({})) -> KeySplit:
    """Splits all English keys.

    A key's hash decides: the lowest 5 % of the eligible keys are test keys, the highest 2 % validation keys. If those
    are fewer than 60 and 30 keys, the ranges grow to that many keys, up to 10 % and 5 %.

    Args:
      english: every English text of the corpus, without those of held-out splits that are given.
      given: the keys of a split that others have chosen, `test` or `valid`. All are in that split, eligible or not;
        those of fewer than 4 words have no near-duplicates.
    """
    eligible, keys = set(), set()
    for text in english:
        key = english_key(text)
        keys.add(key)
        if can_be_held_out(text):
            eligible.add(key)
    hashes = {key: hash_fraction(key) for key in eligible}
    test_end = _range_length(sorted(hashes.values()), TEST)
    valid_start = 1 - _range_length(sorted(1 - value for value in hashes.values()), VALID)
    test = set(given.get("test", ())) or {key for key, value in hashes.items() if value <= test_end}
    valid = set(given.get("valid", ())) or {key for key, value in hashes.items() if value >= valid_start} - test
    others = frozenset().union(*given.values())
    near = near_duplicates(keys - test - valid, filter(_is_long, test | valid))
    overlapping = ngram_overlaps((test | valid) - others, keys - test - valid - near)
    return KeySplit(
        frozenset(test - overlapping),
        frozenset(valid - overlapping),
        frozenset(near),
        frozenset(overlapping),
        len(eligible),
        len(keys | others),
        others,
    )


def split_unseen(english: Iterable[str], trained_on: Collection[str]) -> KeySplit:
    """Returns the keys on which a model can be tested that was trained on other texts.

    Args:
      english: every English text that may be tested on.
      trained_on: the keys of the training split of the other corpus.

    Returns:
      A split whose test keys are all eligible keys that are neither in `trained_on`, nor within one word of a key in
      it, nor nearly contained in one; it has no training keys.
    """
    texts = list(english)
    keys = {english_key(text) for text in texts}
    eligible = {english_key(text) for text in texts if can_be_held_out(text)}
    unseen = eligible - set(trained_on)
    near = near_duplicates(unseen, trained_on)
    overlapping = ngram_overlaps(unseen - near, trained_on)
    return KeySplit(
        frozenset(unseen - near - overlapping),
        frozenset(),
        frozenset(near),
        frozenset(overlapping),
        len(eligible),
        len(keys),
    )


def _range_length(distances: list[float], held_out: HeldOutFraction) -> float:
    """Returns the length of a split's range of hashes: `fraction`, or that of `min_keys` keys, up to `max_fraction`."""
    if not distances:
        return 0.0
    distance = distances[min(held_out.min_keys, len(distances)) - 1]
    return min(max(held_out.fraction, distance), held_out.max_fraction)


def near_duplicates(candidates: Collection[str], held_out: Iterable[str]) -> set[str]:
    """Returns the candidates that substituting, inserting or deleting one word turns into a held-out key.

    Every held-out key is indexed by itself, by itself without each word, and by itself with each word masked; the
    neighbours of a candidate are then found by look-up, not by comparing all pairs. Keys that are more than a word
    longer than every candidate are left out: they are near none, and the index of a key takes memory with the square
    of its length.
    """
    max_words = max((key.count(" ") + 1 for key in candidates), default=0) + 1
    keys, shorter, masked = {key for key in held_out if key.count(" ") < max_words}, set(), set()
    for key in keys:
        words = key.split(" ")
        shorter.update(_deletions(words))
        masked.update(_masked(words))
    near, longest = set(), max((key.count(" ") + 1 for key in keys), default=0)
    for key in progress.track(candidates, "comparing with held-out sentences", unit="sentences"):
        words = key.split(" ")
        if len(words) > longest + 1:
            continue
        if key in shorter or not keys.isdisjoint(_deletions(words)) or not masked.isdisjoint(_masked(words)):
            near.add(key)
    return near


def _deletions(words: list[str]) -> Iterator[str]:
    return (" ".join(words[:i] + words[i + 1 :]) for i in range(len(words)))


def _masked(words: list[str]) -> Iterator[str]:
    return (" ".join([*words[:i], _WILDCARD, *words[i + 1 :]]) for i in range(len(words)))


def ngram_overlaps(held_out: Collection[str], training: Collection[str]) -> set[str]:
    """Returns the held-out keys of at least 8 words that share 80 % of their 4-grams with one training key.

    A training key without any of the rarest 4-grams of a held-out key, one more than may be missing, shares too few.
    Only those are indexed: sentences of one template share the others, so an index of all would compare all pairs.
    """
    ngrams_of = {key: _ngrams(key) for key in held_out if key.count(" ") + 1 >= MIN_WORDS_FOR_OVERLAP}
    required = {key: math.ceil(MAX_OVERLAP * len(ngrams)) for key, ngrams in ngrams_of.items()}
    frequency = collections.Counter(ngram for ngrams in ngrams_of.values() for ngram in ngrams)
    keys_with: Mapping[str, list[str]] = collections.defaultdict(list)
    for key, ngrams in ngrams_of.items():
        for ngram in sorted(ngrams, key=frequency.__getitem__)[: len(ngrams) - required[key] + 1]:
            keys_with[ngram].append(key)
    overlapping: set[str] = set()
    for sentence in progress.track(training, "comparing 4-grams with training sentences", unit="sentences"):
        ngrams = _ngrams(sentence)
        similar = {key for ngram in ngrams for key in keys_with.get(ngram, ())} - overlapping
        overlapping.update(key for key in similar if len(ngrams & ngrams_of[key]) >= required[key])
    return overlapping


def _ngrams(key: str) -> set[str]:
    words = key.split(" ")
    return {" ".join(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)}
