"""A parallel corpus on disk: pairs of (foreign source, English target), one file per language and split.

    DIR/corpus.json                     the manifest: contents, inputs, and rejected pairs by reason
    DIR/report.txt                      the same as a table
    DIR/{train,valid,test}/LANG.tsv     UTF-8, a pair source<TAB>english per line; a language without pairs has no file

`python -m tools.build_corpus` writes it. `Corpus.open` reads the manifest and checks the files' sizes; a file is read,
and checked completely, its SHA-256 included, when its pairs are first used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lingvo_moe import definitions
from lingvo_moe.data import languages
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.utils import safe_paths
from lingvo_moe.utils.hashes import sha256

FORMAT = "lingvo_moe corpus"
VERSION = 2  # 1 called rejected pairs "dropped"
SPLITS = ("train", "valid", "test")
MANIFEST = "corpus.json"
REPORT = "report.txt"
_REBUILD = "Build the corpus again: python -m tools.build_corpus --force --output=DIR with its preset or inputs."


class Pairs:
    """The pairs of one file: a sequence of (source, english), stored as the file's bytes and 8 bytes per line."""

    def __init__(self, path: Path):
        """Reads and checks the file. Raises UserError, with file and line, if it is not source<TAB>english in UTF-8."""
        self._data = _read(path)
        if not self._data:
            raise UserError(f"{path}: the file is empty; expected a pair source<TAB>english per line. {_REBUILD}")
        _check_text(path, self._data)
        self._ends = _line_ends(path, self._data)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[str, str]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        index %= len(self)
        start = self._ends[index - 1] + 1 if index else 0
        source, english = self._data[start : self._ends[index]].decode().split("\t")
        return source, english

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (self[index] for index in range(len(self)))

    def english(self) -> list[bytes]:
        """Returns the English text of every pair, in UTF-8."""
        return [line.rpartition(b"\t")[2] for line in self._data.splitlines()]

    def sha256(self) -> str:
        """Returns the SHA-256 of the file's bytes, in hexadecimal."""
        return sha256(self._data)


