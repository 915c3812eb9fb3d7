"""Measures how well a model copies rare words, such as names.

  python -m lingvo_moe eval --corpus=CORPUS --translations=translations.tsv
  python -m tools.quality.copied_words --translations=translations.tsv --trained_on=build/pocket/corpus

It counts the words of four Latin letters or digits or more that a source and its reference share, and that the English
of the training pairs has at most --max_count times. The result is the share of them that the translation has, too.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.inference import translation_file
from lingvo_moe.utils import progress
from lingvo_moe.utils.counts import counted

FLAGS = flags.FlagValues()
flags.DEFINE_string("translations", None, "A file of `eval --translations`.", flag_values=FLAGS)
flags.DEFINE_string("trained_on", None, "The directory of the corpus that the model was trained on.", flag_values=FLAGS)
flags.DEFINE_integer(
    "max_count", 40, "How often a word may be in the English of training.", lower_bound=0, flag_values=FLAGS
)

# Chinese, Japanese and Korean text attaches its letters to Latin words; words of other scripts are in no English text.
_WORD = re.compile(r"[A-Za-z0-9\u00c0-\u024f]{4,}")


@dataclasses.dataclass(frozen=True)
class Sentence:
    """What counts of a translated sentence.

    Attributes:
      shared: the words that its source and its reference have.
      translation: the words of its translation.
    """

    shared: frozenset[str]
    translation: frozenset[str]


def main(arguments: list[str]):
    """Prints the share in a line."""
    app.no_arguments(arguments[1:])
    for name in ("translations", "trained_on"):
        if not FLAGS[name].value:
            raise UserError(f"--{name} is missing.")
    sentences = read(FLAGS.translations)
    counts = _count(
        Corpus.open_to_train(FLAGS.trained_on), {word for sentence in sentences for word in sentence.shared}
    )
    print(summary(sentences, {word for word, count in counts.items() if count > FLAGS.max_count}))


def read(path: str) -> list[Sentence]:
    """Returns the sentences of a file of `eval --translations`; raises UserError as `translation_file.read` does."""
    return [
        Sentence(_words(line.source) & _words(line.reference), _words(line.translation))
        for line in translation_file.read(path)
    ]


def summary(sentences: Iterable[Sentence], frequent: Collection[str]) -> str:
    """Returns how many shared words that are not `frequent` the translations have; a word counts in each sentence."""
    with_rare = [(sentence.shared - set(frequent), sentence.translation) for sentence in sentences]
    total = sum(len(shared) for shared, _ in with_rare)
    if not total:
        return "no source shares a rare word with its reference"
    copied = sum(len(shared & translation) for shared, translation in with_rare)
    return (
        f"{copied} of {total} rare words that source and reference share are in the translation, "
        f"{100 * copied / total:.0f} %, in {sum(bool(shared) for shared, _ in with_rare)} of "
        f"{counted(len(with_rare), 'sentence')}"
    )


def _count(corpus: Corpus, words: Collection[str]) -> collections.Counter[str]:
    """Returns how often each of `words` is in the English of the training pairs."""
    counts: collections.Counter[str] = collections.Counter()
    for language in progress.track(corpus.languages_of("train"), "counting words", unit="languages"):
        for _, english in corpus.pairs("train", language):
            counts.update(word for word in _WORD.findall(english) if word in words)
    return counts


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text))


if __name__ == "__main__":
    app.run(main, FLAGS)
