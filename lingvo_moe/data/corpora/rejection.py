"""Reasons why a catalog's entry is rejected: it becomes no training, validation or test pair."""

from __future__ import annotations

import enum

MAX_WORDS = 200  # of one side of a pair


class Rejection(enum.StrEnum):
    """The reasons, as manifests and reports name them."""

    FUZZY = "fuzzy"
    EMPTY = "empty"
    NO_LETTERS = "no letters"
    IDENTICAL = "identical to the English"
    PLACEHOLDERS = "unequal placeholder counts"
    TOO_MANY_WORDS = f"over {MAX_WORDS} words"
    DUPLICATE = "duplicate"
    WRONG_SCRIPT = "wrong script"
    HELD_OUT_WORDING = "same key as a held-out sentence, but with placeholders"
    NEAR_DUPLICATE = "within one word of a held-out sentence"
    OVERLAPPING = "80 % of its 4-grams in one training sentence"
    SEEN = "in the training corpus, or within one word of it"
    NOT_ELIGIBLE = "not 4 to 40 words without a placeholder"
    OVER_CAP = "over the cap of a held-out split"
    SOURCE_HELD_OUT = "source text also held out"
    GIVEN = "same key as a sentence of --valid_input or --test_input"
