"""Builds a parallel corpus of (foreign source, English target) pairs from translation catalogs.

  python -m tools.build_corpus --preset=quickstart --output=corpus           137 languages from PyPI, in a minute
  python -m tools.build_corpus --preset=django --output=small                Django's 96 languages alone, no download
  python -m tools.build_corpus --preset=debian --output=big                  624 languages from Debian, in minutes
  python -m tools.build_corpus --preset=none --input=my_files --output=mine  your own .po, .mo, .tsv, MediaWiki .json
  python -m tools.build_corpus --import=my_source.py --preset=mine --output=c  a source that your own file registers

The same inputs give the same bytes; a complete corpus of the same inputs is left unchanged.
"""

from __future__ import annotations

import logging

from absl import flags

from lingvo_moe import extensions
from lingvo_moe.cli import app
from lingvo_moe.data import corpus_builder
from lingvo_moe.data.corpus import REPORT, SPLITS
from lingvo_moe.data.corpus_report import warnings
from lingvo_moe.errors import UserError

_LOG = logging.getLogger("tools.build_corpus")
FLAGS = flags.FlagValues()
flags.DEFINE_string(
    "preset",
    "quickstart",
    "The data sources to read. quickstart: the catalogs of Django and of three applications written with it, which pip "
    "downloads; django: the installed Django alone; debian: Debian packages, which apt downloads; none: your --input "
    "alone; or the name of a source that --import registers.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "input",
    [],
    "A directory or file of your own: LANG/LC_MESSAGES/x.mo, LANG.po, LANG.tsv of "
    "source<TAB>english, or a .tsv of language<TAB>source<TAB>english. May be repeated.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "import",
    [],
    "A module or .py file that registers data sources of your own with lingvo_moe.data.sources.register_source. "
    "May be repeated.",
    flag_values=FLAGS,
)
flags.DEFINE_string("output", None, "The directory to make.", flag_values=FLAGS)
flags.DEFINE_string(
    "packages",
    None,
    "The directory for downloads of presets (quickstart 170 MB, debian 300 MB); by default "
    "~/.cache/lingvo_moe/packages.",
    flag_values=FLAGS,
)
flags.DEFINE_bool("force", False, "Build again, and replace a corpus of other inputs.", flag_values=FLAGS)


def main(argv: list[str]):
    """Builds the corpus that the flags describe and prints a summary of it."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; inputs are named with --input={argv[1]}.")
    if not FLAGS.output:
        raise UserError("--output is missing; name the directory to make with --output=DIR.")
    for module in FLAGS["import"].value or ():
        extensions.import_module(module)
    corpus, is_new = corpus_builder.build(FLAGS.preset, FLAGS.input, FLAGS.output, FLAGS.packages, FLAGS.force)
    for warning in warnings(corpus.manifest):
        _LOG.warning("%s", warning)
    counts = ", ".join(f"{corpus.count(split)} {split}" for split in SPLITS)
    print(
        f"{corpus.directory} {'built' if is_new else 'is up to date'}: {len(corpus.languages)} languages, "
        f"{counts} pairs; see {REPORT} there."
    )


if __name__ == "__main__":
    app.run(main, FLAGS)
