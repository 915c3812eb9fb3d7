"""BLEU and chrF on held-out sentences: per language, by group of languages, and averaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.inference.translator import Translator

_GROUPS = ("high resource", "middle resource", "low resource")


@dataclasses.dataclass(frozen=True)
class LanguageScore:
    """The scores of one language.

    Attributes:
      language: its label in the corpus.
      train_pairs, test_pairs: sizes; `test_pairs` counts the sentences scored.
      bleu, chrf: of the translations, by sacreBLEU, 0 to 100.
      copy_bleu, copy_chrf: of the untouched sources, the baseline that costs nothing.
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
    translator: Translator, corpus: Corpus, languages: Sequence[str] = (), max_pairs: int = 100, split: str = "test"
) -> tuple[list[Translated], int]:
    """Translates up to `max_pairs` sentences of each language.

    Args:
      translator: the model.
      corpus: whose `split` is translated.
      languages: which; all that have the split if empty.
      max_pairs: of each language, see `Corpus.sample`.
      split: `test` or `valid`.

    Returns:
      (the sentences, the number of those left out, which are longer than the model's limit). Languages are in the order
      of GShard's figure 6, by decreasing number of training pairs.

    Raises:
      UserError: as `choose_languages`, or all sentences are longer than the model's limit.
    """
    pairs, left_out = _held_out(translator, corpus, languages, max_pairs, split)
    translations = translator.translate([source for _, source, _ in pairs])
    found = [
        Translated(language, source, best, reference)
        for (language, source, reference), (best, *_) in zip(pairs, translations, strict=True)
    ]
    return found, left_out


def score(corpus: Corpus, translated: Sequence[Translated]) -> list[LanguageScore]:
    """Returns one score for each language, in the order of `translated`, beside that of copying the sources."""
    by_language: dict[str, list[Translated]] = {}
    for sentence in translated:
        by_language.setdefault(sentence.language, []).append(sentence)
    return [_score(language, corpus.count("train", language), sentences) for language, sentences in by_language.items()]


def _held_out(
    translator: Translator, corpus: Corpus, languages: Sequence[str], max_pairs: int, split: str
) -> tuple[list[tuple[str, str, str]], int]:
    """Returns ((language, source, reference) of the sentences that fit the model, the number of the others)."""
    pairs, left_out = [], 0
    for language in choose_languages(corpus, languages, split):
        sample = corpus.sample(split, language, max_pairs)
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


def _score(language: str, train_pairs: int, sentences: Sequence[Translated]) -> LanguageScore:
    import sacrebleu  # slow to import, and only evaluation needs it

    references = [[sentence.reference for sentence in sentences]]

    def scores(hypotheses: list[str]) -> tuple[float, float]:
        return (
            sacrebleu.corpus_bleu(hypotheses, references).score,
            sacrebleu.corpus_chrf(hypotheses, references).score,
        )

    translations = scores([sentence.translation.text for sentence in sentences])
    copies = scores([sentence.source for sentence in sentences])
    return LanguageScore(language, train_pairs, len(sentences), *translations, *copies)
