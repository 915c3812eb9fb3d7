"""Counts the lines that `translate` takes for English, and so copies: of those that are, and of those that are not.

  python -m tools.quality.english_lines --corpus=build/pocket/corpus --max_pairs=50

The lines are the held-out sentences of a corpus, and their English. A table in Markdown has the counts. The sentences
in other languages that are taken for English follow it, each as language and sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.inference import released
from lingvo_moe.inference.lines.line_reader import LineReader
from tools import markdown

FLAGS = flags.FlagValues()
flags.DEFINE_string("corpus", None, "A directory of tools.build_corpus, with held-out sentences.", flag_values=FLAGS)
flags.DEFINE_string(
    "tokenizers",
    str(released.tokenizers()),
    "The tokenizers of the model: a directory of tools.train_tokenizer.",
    flag_values=FLAGS,
)
flags.DEFINE_integer("max_pairs", 50, "The most sentences of a language.", lower_bound=1, flag_values=FLAGS)
_NO_LIMIT = 2**30  # tokens; nothing is translated here


def main(arguments: list[str]):
    """Prints the table and the list."""
    app.no_arguments(arguments[1:])
    if not FLAGS.corpus:
        raise UserError("--corpus is missing: a directory of tools.build_corpus, with held-out sentences.")
    corpus = Corpus.open(FLAGS.corpus)
    tokenizers = Tokenizers.load(FLAGS.tokenizers)
    reader = LineReader(tokenizers.source, _NO_LIMIT, tokenizers.target)
    others = [
        (language, source)
        for language in corpus.languages_of("test")
        for source, _ in corpus.sample("test", language, FLAGS.max_pairs)
    ]
    english = sorted(
        {
            reference
            for language in corpus.languages_of("test")
            for _, reference in corpus.sample("test", language, FLAGS.max_pairs)
        }
    )
    if not others:
        raise UserError(f"--corpus={FLAGS.corpus} has no test sentences; see its report.txt.")
    taken = taken_for_english(reader, [source for _, source in others])
    rows = (_row("in English", taken_for_english(reader, english)), _row("in other languages", taken))
    print(markdown.table(("lines", "number", "taken for English", "share"), rows))
    for (language, source), is_taken in zip(others, taken, strict=True):
        if is_taken:
            print(language, source, sep="\t")


def taken_for_english(reader: LineReader, lines: Sequence[str]) -> list[bool]:
    """Returns for each line whether `translate` copies it."""
    return [line.is_copied for line in reader.lines(lines)]


def _row(name: str, taken: Sequence[bool]) -> tuple[str, ...]:
    return (name, f"{len(taken):,}", f"{sum(taken):,}", f"{sum(taken) / len(taken):.1%}")


if __name__ == "__main__":
    app.run(main, FLAGS)
