"""Builds a speech corpus: the sentences of a corpus of texts, spoken by eSpeak NG in many voices.

  python -m tools.build_speech --preset=pypi --output=speech                     English, in a few minutes
  python -m tools.build_speech --preset=django --languages=en,de --output=two    English and German, no download

The sentences are those of `tools.build_corpus --preset=...`, and so is their division into train, valid and test. The
package espeakng-loader has the synthesiser (pip install espeakng-loader==0.2.4). The same inputs give the same bytes; a
complete corpus of the same sentences is left unchanged.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.corpora import corpus_builder, corpus_writer, speech_builder
from lingvo_moe.data.corpus import REPORT, SPLITS
from lingvo_moe.data.languages import check_selected, is_english
from lingvo_moe.errors import UserError
from lingvo_moe.utils.counts import counted

FLAGS = flags.FlagValues()
flags.DEFINE_string("preset", "pypi", "Where the sentences come from, see tools.build_corpus.", flag_values=FLAGS)
flags.DEFINE_list("languages", ["en"], "The languages to speak: en, or others that the preset has.", flag_values=FLAGS)
flags.DEFINE_integer(
    "max_characters", 48, "The longest transcript; longer ones are left out.", lower_bound=1, flag_values=FLAGS
)
flags.DEFINE_multi_string(
    "input", [], "A file or directory of your own sentences, see tools.build_corpus.", flag_values=FLAGS
)
flags.DEFINE_string("output", None, "The directory to make.", flag_values=FLAGS)
flags.DEFINE_string("packages", None, "The directory for downloads, see tools.build_corpus.", flag_values=FLAGS)
flags.DEFINE_bool("force", False, "Build again, and replace a corpus of other sentences.", flag_values=FLAGS)
# Of English alone, translations of a few languages have nearly all sentences.
_READ_FOR_ENGLISH = ("de", "es", "fr")


def main(argv: list[str]):
    """Builds the corpus that the flags describe and prints a summary of it."""
    app.no_arguments(argv[1:])
    if not FLAGS.output:
        raise UserError("--output is missing; name the directory to make with --output=DIR.")
    output = Path(FLAGS.output).absolute()
    corpus_writer.prepare_output_directory(output)
    corpus_writer.check_writable(output, FLAGS.force)
    selected = check_selected(FLAGS.languages, "--languages")
    for label in selected or {""}:
        if not label or (is_english(label) and label != "en"):
            raise UserError(f"--languages={label}: expected en, or languages of the preset, with commas.")
    read = {language for language in selected if not is_english(language)}
    if not read and FLAGS.preset != "none":
        read = set(_READ_FOR_ENGLISH)
    with tempfile.TemporaryDirectory(prefix="lingvo_moe_texts_") as directory:
        texts, _ = corpus_builder.build(
            FLAGS.preset, FLAGS.input, Path(directory) / "texts", FLAGS.packages, selected=frozenset(read)
        )
        corpus, is_new = speech_builder.build(texts, output, sorted(selected), FLAGS.max_characters, FLAGS.force)
    counts = ", ".join(f"{corpus.count(split)} {split}" for split in SPLITS)
    state = "built" if is_new else "is up to date"
    voices = counted(len(corpus.languages), "voice")
    print(f"{corpus.directory} {state}: {voices}, {counts} recordings; see {REPORT} there.")


if __name__ == "__main__":
    app.run(main, FLAGS)
