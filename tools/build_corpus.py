"""Builds a parallel corpus of (foreign source, English target) pairs from translation catalogs.

  python -m tools.build_corpus --preset=pypi --output=corpus                 137 languages from PyPI, in a minute
  python -m tools.build_corpus --preset=django --output=small                Django's 96 languages alone, no download
  python -m tools.build_corpus --preset=debian --output=big                  624 languages from Debian, in minutes
  python -m tools.build_corpus --preset=debian --languages=de,fr --output=two  two of them, in a minute
  python -m tools.build_corpus --preset=debian_more --output=more            626 languages, from more of its packages
  python -m tools.build_corpus --preset=pocket --output=44                   44 languages, from more of both
  python -m tools.build_corpus --preset=unseen --unseen_by=two --output=test  to test a model of these two
  python -m tools.build_corpus --preset=none --input=my_files --output=mine  your own .po, .mo, .tsv, .json
  python -m tools.build_corpus --import=my_source.py --preset=mine --output=c  a source that your own file registers

The same inputs give the same bytes; a complete corpus of the same inputs is left unchanged.
"""

from __future__ import annotations

import logging

from absl import flags

from lingvo_moe import extensions
from lingvo_moe.cli import app
from lingvo_moe.data.corpora import corpus_builder
from lingvo_moe.data.corpora.corpus_report import summary, warnings
from lingvo_moe.data.corpus import REPORT, SPLITS, Corpus
from lingvo_moe.data.languages import check_selected
from lingvo_moe.errors import UserError
from lingvo_moe.utils.counts import counted

_logger = logging.getLogger("tools.build_corpus")
FLAGS = flags.FlagValues()
flags.DEFINE_string(
    "preset",
    "pypi",
    "The data sources to read. pypi: the catalogs of Django and of three applications written with it, which pip "
    "downloads; django: the installed Django alone; debian: Debian packages, which apt downloads; debian_more: the "
    "same and more packages, among them LibreOffice; pocket: more of all, in 44 languages; unseen: two packages that "
    "no other preset reads; none: your --input alone; or the name of a source that --import registers.",
    flag_values=FLAGS,
)
flags.DEFINE_list(
    "languages",
    [],
    "The languages to fetch and read, such as de,fr,pt_BR; by default all that the sources have, or those of the "
    "corpus that --unseen_by names.",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "unseen_by",
    None,
    "The directory of a corpus that a model is trained on. The new corpus is for testing alone: all its sentences of 4 "
    "to 40 words that are not in that training split, nor within one word of it, are its test split.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "input",
    [],
    "A directory or file of your own: LANG/LC_MESSAGES/x.mo, LANG.po, LANG.json with an en.json beside it, LANG.tsv of "
    "source<TAB>English, or a .tsv of another name, of language<TAB>source<TAB>English. May be repeated. "
    "docs/own_texts.md shows each format, and how to convert others.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "valid_input",
    [],
    "A directory or file of your own, as of --input, that is the validation split; its sentences, and those within one "
    "word of its sentences of 4 or more words, are not trained on. May be repeated. By default, the split is made "
    "of the other inputs.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "test_input",
    [],
    "A directory or file of your own, as of --input, that is the test split, such as a public test set; its sentences "
    "are not trained on, as those of --valid_input. May be repeated.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "import",
    [],
    "A module or .py file that registers data sources of your own with "
    "lingvo_moe.data.corpora.sources.register_source. May be repeated.",
    flag_values=FLAGS,
)
flags.DEFINE_string("output", None, "The directory to make.", flag_values=FLAGS)
flags.DEFINE_string(
    "packages",
    None,
    "The directory for downloads of presets (pypi 125 MB, debian 300 MB, debian_more 570 MB, pocket 1.3 GB, unseen "
    "65 MB); by default $XDG_CACHE_HOME/lingvo_moe/packages, or ~/.cache/lingvo_moe/packages.",
    flag_values=FLAGS,
)
flags.DEFINE_bool("force", False, "Build again, and replace a corpus of other inputs.", flag_values=FLAGS)


def main(argv: list[str]):
    """Builds the corpus that the flags describe and prints a summary of it."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; inputs are named with --input={argv[1]}.")
    if not FLAGS.output:
        raise UserError("--output is missing; name the directory to make with --output=DIR.")
    if FLAGS.unseen_by and (FLAGS.valid_input or FLAGS.test_input):
        raise UserError(
            "--unseen_by makes a corpus for testing alone, of all inputs; leave --valid_input and --test_input out."
        )
    for module in FLAGS["import"].value or ():
        extensions.import_module(module)
    held_out = {"valid": FLAGS.valid_input, "test": FLAGS.test_input}
    corpus, is_new = corpus_builder.build(
        FLAGS.preset,
        FLAGS.input,
        FLAGS.output,
        FLAGS.packages,
        FLAGS.force,
        check_selected(FLAGS.languages, "--languages"),
        Corpus.open_to_train(FLAGS.unseen_by) if FLAGS.unseen_by else None,
        held_out,
    )
    # A corpus that is up to date may be older than a file that is not read.
    not_read = {"unread_files": corpus_builder.unread_files(FLAGS.input, held_out)}
    for warning in warnings(corpus.manifest | not_read):
        _logger.warning("%s", warning)
    counts = ", ".join(f"{corpus.count(split)} {split}" for split in SPLITS)
    print(
        f"{corpus.directory} {'built' if is_new else 'is up to date'}: {counted(len(corpus.languages), 'language')}, "
        f"{counts} pairs; {summary(corpus.manifest)}; see {REPORT} there."
    )


if __name__ == "__main__":
    app.run(main, FLAGS)
