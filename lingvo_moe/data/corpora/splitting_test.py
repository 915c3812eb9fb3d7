"""Protects the train/valid/test split: no held-out sentence or near-duplicate of one is trained on."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings, strategies

from lingvo_moe.data.corpora import splitting

_KEYS = strategies.lists(strategies.sampled_from("abcd"), min_size=1, max_size=6).map(" ".join)
_LONG_KEYS = strategies.lists(strategies.sampled_from("abc"), min_size=1, max_size=14).map(" ".join)
_SENTENCES = strategies.lists(strategies.sampled_from("abcdefgh"), min_size=6, max_size=16).map(" ".join)
_REPLACEMENTS = strategies.tuples(strategies.integers(0, 15), strategies.integers(0, 2), strategies.sampled_from("abx"))


@pytest.mark.parametrize(
    "english, key",
    [
        ("Delete the File!", "delete the file"),
        ("Delete %s, now", "delete now"),
        ("Page 12 of 7.", "page 0 of 0"),
        ("Don’t E_xit", "dont exit"),
        ("<b>Bold</b> and {name}", "bold and"),
        ("real-time   text", "real time text"),
        ("...", ""),
        ("100% sure", "0 sure"),
    ],
)
def test_english_key(english, key):
    """Wordings that differ in case, punctuation, numbers or placeholders have one key."""
    assert splitting.english_key(english) == key


@given(strategies.text(alphabet="abc XYZ.,-'%s{}12", max_size=40))
def test_english_key_is_idempotent(english):
    """The key of a key is the key."""
    key = splitting.english_key(english)
    assert splitting.english_key(key) == key


@pytest.mark.parametrize(
    "english, allowed",
    [
        ("one two three four", True),
        ("one two three", False),
        ("one two three %s four", False),
        ("word " * 40, True),
        ("word " * 41, False),
    ],
)
def test_eligibility_for_a_held_out_split(english, allowed):
    """4 to 40 words and no placeholder."""
    assert splitting.can_be_held_out(english) is allowed


@given(strategies.sets(_KEYS), strategies.sets(_KEYS))
def test_near_duplicates_equal_a_comparison_of_all_pairs(candidates, held_out):
    """The index finds exactly the keys at word distance 1."""
    near = {key for key in candidates if any(_word_distance(key.split(), other.split()) <= 1 for other in held_out)}
    found = splitting.near_duplicates(candidates - held_out, held_out)
    assert found == near - held_out


@settings(max_examples=100)
@given(strategies.sets(_LONG_KEYS, max_size=6), strategies.sets(_LONG_KEYS, max_size=6), _REPLACEMENTS)
def test_near_duplicates_of_keys_of_all_lengths_equal_a_comparison_of_all_pairs(candidates, held_out, replacement):
    """Leaving out keys that are too long for every candidate changes nothing, also at the limit of one word."""
    held_out |= {_replaced(key, replacement) + end for key in candidates for end in ("", " a", " a b")}
    near = {key for key in candidates if any(_word_distance(key.split(), other.split()) <= 1 for other in held_out)}
    found = splitting.near_duplicates(candidates - held_out, held_out)
    assert found == near - held_out


def test_near_duplicates_do_not_index_keys_that_are_too_long():
    """The index of a key of 2000 words takes 20 MB, and a training split may have many long keys."""
    long = " ".join(["word"] * 2000)
    tracemalloc.start()
    try:
        assert splitting.near_duplicates(["a b c d"], [long, "a b c"]) == {"a b c d"}
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@settings(max_examples=200)
@given(
    strategies.sets(_SENTENCES, min_size=1, max_size=6),
    strategies.sets(_LONG_KEYS | _SENTENCES, max_size=6),
    strategies.lists(_REPLACEMENTS, min_size=1, max_size=6),
)
def test_ngram_overlaps_equal_a_comparison_of_all_pairs(held_out, training, replacements):
    """Property: indexing only the rarest 4-grams of a key finds the same keys as comparing it with every sentence."""
    training |= {_replaced(key, replacement) for key in held_out for replacement in replacements}
    overlapping = {
        key
        for key in held_out
        if len(key.split()) >= splitting.MIN_WORDS_FOR_OVERLAP
        and any(
            len(_four_grams(key) & _four_grams(other)) >= splitting.MAX_OVERLAP * len(_four_grams(key))
            for other in training
        )
    }
    assert splitting.ngram_overlaps(held_out, training) == overlapping


def test_ngram_overlaps_of_a_template_do_not_compare_all_pairs():
    """40,000 sentences of one template took minutes: each shares some 4-grams with every other."""
    sentences = [
        f"the current temperature of the sensor {a}{b} in the room {b}{a} is too high right now"
        for a, b in itertools.product(range(1000, 1200), range(200))
    ]
    assert splitting.ngram_overlaps(sentences[::2], sentences[1::2]) == set()


def test_ngram_overlap_needs_80_percent_of_the_4_grams_in_one_sentence():
    """Overlap with several sentences does not add up, and short sentences are not considered."""
    held_out = "a b c d e f g h"  # five 4-grams
    assert splitting.ngram_overlaps([held_out], ["x a b c d e f g y"]) == {held_out}  # four of them
    assert splitting.ngram_overlaps([held_out], ["x a b c d e f y", "d e f g h"]) == set()  # three, and two
    assert splitting.ngram_overlaps(["a b c d e f g"], ["a b c d e f g h"]) == set()  # too short


def test_large_corpus_holds_out_5_and_2_percent_without_leaks():
    """The documented fractions, and no near-duplicate in training."""
    sentences = _sentences(4000)
    split = splitting.split_keys(sentences)
    assert split.eligible == split.all == 4000
    held_out = split.test | split.valid | split.overlapping
    assert abs(len(split.test) - 200) < 45 and abs(len(split.valid) - 80) < 30
    training = set(sentences) - held_out - split.near_duplicates
    assert not splitting.near_duplicates(training, held_out)
    assert not split.test & split.valid
    assert split.counts()["test"] == len(split.test) and split.counts()["all"] == 4000


def test_small_corpus_holds_out_at_most_10_and_5_percent():
    """The fractions grow to reach 60 and 30 keys, up to their maximum."""
    split = splitting.split_keys(_sentences(800))
    assert len(split.test) == 60 and len(split.valid) == 30
    split = splitting.split_keys(_sentences(200))
    assert 8 <= len(split.test) <= 32 and 3 <= len(split.valid) <= 20


def test_more_sentences_do_not_move_held_out_ones():
    """Scores on a grown corpus stay comparable."""
    few, many = splitting.split_keys(_sentences(3000)), splitting.split_keys(_sentences(6000))
    assert few.test <= many.test and few.valid <= many.valid


def test_order_of_sentences_does_not_matter():
    """The split is a function of the set of sentences."""
    sentences = _sentences(300)
    assert splitting.split_keys(sentences) == splitting.split_keys(reversed(sentences))


def test_wording_with_placeholders_has_the_split_of_its_key():
    """A variant with a placeholder does not leak into training."""
    sentences = _sentences(2000)
    held_out = next(iter(splitting.split_keys(sentences).test))
    split = splitting.split_keys([*sentences, held_out + " %s"])
    assert held_out in split.test and splitting.english_key(held_out + " %s") in split.test


def test_nothing_eligible():
    """Short texts alone give empty held-out splits."""
    split = splitting.split_keys(["yes", "no"])
    assert {name: count for name, count in split.counts().items() if count} == {"all": 2}


def _sentences(count: int) -> list[str]:
    """Different sentences of five words, any two of which differ in at least two."""
    letters = [chr(ord("a") + i) for i in range(20)]
    words = itertools.product(range(20), repeat=3)
    code = ((a + b + c, a + 2 * b + 3 * c) for a, b, c in words)
    return [
        f"{a} {b} {c} {letters[x % 20]} {letters[y % 20]}z"
        for (a, b, c), (x, y) in itertools.islice(zip(itertools.product(letters, repeat=3), code), count)
    ]


def _replaced(key: str, replacement: tuple[int, int, str]) -> str:
    """Returns the key with the words from a position on, none or several, replaced by another word."""
    start, length, word = replacement
    words = key.split()
    return " ".join([*words[:start], word, *words[start + length :]])


def _four_grams(key: str) -> set[tuple[str, ...]]:
    words = key.split()
    return set(zip(words, words[1:], words[2:], words[3:]))


def _word_distance(first: list[str], second: list[str]) -> int:
    previous = list(range(len(second) + 1))
    for i, word in enumerate(first, 1):
        current = [i]
        for j, other in enumerate(second, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (word != other)))
        previous = current
    return previous[-1]
