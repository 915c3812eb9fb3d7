"""Builds a corpus of (foreign source, English target) pairs from translation catalogs.

  python -m tools.build_corpus --preset=quickstart --output=corpus           137 languages from PyPI, in a minute
  python -m tools.build_corpus --preset=django --output=small                Django's 96 languages alone, no download
  python -m tools.build_corpus --preset=debian --output=big                  624 languages from Debian, in minutes
  python -m tools.build_corpus --preset=none --input=my_files --output=mine  your own .po, .mo, .tsv, MediaWiki .json

The same inputs give the same bytes; a complete corpus of the same inputs is left as it is.
"""

from __future__ import annotations

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data import corpus_builder
from lingvo_moe.data.corpus import REPORT, SPLITS
from lingvo_moe.data.corpus_report import warnings
from lingvo_moe.errors import UserError

FLAGS = flags.FlagValues()
flags.DEFINE_enum(
    "preset",
    "quickstart",
    corpus_builder.PRESETS,
    "quickstart: the catalogs of Django and of three applications written with it, which pip downloads; "
    "django: the installed Django alone; debian: Debian packages, which apt downloads; "
    "none: your inputs alone.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "input",
    [],
    "A directory or file of your own: LANG/LC_MESSAGES/x.mo, LANG.po, LANG.tsv of "
    "source<TAB>english, or a .tsv of language<TAB>source<TAB>english. May be repeated.",
    flag_values=FLAGS,
)
flags.DEFINE_string("output", None, "The directory to make.", flag_values=FLAGS)
flags.DEFINE_string(
    "packages",
    None,
    "Where presets keep what they download (quickstart 170 MB, debian 300 MB); by default "
    "~/.cache/lingvo_moe/packages.",
    flag_values=FLAGS,
)
flags.DEFINE_bool("force", False, "Build again, and replace a corpus of other inputs.", flag_values=FLAGS)


def main(argv: list[str]):
    """Builds the corpus that the flags describe and says what is in it."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; inputs are named with --input={argv[1]}.")
    if not FLAGS.output:
        raise UserError("where to? Name the directory to make with --output=DIR.")
    corpus, is_new = corpus_builder.build(FLAGS.preset, FLAGS.input, FLAGS.output, FLAGS.packages, FLAGS.force)
    counts = ", ".join(f"{corpus.count(split)} {split}" for split in SPLITS)
    for warning in warnings(corpus.manifest):
        print(f"warning: {warning}")
    print(
        f"{corpus.directory} {'built' if is_new else 'is up to date'}: {len(corpus.languages)} languages, "
        f"{counts} pairs; see {REPORT} there."
    )


if __name__ == "__main__":
    app.run(main, FLAGS)
