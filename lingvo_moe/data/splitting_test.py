"""No held-out sentence, nor one nearly like it, is trained on; what is held out depends on the sentence alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies

from lingvo_moe.data import splitting

_KEYS = strategies.lists(strategies.sampled_from("abcd"), min_size=1, max_size=6).map(" ".join)


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
    assert splitting.english_key(english) == key


@given(strategies.text(alphabet="abc XYZ.,-'%s{}12", max_size=40))
def test_a_key_is_its_own_key(english):
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
def test_which_sentences_may_be_held_out(english, allowed):
    assert splitting.can_be_held_out(english) is allowed


@given(strategies.sets(_KEYS), strategies.sets(_KEYS))
def test_within_one_word_finds_what_comparing_all_with_all_finds(candidates, held_out):
    near = {key for key in candidates if any(_word_distance(key.split(), other.split()) <= 1 for other in held_out)}
    found = splitting.within_one_word(candidates - held_out, held_out)
    assert found == near - held_out


def test_contained_needs_most_of_the_4_grams_in_one_sentence():
    held_out = "a b c d e f g h"  # five 4-grams
    assert splitting.contained([held_out], ["x a b c d e f g y"]) == {held_out}  # four of them
    assert splitting.contained([held_out], ["x a b c d e f y", "d e f g h"]) == set()  # three, and two
    assert splitting.contained(["a b c d e f g"], ["a b c d e f g h"]) == set()  # too short to be judged


def test_a_large_corpus_gives_5_and_2_percent_and_leaks_nothing():
    sentences = _sentences(4000)
    split = splitting.split_keys(sentences)
    assert split.eligible == split.all == 4000
    held_out = split.test | split.valid | split.overlapping
    assert abs(len(split.test) - 200) < 45 and abs(len(split.valid) - 80) < 30
    training = set(sentences) - held_out - split.near
    assert not splitting.within_one_word(training, held_out)
    assert not split.test & split.valid


def test_a_small_corpus_gives_more_but_at_most_10_and_5_percent():
    split = splitting.split_keys(_sentences(800))
    assert len(split.test) == 60 and len(split.valid) == 30
    split = splitting.split_keys(_sentences(200))
    assert 8 <= len(split.test) <= 32 and 3 <= len(split.valid) <= 20


def test_a_sentence_stays_where_it_is_when_others_come():
    few, many = splitting.split_keys(_sentences(3000)), splitting.split_keys(_sentences(6000))
    assert few.test <= many.test and few.valid <= many.valid


def test_the_order_of_the_sentences_does_not_matter():
    sentences = _sentences(300)
    assert splitting.split_keys(sentences) == splitting.split_keys(reversed(sentences))


def test_a_wording_with_placeholders_goes_with_its_key():
    sentences = _sentences(2000)
    held_out = next(iter(splitting.split_keys(sentences).test))
    split = splitting.split_keys([*sentences, held_out + " %s"])
    assert held_out in split.test and splitting.english_key(held_out + " %s") in split.test


def test_nothing_to_hold_out():
    split = splitting.split_keys(["yes", "no"])
    assert split.counts() == {"test": 0, "valid": 0, "near": 0, "overlapping": 0, "eligible": 0, "all": 2}


def _sentences(count: int) -> list[str]:
    """Different sentences of five words, any two of which differ in at least two."""
    logical_axes = [chr(ord("a") + i) for i in range(20)]
    words = itertools.product(logical_axes, repeat=3)
    code = (
        (
            logical_axes.index(a) + logical_axes.index(b) + logical_axes.index(c),
            logical_axes.index(a) + 2 * logical_axes.index(b) + 3 * logical_axes.index(c),
        )
        for a, b, c in words
    )
    return [
        f"{a} {b} {c} {logical_axes[x % 20]} {logical_axes[y % 20]}z"
        for (a, b, c), (x, y) in itertools.islice(zip(itertools.product(logical_axes, repeat=3), code), count)
    ]


def _word_distance(first: list[str], second: list[str]) -> int:
    previous = list(range(len(second) + 1))
    for i, word in enumerate(first, 1):
        current = [i]
        for j, other in enumerate(second, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (word != other)))
        previous = current
    return previous[-1]
