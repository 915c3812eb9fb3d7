"""Writes a corpus beside its final directory and renames it into that directory once it is complete."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lingvo_moe.data import languages
from lingvo_moe.data.corpora.corpus_report import report
from lingvo_moe.data.corpus import FORMAT, MANIFEST, REPORT, SPLITS, VERSION, Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_directories
from lingvo_moe.utils.hashes import sha256

Pair = tuple[str, str]  # (source, english)


@dataclasses.dataclass(frozen=True)
class OutputDirectory:
    """The directory that a corpus is written to.

    Attributes:
      directory: its path.
      identity: a hash of the inputs and of the version of the cleaning rules.
    """

    directory: Path
    identity: str

    def is_up_to_date(self) -> bool:
        """Returns whether the directory has a complete corpus of the same inputs."""
        if not (self.directory / MANIFEST).is_file():
            return False
        try:
            return Corpus.open(self.directory).manifest.get("inputs_identity") == self.identity
        except UserError:
            return False

    def check_replaceable(self, force: bool):
        """Raises UserError if the directory has a corpus, unless `force` is true."""
        if not force and (self.directory / MANIFEST).exists():
            raise UserError(
                f"--output={self.directory} has a corpus of other inputs or of another version, or a corrupt one. "
                "Name another directory, or replace it with --force."
            )

    @contextlib.contextmanager
    def atomic_writer(self, force: bool) -> Iterator[Writer]:
        """Yields a writer; its files replace the directory when the context ends, and are removed on an error.

        Args:
          force: whether to replace a corpus of other inputs, too.

        Raises:
          UserError: at the end, without `force`, another process has built a corpus of other inputs there meanwhile.
        """
        with output_directories.atomic_directory(self.directory, _check_only_corpus_files) as partial:
            yield Writer(partial)
            if not self.is_up_to_date():  # a corpus of the same inputs is as good
                self.check_replaceable(force)


def prepare_output_directory(directory: Path):
    """Restores a corpus whose replacement was interrupted.

    Raises:
      UserError: `directory` exists and is neither a corpus nor empty.
    """
    output_directories.recover("--output", directory, _check_only_corpus_files)
    if os.path.lexists(directory):
        _check_only_corpus_files(directory)


def check_writable(directory: Path, force: bool):
    """Raises UserError if no corpus can be written to `directory`; call this before hours of work.

    Without `force`, a corpus that is there is kept, so it may be read-only.
    """
    if force or not (directory / MANIFEST).exists():
        output_directories.check("--output", directory)


def _check_only_corpus_files(directory: Path):
    if directory.is_symlink() or not directory.is_dir():
        raise UserError(f"--output={directory} is a file or a link; name a directory that does not exist yet.")
    names = {entry.name for entry in directory.iterdir()}
    if names and (MANIFEST not in names or not names <= {MANIFEST, REPORT, *SPLITS}):
        raise UserError(
            f"--output={directory} has files that are not of a corpus and is left unchanged; name another directory."
        )


class Writer:
    """Writes the files of one corpus."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._languages: dict[str, dict[str, Any]] = {}
        self._without_pairs: dict[str, dict[str, Any]] = {}
        self._files: dict[str, int] = {}
        self._content = hashlib.sha256()
        for split in SPLITS:
            (directory / split).mkdir()

    def add(self, language: str, pairs: Mapping[str, list[Pair]], read: int, rejected: Counter[str]):
        """Writes one language's files.

        Args:
          language: its label. Call in sorted order: the fingerprint depends on it.
          pairs: by split.
          read: the number of entries that the sources had.
          rejected: the number of entries that became no pair, by reason.

        Raises:
          UserError: the label is not safe in a path.
        """
        languages.check_label(language, "the corpus's sources")
        facts: dict[str, Any] = {"read": read, "rejected": {reason: rejected[reason] for reason in sorted(+rejected)}}
        if not any(pairs.values()):
            self._without_pairs[language] = facts
            return
        for split in SPLITS:
            data = "".join(f"{source}\t{english}\n" for source, english in pairs[split]).encode()
            if data:
                write(self._directory / split / f"{language}.tsv", data)
            digest = sha256(data)
            self._content.update(f"{split}/{language}\t{digest}\n".encode())
            facts[split] = {"pairs": len(pairs[split]), "bytes": len(data), "sha256": digest}
        self._languages[language] = facts

    def add_file(self, name: str, data: bytes):
        """Writes a file beside those of the pairs, such as recordings; `name` is a path below the corpus.

        The manifest lists its size.
        """
        write(self._directory / name, data)
        self._files[name] = len(data)
        self._content.update(f"{name}\t{sha256(data)}\n".encode())

    def finish(self, facts: dict[str, Any]):
        """Writes the manifest and the report.

        Raises:
          UserError: there is no training pair, or, in a corpus for testing alone, no test pair.
        """
        counts = {split: sum(facts[split]["pairs"] for facts in self._languages.values()) for split in SPLITS}
        needed = "test" if facts.get("unseen_by") else "train"
        if not counts[needed]:
            others = ", ".join(f"{count} {split}" for split, count in counts.items() if split != needed)
            raise UserError(f"no {needed} pairs: of all the pairs read, only {others} pairs remain. Add more text.")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self._content.hexdigest(),
            **facts,
            "pairs": counts,
            "languages": self._languages,
            "languages_without_pairs": self._without_pairs,
            **({"files": self._files} if self._files else {}),
        }
        write(self._directory / REPORT, report(manifest).encode())
        write(self._directory / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False).encode())


def write(path: Path, data: bytes):
    """Writes a file. An error while writing (a full disk) names the file, which the system does only on opening."""
    try:
        path.write_bytes(data)
    except OSError as error:
        error.filename = str(path)
        raise