class Corpus:
    """A corpus in a directory; use `Corpus.open`.

    Attributes:
      directory: of the corpus.
      manifest: the contents of corpus.json.
    """

    def __init__(self, directory: Path, manifest: dict):
        self.directory = directory
        self.manifest = manifest
        self._pairs: dict[tuple[str, str], Pairs] = {}

    @classmethod
    def open(cls, directory: str | Path) -> Corpus:
        """Opens a corpus: reads its manifest and checks the sizes of its files.

        Raises:
          UserError: there is no corpus, it has no pair, its manifest is corrupt or unsafe, or its files are not those
            that the manifest lists.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        corpus = cls(directory, manifest)
        if not any(map(corpus.count, SPLITS)):
            raise UserError(f"{directory}: the corpus has no pair. {_REBUILD}")
        for split in SPLITS:
            for language in corpus.languages_of(split):
                corpus._check_size(split, language)
        return corpus

    @classmethod
    def open_to_train(cls, directory: str | Path) -> Corpus:
        """Opens a corpus as `open` does. Raises UserError if it has no training pair, too."""
        corpus = cls.open(directory)
        if not corpus.count("train"):
            raise UserError(
                f"{directory}: the corpus has no training pair; it is for testing alone. Name the corpus to train on."
            )
        return corpus

    @property
    def languages(self) -> tuple[str, ...]:
        """All languages, sorted."""
        return tuple(sorted(self.manifest["languages"]))

    def languages_of(self, split: str) -> tuple[str, ...]:
        """Returns the languages that have pairs in this split, sorted."""
        return tuple(language for language in self.languages if self.count(split, language))

    def choose(self, split: str, languages: Sequence[str]) -> list[str]:
        """Returns these languages (of a speech corpus, voices), each once, or all that have the split if empty.

        Raises:
          UserError: one that the corpus lacks or has no such pairs of, or no pairs of the split at all; for `eval`,
            whose flag --languages it names. Or this is no list of texts.
        """
        definitions.check_texts("languages", languages)
        name, content = ("voice", "recordings") if "audio" in self.manifest else ("language", "pairs")
        for language in languages:
            if language not in self.languages:
                raise UserError(
                    f"--languages={language}: {self.directory} has no such {name}; it has {', '.join(self.languages)}."
                    f"{did_you_mean(language, self.languages)}"
                )
            if not self.count(split, language):
                raise UserError(f"--languages={language}: the corpus has no {split} {content} of it; see its {REPORT}.")
        chosen = list(dict.fromkeys(languages or self.languages_of(split)))
        if not chosen:
            raise UserError(f"{self.directory}: the corpus has no {split} {content}; see its {REPORT}.")
        return chosen

    @property
    def fingerprint(self) -> str:
        """A hash of every file's content: equal corpora have equal fingerprints."""
        return self.manifest["fingerprint"]

    def count(self, split: str, language: str | None = None) -> int:
        """Returns the number of pairs of a split, of one language or of all."""
        if language is None:
            return sum(self.count(split, language) for language in self.languages)
        return self._facts(split, language)["pairs"]

    def pairs(self, split: str, language: str) -> Pairs:
        """Returns the pairs of a language; the first call reads the file.

        Raises:
          UserError: the language is not in the corpus, has no pair in this split, or its file is corrupt or another
            one than the manifest lists.
        """
        if not self.count(split, language):
            raise UserError(
                f"{self.directory}: {language} has no {split} pairs; these have: "
                f"{', '.join(self.languages_of(split)) or 'no language'}."
            )
        if (split, language) not in self._pairs:
            path, expected = self.path(split, language), self.count(split, language)
            pairs = Pairs(path)
            if len(pairs) != expected:
                raise UserError(f"{path}: {len(pairs)} pairs, but {MANIFEST} lists {expected}. {_REBUILD}")
            # Last, as the other errors say more. Corpora of earlier versions have no hashes.
            listed = self._facts(split, language).get("sha256")
            if listed and (found := pairs.sha256()) != listed:
                raise UserError(
                    f"{path}: altered or replaced: its SHA-256 is {found[:12]}..., but {MANIFEST} lists "
                    f"{listed[:12]}... {_REBUILD}"
                )
            self._pairs[split, language] = pairs
        return self._pairs[split, language]

    def sample(self, split: str, language: str, max_pairs: int | None = None) -> Pairs | list[tuple[str, str]]:
        """Returns at most `max_pairs` pairs, evenly spaced: files are sorted by English, and neighbours are alike."""
        pairs = self.pairs(split, language)
        if max_pairs is None or max_pairs >= len(pairs):
            return pairs
        return [pairs[index * len(pairs) // max_pairs] for index in range(max_pairs)]

    def path(self, split: str, language: str) -> Path:
        """Returns the path of the pairs of a split and language."""
        return self.directory / split / f"{language}.tsv"

    def _facts(self, split: str, language: str) -> dict:
        if split not in SPLITS:
            raise UserError(f"no split {split!r}; the splits are {', '.join(SPLITS)}.")
        if language not in self.manifest["languages"]:
            raise UserError(
                f"{self.directory}: no language {language!r} among the corpus's "
                f"{len(self.languages)}.{did_you_mean(language, self.languages)}"
            )
        return self.manifest["languages"][language][split]

    def _check_size(self, split: str, language: str):
        path, expected = self.path(split, language), self._facts(split, language)["bytes"]
        if not path.is_file():
            raise UserError(f"{path}: missing, but {MANIFEST} lists {self.count(split, language)} pairs. {_REBUILD}")
        size = path.stat().st_size
        if size != expected:
            raise UserError(f"{path}: {size} bytes, but {MANIFEST} lists {expected}. {_REBUILD}")


def read_manifest(directory: Path) -> dict:
    """Returns the manifest of a corpus.

    Raises:
      UserError: there is none, it is corrupt or of another version, or a language in it is not a label and thus unsafe
        in a path.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"the corpus {directory} {_why_no_corpus(directory)}")
    try:
        manifest = json.loads(_read(path))
        version = (manifest["format"], manifest["version"])
        if version == (FORMAT, VERSION):
            _check_manifest(path, manifest)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: truncated or corrupt ({type(error).__name__}: {error}). {_REBUILD}") from None
    if version != (FORMAT, VERSION):
        raise UserError(
            f"{path}: format {version[0]!r} version {version[1]!r}; this program reads {FORMAT!r} "
            f"version {VERSION}. {_REBUILD}"
        )
    return manifest


def _why_no_corpus(directory: Path) -> str:
    """Returns what a path without a manifest is, and the command that builds a corpus there or of what is there."""
    build = "python -m tools.build_corpus"
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        reason = "it is a file" if directory.is_file() else f"it has other files, and no {MANIFEST}"
        return (
            f"is not a corpus ({reason}). If these are your own texts, build a corpus of them and name that: {build} "
            f"--preset=none --input={directory} --output=NEW_DIRECTORY."
        )
    reason = f"is not a corpus (it has no {MANIFEST})" if directory.is_dir() else "does not exist"
    return (
        f"{reason}. Build one: {build} --preset=PRESET --output={directory}; --help lists the presets, and "
        "--preset=none --input=DIR reads your own files."
    )


def _check_manifest(path: Path, manifest: dict):
    if not isinstance(manifest["fingerprint"], str):
        raise TypeError("fingerprint is not a string")
    for language, facts in manifest["languages"].items():
        languages.check_label(language, f"{path}, field languages")
        for split in SPLITS:
            if not all(isinstance(facts[split][field], int) for field in ("pairs", "bytes")):
                raise TypeError(f"the {split} counts of {language} are not integers")
            if not isinstance(facts[split].get("sha256", ""), str):
                raise TypeError(f"the {split} hash of {language} is not a string")
    for name, size in manifest.get("files", {}).items():
        safe_paths.check_relative_path(name, f"{path}, field files")
        if not isinstance(size, int):
            raise TypeError(f"the size of {name} is not an integer")
    _check_report(manifest)


def _check_report(manifest: dict):
    """Checks the fields that `corpus_report` reads: a complete corpus is reported on, too."""
    if not isinstance(manifest["preset"], str):
        raise TypeError("preset is not a string")
    lists = [(field, manifest[field]) for field in ("inputs", "missing_packages")]
    lists += [(field, manifest.get(field, [])) for field in ("own_inputs", "unread_files", "doubtful_files")]
    lists += [(f"held_out_inputs, {split}", names) for split, names in manifest.get("held_out_inputs", {}).items()]
    for field, names in lists:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{field} is not a list of strings")
    counts = [(field, manifest[field]) for field in ("english_labels", "unlabelled", "skipped_links")]
    keys = {name: manifest["english_keys"][name] for name in ("all", "eligible", "test", "valid")}
    counts += [("english_keys", keys), ("held_out_twice", {"all": manifest.get("held_out_twice", 0)})]
    for language, facts in (*manifest["languages"].items(), *manifest["languages_without_pairs"].items()):
        counts.append((language, {**facts["rejected"], "read": facts["read"]}))
    for field, by_name in counts:
        if not all(isinstance(count, int) for count in by_name.values()):
            raise TypeError(f"the counts of {field} are not integers")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None


def _check_text(path: Path, data: bytes):
    forbidden = {b"\0": "a NUL byte; this is a binary file", b"\r": "a carriage return; lines must end in LF alone"}
    for byte, problem in forbidden.items():
        if byte in data:
            raise UserError(f"{_location(path, data, data.index(byte))}: {problem}. {_REBUILD}")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        location = _location(path, data, error.start)
        raise UserError(f"{location}: not UTF-8 (byte 0x{data[error.start]:02x}). {_REBUILD}") from None


def _line_ends(path: Path, data: bytes) -> np.ndarray:
    """Returns the offset of each line's end, `[lines] int64`; raises UserError for a line without exactly one tab."""
    codes = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(codes == ord("\n"))
    if data[-1:] != b"\n":
        ends = np.append(ends, len(data))
    tabs = np.flatnonzero(codes == ord("\t"))
    tabs_before = np.searchsorted(tabs, ends)  # grows by exactly one with every line
    malformed = np.flatnonzero(np.diff(tabs_before, prepend=0) != 1)
    if len(malformed):
        line = int(malformed[0])
        count = int(tabs_before[line] - (tabs_before[line - 1] if line else 0))
        raise UserError(f"{path}:{line + 1}: {count} tabs; expected exactly one, source<TAB>english. {_REBUILD}")
    return ends


def _location(path: Path, data: bytes, offset: int) -> str:
    """Returns `FILE:LINE: byte OFFSET`; the offset counts from 0 at the start of the file."""
    line = data.count(b"\n", 0, offset) + 1
    return f"{path}:{line}: byte {offset}"
