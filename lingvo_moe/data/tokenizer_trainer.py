"""Trains the two SentencePiece tokenizers of a corpus and writes them as `tokenizer.Tokenizers` reads them.

Both are unigram models over nmt_nfkc text, trained on the sentences that the training stream with the same temperature
and seed 0 draws first (see `mixture`): a small language has the weight in the vocabulary that it has in training.
"""

from __future__ import annotations

import io
import json
import pathlib
import re
import shutil
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import sentencepiece

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.mixture import Mixture
from lingvo_moe.data.tokenizer import MANIFEST, SIDES, SPECIAL_IDS, Tokenizers, read_manifest, sha256
from lingvo_moe.errors import UserError
from lingvo_moe.utils import progress

# SentencePiece adds up in the order of its threads, and writes their number into the model: other number, other bytes.
_THREADS = 2
# Of the characters of all source languages this share keeps the frequent part of the Chinese and Japanese scripts;
# bytes spell the rest. English has a hundred characters; what is rarer there is noise, and becomes the unknown piece.
_SIDE_OPTIONS: dict[str, dict[str, Any]] = {
    "source": {"character_coverage": 0.9995, "byte_fallback": True},
    "target": {"character_coverage": 0.99999},
}
_FILES = {side: f"{side}.model" for side in SIDES}


def train(
    corpus: Corpus,
    output: pathlib.Path,
    vocabulary: dict[str, int],
    temperature: float,
    max_sentences: int,
    force: bool = False,
) -> tuple[Tokenizers, bool]:
    """Trains and writes the tokenizers, unless they are there. The same arguments give the same bytes.

    Args:
      corpus: its training split is read.
      output: the directory to make.
      vocabulary: the wanted number of pieces, by side; a small corpus may have fewer to give.
      temperature: of the mixture of languages.
      max_sentences: how many pairs to draw from the mixture, repetitions included.
      force: whether to replace a tokenizer of another corpus or of other settings.

    Returns:
      The tokenizers, and whether they are new.

    Raises:
      UserError: a vocabulary too small for the characters of the corpus, a corpus without a sentence to train on, or
        something else in the way.
    """
    output = output.resolve()  # so that `.` has a name, and a link stays one
    _recover(output)
    _check_is_ours(output)
    settings = {
        "corpus": corpus.fingerprint,
        "vocabulary": vocabulary,
        "temperature": str(temperature),
        "max_sentences": max_sentences,
        "sentencepiece": sentencepiece.__version__,
    }
    if _is_up_to_date(output, settings, force):
        return Tokenizers.load(output), False
    sentences = _draw(corpus, temperature, max_sentences)
    models = {side: _train_side(side, sentences[side], vocabulary[side]) for side in SIDES}
    manifest = {"ids": SPECIAL_IDS, "settings": settings, **{side: _describe(side, models[side]) for side in SIDES}}
    files = {_FILES[side]: models[side] for side in SIDES}
    _replace(output, {**files, MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode()})
    return Tokenizers.load(output), True


def _check_is_ours(directory: pathlib.Path):
    """Raises UserError if `directory` is there and is anything but a directory of tokenizer files."""
    ours = {MANIFEST, *_FILES.values()}
    if directory.exists() and not (directory.is_dir() and {entry.name for entry in directory.iterdir()} <= ours):
        raise UserError(
            f"{directory} holds something other than a tokenizer and is left alone; "
            "name another directory with --output."
        )


def _is_up_to_date(output: pathlib.Path, settings: dict[str, Any], force: bool) -> bool:
    """Whether `output` holds, undamaged, what `settings` would make; raises UserError if it holds something else."""
    if not (output / MANIFEST).exists():
        return False
    try:
        found = read_manifest(output).get("settings")
    except UserError:
        found = None
    if found != settings and not force:
        raise UserError(
            f"--output={output} holds a tokenizer of another corpus or of other flags, and models may "
            "depend on it. Name another directory, or replace it with --force."
        )
    try:
        Tokenizers.load(output)
    except UserError:
        return False  # a damaged file: training again gives the same bytes
    return found == settings


