"""Trains the SentencePiece tokenizers of a corpus and writes the directory that `tokenizer.Tokenizers` reads.

There is one for each side, or one for both. They are unigram models of nmt_nfkc text, trained on the first sentences of
the training stream with the same temperature and seed 0 (see `mixture`): a small language has the same weight in the
vocabulary as in training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import sentencepiece

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import MANIFEST, SIDES, SPECIAL_IDS, Tokenizers, read_manifest
from lingvo_moe.data.vocabularies import aligned_pieces, sentencepiece_process
from lingvo_moe.data.vocabularies.corpus_sample import sample_pairs
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_directories
from lingvo_moe.utils.hashes import sha256

_logger = logging.getLogger(__name__)

# SentencePiece sums in the order of its threads and stores their number in the model: another number gives other bytes.
_THREADS = 2
# Of the characters of all source languages this fraction covers the frequent part of the Chinese and Japanese scripts;
# byte fallback encodes the rest. English has a hundred characters; rarer ones are noise and become the unknown piece.
_SIDE_OPTIONS: dict[str, dict[str, Any]] = {
    "source": {"character_coverage": 0.9995, "byte_fallback": True},
    "target": {"character_coverage": 0.99999},
}
SHARED = "shared"  # the vocabulary of both sides
_SIDE_OPTIONS[SHARED] = _SIDE_OPTIONS["source"]
_FILES = {name: f"{name}.model" for name in _SIDE_OPTIONS}


def train(
    corpus: Corpus,
    output: pathlib.Path,
    vocabulary: dict[str, int],
    temperature: float,
    max_sentences: int,
    align_pieces: bool = False,
    force: bool = False,
) -> tuple[Tokenizers, bool]:
    """Trains and writes the tokenizers, unless they exist. The same arguments give the same bytes.

    Args:
      corpus: its training split is read.
      output: the directory to make.
      vocabulary: the requested number of pieces, by side, or of `SHARED` alone; a small corpus may give fewer.
      temperature: of the sampling of languages.
      max_sentences: the number of pairs to sample, including repetitions.
      align_pieces: whether the source tokenizer has the target's pieces and prefers them; see `aligned_pieces`.
      force: whether to replace a tokenizer of another corpus or of other settings.

    Returns:
      The tokenizers, and whether this call trained them.

    Raises:
      UserError: a vocabulary too small for the characters of the corpus, or for aligned pieces, a corpus without a
        usable sentence, or an output directory with other files.
    """
    output = pathlib.Path(os.path.realpath(output))  # so that `.` has a name, and a link is kept
    output_directories.recover("--output", output, _check_only_tokenizer_files)
    _check_only_tokenizer_files(output)
    settings = {
        "corpus": corpus.fingerprint,
        "vocabulary": vocabulary,
        "temperature": str(temperature),
        "max_sentences": max_sentences,
        **({"align_pieces": True} if align_pieces else {}),
        "sentencepiece": sentencepiece.__version__,
    }
    _check_replaceable(output, settings, force)
    if _is_up_to_date(output, settings):
        return Tokenizers.load(output), False
    output_directories.check("--output", output)
    sentences = _sample(corpus, temperature, max_sentences)
    if SHARED in vocabulary:
        sentences = {SHARED: sentences["source"] + sentences["target"]}
    models = {name: _train_one(name, sentences[name], vocabulary[name]) for name in vocabulary}
    if align_pieces:
        models["source"] = aligned_pieces.align(models["source"], models["target"], vocabulary["source"])
    of_sides = {side: SHARED if SHARED in vocabulary else side for side in SIDES}
    described = {side: _describe(name, models[name]) for side, name in of_sides.items()}
    manifest = {"ids": SPECIAL_IDS, "settings": settings, **described}
    files = {_FILES[name]: model for name, model in models.items()}
    with _replacing(output) as partial:
        for name, data in {**files, MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode()}.items():
            (partial / name).write_bytes(data)
        _check_replaceable(output, settings, force)  # another process may have made it meanwhile
    return Tokenizers.load(output), True


def _check_only_tokenizer_files(directory: pathlib.Path):
    """Raises UserError if `directory` exists and is anything but a directory of tokenizer files."""
    names = {MANIFEST, *_FILES.values(), *(f"{file}.xz" for file in _FILES.values())}
    if directory.exists() and not (directory.is_dir() and {entry.name for entry in directory.iterdir()} <= names):
        kind = "a directory with files that are not of a tokenizer" if directory.is_dir() else "a file"
        raise UserError(f"{directory} is {kind}, and is left unchanged; name another directory with --output.")


def _check_replaceable(output: pathlib.Path, settings: dict[str, Any], force: bool):
    """Raises UserError if `output` has a tokenizer of other settings, or models without a manifest; not by force."""
    if force or not output.exists() or not any(output.iterdir()):
        return
    if not (output / MANIFEST).exists():
        raise UserError(
            f"--output={output} has models, but no {MANIFEST}, so they are not of this command. Name another "
            f"directory, or replace them with --force."
        )
    if _settings(output) != settings:
        raise UserError(
            f"--output={output} has a tokenizer of another corpus or of other flags, and models may "
            "depend on it. Name another directory, or replace it with --force."
        )


def _is_up_to_date(output: pathlib.Path, settings: dict[str, Any]) -> bool:
    """Returns whether `output` has the intact result of `settings`."""
    if _settings(output) != settings:
        return False
    try:
        Tokenizers.load(output)
    except UserError:
        return False  # a corrupt file: training again gives the same bytes
    return True


def _settings(output: pathlib.Path) -> dict[str, Any] | None:
    """Returns the settings in the manifest of `output`; None without a readable one."""
    try:
        return read_manifest(output).get("settings")
    except UserError:
        return None


def _sample(corpus: Corpus, temperature: float, count: int) -> dict[str, Counter[str]]:
    """Returns how often each sentence occurs in the first `count` examples of the training stream, by side."""
    sentences: dict[str, Counter[str]] = {side: Counter() for side in SIDES}
    for *texts, times in sample_pairs(corpus, temperature, count):
        for side, text in zip(SIDES, texts, strict=True):
            sentences[side][text] += times
    return sentences


def _train_one(name: str, sentences: Counter[str], vocabulary: int) -> bytes:
    """Returns the bytes of a SentencePiece model, of a side or shared, with at most `vocabulary` pieces."""
    _logger.info("training %s on %d different sentences", _FILES[name], len(sentences))
    start = time.monotonic()
    options = {
        "input_format": "tsv",
        "model_type": "unigram",
        "vocab_size": vocabulary,
        "hard_vocab_limit": False,  # a small corpus may have fewer pieces; otherwise the size is exact
        **{f"{special}_id": number for special, number in SPECIAL_IDS.items()},
        **_SIDE_OPTIONS[name],
        "num_threads": _THREADS,
        "minloglevel": 2,
    }
    try:
        model = sentencepiece_process.train(
            (f"{text}\t{times}" for text, times in sentences.items()),
            options,
            lambda seconds: _logger.info("training %s for %.0f s", _FILES[name], seconds),
        )
    except RuntimeError as error:
        raise _user_error(error, name, vocabulary) from error
    _logger.info("trained %s in %.0f s", _FILES[name], time.monotonic() - start)
    return model


def _user_error(error: RuntimeError, name: str, vocabulary: int) -> UserError:
    """Returns SentencePiece's `error` with its remedy."""
    if needed := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
        fixed = "special ids and bytes" if _SIDE_OPTIONS[name].get("byte_fallback") else "special ids"
        return UserError(
            f"--{name}_vocabulary={vocabulary} is too small: the {fixed} and the characters of this corpus "
            f"alone are {needed[1]} pieces. Pass a considerably larger number."
        )
    return UserError(
        f"{_FILES[name]} cannot be trained on this corpus (SentencePiece: {str(error).strip()}). "
        "It needs sentences with visible characters, not longer than 4192 bytes; add some, and build the "
        "corpus again."
    )


def _describe(name: str, model: bytes) -> dict[str, Any]:
    size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    return {"file": _FILES[name], "vocabulary_size": size, "sha256": sha256(model)}


@contextlib.contextmanager
def _replacing(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty directory that then replaces `output`. An error names `output`."""
    try:
        with output_directories.atomic_directory(output, _check_only_tokenizer_files) as partial:
            yield partial
    except OSError as error:
        error.filename = str(output)
        raise
