"""BLEU and chrF on held-out sentences: per language, by group of languages, and averaged."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.pair_languages import PairLanguages
from lingvo_moe.data.tokenizer import SIDES
from lingvo_moe.errors import UserError
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.inference.translator import Translator

# Where words have no spaces between them, BLEU is of characters; in Chinese, of characters and foreign words.
_OF_CHARACTERS = ("ja", "th", "lo", "km", "my", "bo", "dz")
_GROUPS = ("high resource", "middle resource", "low resource")


@dataclasses.dataclass(frozen=True)
class LanguageScore:
    """The scores of one language.

    Attributes:
      language: its label in the corpus.
      train_pairs, test_pairs: sizes; `test_pairs` counts the sentences scored.
      bleu, chrf: of the translations, by sacreBLEU, 0 to 100.
      copy_bleu, copy_chrf: of the untouched sources, the copy baseline.
    """

    language: str
    train_pairs: int
    test_pairs: int
    bleu: float
    chrf: float
    copy_bleu: float
    copy_chrf: float


@dataclasses.dataclass(frozen=True)
class Translated:
    """A held-out sentence and its best translation.

    Attributes:
      language: its label in the corpus.
      source, reference: the pair.
      translation: of the source, with its confidence.
    """

    language: str
    source: str
    translation: Translation
    reference: str


def translate_held_out(
    translator: Translator,
    corpus: Corpus,
    languages: Sequence[str] = (),
    max_pairs: int = 100,
    split: str = "test",
    pair_languages: PairLanguages | None = None,
) -> tuple[list[Translated], int]:
    """Translates up to `max_pairs` sentences of each language.

    Args:
      translator: the model.
      corpus: whose `split` is translated.
      languages: which; all that have the split if empty.
      max_pairs: of each language, see `Corpus.sample`.
      split: `test` or `valid`.
      pair_languages: the languages of the pairs, which the translator is to read and write; None for its own.

    Returns:
      (the sentences, the number of those left out, which are longer than the model's limit). Languages are in the order
      of GShard's figure 6, by decreasing number of training pairs.

    Raises:
      UserError: as `choose_languages`, or all sentences are longer than the model's limit.
    """
    pairs, left_out = _held_out(translator, corpus, languages, max_pairs, split, pair_languages)
    found = []
    for names, group in itertools.groupby(
        pairs, lambda pair: pair_languages.by_label[pair[0]] if pair_languages else {}
    ):
        sentences = list(group)
        own = translator.between(*(names.get(side, "") for side in SIDES)) if names else translator
        translations = own.translate([source for _, source, _ in sentences])
        found += [
            Translated(language, source, best, reference)
            for (language, source, reference), (best, *_) in zip(sentences, translations, strict=True)
        ]
    return found, left_out


def score(corpus: Corpus, translated: Sequence[Translated], from_english: bool = False) -> list[LanguageScore]:
    """Returns one score for each language, beside that of copying the sources.

    Args:
      corpus: of the sentences.
      translated: the sentences; scores are in their order.
      from_english: whether the references are in the language of the label, not in English.
    """
    by_language: dict[str, list[Translated]] = {}
    for sentence in translated:
        by_language.setdefault(sentence.language, []).append(sentence)
    return [
        _score(language, corpus.count("train", language), sentences, _tokenization(language) if from_english else "13a")
        for language, sentences in by_language.items()
    ]


def _tokenization(label: str) -> str:
    """Returns sacreBLEU's name of how BLEU divides texts of a language."""
    language = label.partition("_")[0]
    return "zh" if language == "zh" else "char" if language in _OF_CHARACTERS else "13a"


def _held_out(
    translator: Translator,
    corpus: Corpus,
    languages: Sequence[str],
    max_pairs: int,
    split: str,
    pair_languages: PairLanguages | None,
) -> tuple[list[tuple[str, str, str]], int]:
    """Returns ((language, source, reference) of the sentences that fit the model, the number of the others)."""
    pairs, left_out = [], 0
    for language in choose_languages(corpus, languages, split):
        if pair_languages and language in pair_languages.left_out:
            continue
        sample = [
            pair_languages.source_and_target(*pair) if pair_languages else pair
            for pair in corpus.sample(split, language, max_pairs)
        ]
        fits = translator.fits([source for source, _ in sample])
        kept = [(language, *pair) for pair, fit in zip(sample, fits) if fit]
        left_out += len(sample) - len(kept)
        pairs += kept
    if not pairs:
        raise UserError(
            f"all {left_out} {split} sentences are longer than the model's limit; raise it with "
            f"--set input.source_length=..."
        )
    return pairs, left_out


def groups(scores: Sequence[LanguageScore]) -> list[tuple[str, list[LanguageScore]]]:
    """Splits languages, ordered by training pairs, into groups of equal size: high, middle and low resource.

    Of one or two languages, there are as many groups.
    """
    bounds = [round(i * len(scores) / len(_GROUPS)) for i in range(len(_GROUPS) + 1)]
    split_groups = [(name, list(scores[a:b])) for name, a, b in zip(_GROUPS, bounds, bounds[1:])]
    return [(name, members) for name, members in split_groups if members]


def choose_languages(corpus: Corpus, languages: Sequence[str], split: str) -> list[str]:
    """Returns these languages, or all that have the split if empty, by decreasing number of training pairs.

    Raises:
      UserError: as `Corpus.choose`.
    """
    chosen = corpus.choose(split, languages)
    return sorted(chosen, key=lambda language: (-corpus.count("train", language), language))


def _score(language: str, train_pairs: int, sentences: Sequence[Translated], tokenization: str) -> LanguageScore:
    import sacrebleu  # slow to import, and only evaluation needs it

    references = [[sentence.reference for sentence in sentences]]

    def scores(hypotheses: list[str]) -> tuple[float, float]:
        return (
            sacrebleu.corpus_bleu(hypotheses, references, tokenize=tokenization).score,
            sacrebleu.corpus_chrf(hypotheses, references).score,
        )

    translations = scores([sentence.translation.text for sentence in sentences])
    copies = scores([sentence.source for sentence in sentences])
    return LanguageScore(language, train_pairs, len(sentences), *translations, *copies)