def _draw(corpus: Corpus, temperature: float, count: int) -> dict[str, Counter[str]]:
    """Returns how often each sentence comes in the first `count` examples of the training stream, by side."""
    mixture = Mixture(tuple(corpus.count("train", language) for language in corpus.languages), temperature)
    pairs, repetitions = np.unique(np.stack(mixture.draw(np.arange(count))), axis=1, return_counts=True)
    sentences: dict[str, Counter[str]] = {side: Counter() for side in SIDES}
    drawn = list(zip(*pairs.tolist(), repetitions.tolist(), strict=True))
    for language, index, times in progress.track(drawn, "reading the corpus", unit="pairs"):
        for side, text in zip(SIDES, corpus.pairs("train", corpus.languages[language])[index], strict=True):
            sentences[side][text] += times
    return sentences


def _train_side(side: str, sentences: Counter[str], vocabulary: int) -> bytes:
    """Returns the bytes of a SentencePiece model with at most `vocabulary` pieces."""
    _log(f"training {_FILES[side]} on {len(sentences)} different sentences")
    start, model = time.monotonic(), io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{text}\t{times}" for text, times in sentences.items()),
            input_format="tsv",
            model_writer=model,
            model_type="unigram",
            vocab_size=vocabulary,
            hard_vocab_limit=False,  # a small corpus may have fewer pieces; with enough of them the size is exact
            **{f"{name}_id": number for name, number in SPECIAL_IDS.items()},
            **_SIDE_OPTIONS[side],
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(error, side, vocabulary) from error
    _log(f"trained {_FILES[side]} in {time.monotonic() - start:.0f} s")
    return model.getvalue()


def _explained(error: RuntimeError, side: str, vocabulary: int) -> UserError:
    """What a person can do about SentencePiece's `error`."""
    if needed := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
        fixed = "special ids and bytes" if _SIDE_OPTIONS[side].get("byte_fallback") else "special ids"
        return UserError(
            f"--{side}_vocabulary={vocabulary} is too small: the {fixed} and the characters of this corpus "
            f"alone are {needed[1]} pieces. Pass a good deal more than that."
        )
    return UserError(
        f"{_FILES[side]} cannot be trained on this corpus (SentencePiece says: {str(error).strip()}). "
        "It needs sentences with visible characters, not longer than 4192 bytes; add some, and build the "
        "corpus again."
    )


def _describe(side: str, model: bytes) -> dict[str, Any]:
    size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    return {"file": _FILES[side], "vocabulary_size": size, "sha256": sha256(model)}


def _replace(output: pathlib.Path, files: dict[str, bytes]):
    """Makes `output` a directory of `files`, in place of what it is. An error names `output`.

    An interruption at any moment leaves the old directory or the new one, whole: where this cannot, `_recover` does it
    in the next run.
    """
    partial = _beside(output, "partial")
    try:
        partial.mkdir(parents=True)
        for name, data in files.items():
            (partial / name).write_bytes(data)
        if output.exists():
            output.rename(_beside(output, "replaced"))
        partial.rename(output)
    except OSError as error:
        error.filename = str(output)
        raise
    finally:
        _recover(output)


def _recover(output: pathlib.Path):
    """Puts the old directory back if `_replace` stopped after moving it aside, and clears what it left beside it."""
    partial, replaced = _beside(output, "partial"), _beside(output, "replaced")
    if replaced.exists() and not output.exists():
        replaced.rename(output)
    for leftover in (partial, replaced):
        if leftover.exists():
            _check_is_ours(leftover)
            shutil.rmtree(leftover)


def _beside(output: pathlib.Path, state: str) -> pathlib.Path:
    return output.with_name(f".{output.name}.{state}")


def _log(line: str):
    print(line, file=sys.stderr, flush=True)
