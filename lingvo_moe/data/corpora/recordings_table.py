"""Makes a speech corpus of a user's own recordings, which a table lists.

A line of the table is a recording: split, voice, WAV file, transcript, with tabs between them. The path of a file is
relative to the table's directory.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.data import wave_file
from lingvo_moe.data.corpora import recordings_manifest
from lingvo_moe.data.corpora.corpus_writer import OutputDirectory, Writer, prepare_output_directory
from lingvo_moe.data.corpus import SPLITS, Corpus
from lingvo_moe.data.languages import check_label
from lingvo_moe.data.speech import AUDIO_SUFFIX, ENCODING, reference
from lingvo_moe.errors import UserError
from lingvo_moe.utils import progress
from lingvo_moe.utils.counts import counted
from lingvo_moe.utils.hashes import file_sha256, sha256

_VERSION = 1  # a part of a corpus's identity: increase it with every change of what becomes of a table


class Entry(NamedTuple):
    """A line of a table; `where` is its number, for errors."""

    where: str
    split: str
    voice: str
    file: Path
    transcript: str


def build(table: str | Path, output: str | Path, force: bool = False) -> tuple[Corpus, bool]:
    """Makes the corpus of a table, unless `output` already has it.

    Args:
      table: a file, see above.
      output: the directory to make.
      force: whether to replace a corpus of other recordings.

    Returns:
      The corpus, and whether this call built it.

    Raises:
      UserError: the table or a recording cannot be read or is not as expected, the recordings have several sample
        rates, none is for training, or `output` has something else.
    """
    table, output = Path(table), Path(output).absolute()
    prepare_output_directory(output)
    entries = read_table(table)
    sample_rate, hashes = _check_recordings(entries)
    content = [
        (entry.split, entry.voice, entry.transcript, found) for entry, found in zip(entries, hashes, strict=True)
    ]
    target = OutputDirectory(output, sha256(f"recordings {_VERSION} {content}"))
    if not force and target.is_up_to_date():
        return Corpus.open(output), False
    target.check_replaceable(force)
    with target.atomic_writer(force) as writer:
        _write(writer, entries, sample_rate)
        writer.finish(_facts(table, target, entries, sample_rate))
    return Corpus.open(output), True


def read_table(table: Path) -> list[Entry]:
    """Returns the lines of a table that are not empty; raises UserError for one that is no recording, or a second one.

    White space in a transcript becomes single spaces.
    """
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--table={table}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--table={table}: not UTF-8 (byte {error.start + 1}).") from None
    numbered = [(f"{table}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"--table={table}: no recording. A line is split, voice, WAV file, transcript, with tabs.")
    entries = [_entry(where, line, table.parent) for where, line in numbered]
    places: dict[Path, str] = {}
    for entry in entries:
        if first := places.get(entry.file):
            raise UserError(f"{entry.where}: {entry.file} is the recording of {first} already; leave one of them out.")
        places[entry.file] = entry.where
    return entries


def _entry(where: str, line: str, directory: Path) -> Entry:
    fields = line.split("\t")
    if len(fields) != 4:
        raise UserError(
            f"{where}: {counted(len(fields), 'field')}, with tabs between them; expected four: split, voice, WAV file, "
            f"transcript."
        )
    split, voice, file, text = fields
    if split not in SPLITS:
        raise UserError(f"{where}: the split is {split!r}; expected one of {', '.join(SPLITS)}.")
    transcript = " ".join(text.split())
    if not transcript:
        raise UserError(f"{where}: the transcript is empty.")
    return Entry(where, split, check_label(voice, f"{where}: the voice"), directory / file, transcript)


def _check_recordings(entries: Sequence[Entry]) -> tuple[int, list[str]]:
    """Returns the sample rate of all recordings, and a hash of each; raises UserError for one that cannot be used."""
    rates: dict[int, Entry] = {}
    hashes = []
    for entry in progress.track(entries, "checking recordings", unit="recordings"):
        rates.setdefault(wave_file.read(entry.file, entry.where)[0], entry)
        if len(rates) > 1:
            (one, first), (other, second) = rates.items()
            raise UserError(
                f"{second.where}: {second.file} has {other} samples per second, but {first.file} has {one}; a corpus "
                f"has one sample rate. {wave_file.CONVERT}"
            )
        hashes.append(file_sha256(entry.file))
    return next(iter(rates)), hashes


def _write(writer: Writer, entries: Sequence[Entry], sample_rate: int):
    """Writes the recordings, those of one split of a voice at a time, which are all that is kept in memory."""
    by_voice: dict[str, list[Entry]] = collections.defaultdict(list)
    for entry in entries:
        by_voice[entry.voice].append(entry)
    with progress.bar("writing the corpus", len(entries), "recordings") as advance:
        for voice, of_voice in sorted(by_voice.items()):
            pairs: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
            for split in SPLITS:
                audio = bytearray()
                for entry in of_voice:
                    if entry.split == split:
                        rate, samples = wave_file.read(entry.file, entry.where)
                        if rate != sample_rate:
                            raise UserError(f"{entry.file} has changed while the corpus was made; start again.")
                        start = len(audio) // ENCODING.itemsize
                        pairs[split].append((reference(split, voice, start, len(samples)), entry.transcript))
                        audio += samples.tobytes()
                        advance()
                if audio:
                    writer.add_file(f"{split}/{voice}{AUDIO_SUFFIX}", bytes(audio))
            writer.add(voice, pairs, len(of_voice), collections.Counter())


def _facts(table: Path, target: OutputDirectory, entries: Sequence[Entry], sample_rate: int) -> dict:
    """The manifest's facts beside the voices."""
    transcripts = {split: {entry.transcript for entry in entries if entry.split == split} for split in SPLITS}
    return {
        "preset": "recordings",
        "inputs": [table.name],
        "held_out_inputs": {split: [table.name] for split in ("valid", "test")},
        **recordings_manifest.facts(target, sample_rate, transcripts),
    }
