"""Makes a speech corpus of your own recordings.

  python -m tools.import_speech --table=recordings.tsv --output=speech

A line of the table is split, voice, WAV file and transcript, with tabs between them: `train`, `valid` or `test`; a
label such as `en_anna`, the language and a name of 1 to 8 letters and digits; a path relative to the table, of one
channel with samples of 16 bits; the transcript, as it is to be learnt. All recordings have one sample rate. The same
recordings give the same corpus, and a complete one is left unchanged.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.corpora import corpus_writer, recordings_table
from lingvo_moe.data.corpus import REPORT, SPLITS
from lingvo_moe.data.log_mel import LogMel
from lingvo_moe.errors import UserError
from lingvo_moe.utils.counts import counted

FLAGS = flags.FlagValues()
flags.DEFINE_string("table", None, "The table of recordings: split, voice, WAV file, transcript.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "The directory to make.", flag_values=FLAGS)
flags.DEFINE_bool("force", False, "Replace a corpus of other recordings.", flag_values=FLAGS)


def main(argv: list[str]):
    """Makes the corpus of a table and prints a summary of it."""
    app.no_arguments(argv[1:])
    for name in ("table", "output"):
        if not FLAGS[name].value:
            raise UserError(f"--{name} is missing; --help describes it.")
    output = Path(FLAGS.output).absolute()
    corpus_writer.prepare_output_directory(output)
    corpus_writer.check_writable(output, FLAGS.force)
    corpus, is_new = recordings_table.build(FLAGS.table, output, FLAGS.force)
    counts = ", ".join(f"{corpus.count(split)} {split}" for split in SPLITS)
    state = "built" if is_new else "is up to date"
    voices = counted(len(corpus.languages), "voice")
    print(f"{corpus.directory} {state}: {voices}, {counts} recordings; see {REPORT} there.")
    if (rate := corpus.manifest["audio"]["sample_rate"]) != LogMel.sample_rate:
        highest = f" --set input.features.highest={rate / 2}" if rate / 2 < LogMel.highest else ""
        print(f"They have {rate} samples per second: train with --set input.features.sample_rate={rate}{highest}")


if __name__ == "__main__":
    app.run(main, FLAGS)
