"""Initial embeddings from counts of a parallel corpus: pieces that translate each other start with like vectors.

Pretrained, aligned embeddings help translation most where there is little training (Qi et al. 2018). These come from
the training corpus alone:

- An English piece's vector is near those of pieces with the same neighbours: positive pointwise mutual information with
  the two pieces before and after it, reduced by singular value decomposition (Levy and Goldberg 2014).
- A source piece's vector is the mean of the English pieces that it translates to, by `lexicon`.
- With one tokenizer for both sides, a piece has a mean of both, by its frequency on each.

Each piece has a random part of its own, so that no two are equal.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors
import scipy.sparse
from safetensors import numpy as safetensors_numpy
from scipy.sparse import linalg

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import SIDES, SPECIAL_IDS, Tokenizers
from lingvo_moe.data.vocabularies.corpus_sample import sample_pairs
from lingvo_moe.data.vocabularies.lexicon import SentencePairs, translation_probabilities
from lingvo_moe.errors import UserError
from lingvo_moe.utils import tensor_files

SUFFIX = ".safetensors"
TEMPERATURE, MAX_SENTENCES = 5.0, 150_000  # of the sample, unless others are given
_METADATA, _FORMAT = "lingvo_moe.piece_vectors", 2
_CONTEXT_DIMENSIONS = 128
_REACH = 2  # neighbours on each side
# Trials of m4.Quickstart, docs/results.md: a larger weight of the neighbours was better up to here.
_CONTEXT_WEIGHT = 0.92
_RANDOM_WEIGHT = 0.3  # of a source piece's own random vector, beside 1 of its translations
_LEAST_PROBABILITY = 0.03  # of a translation to count
_NOT_OURS = (safetensors.SafetensorError, KeyError, TypeError, ValueError)  # what `_load` raises for other files


class Vectors(NamedTuple):
    """The vectors `[V, dim] float32` of the pieces of each side; one array if they share a tokenizer."""

    source: np.ndarray
    target: np.ndarray


def make(
    file: str,
    corpus: Corpus,
    tokenizers: Tokenizers,
    dim: int,
    temperature: float = TEMPERATURE,
    max_sentences: int = MAX_SENTENCES,
) -> bool:
    """Writes the vectors of `train` to a file, unless it has those of the same arguments; returns whether it wrote.

    Raises:
      UserError: as `train` and `write`.
    """
    sample = {"temperature": str(temperature), "max_sentences": max_sentences}
    settings = {"corpus": corpus.fingerprint, "model_dim": dim, **sample}
    if is_up_to_date(file, tokenizers, settings):
        return False
    write(file, train(corpus, tokenizers, dim, temperature, max_sentences), tokenizers, settings)
    return True


def train(corpus: Corpus, tokenizers: Tokenizers, dim: int, temperature: float, max_sentences: int) -> Vectors:
    """Returns a unit vector for each piece: `[V, dim] float32` of source and of target.

    Args:
      corpus: its training split is read.
      tokenizers: two, or one for both sides, whose pieces have the same vector on both.
      dim: the model dimension.
      temperature: of the sampling of languages.
      max_sentences: the number of pairs to sample.

    Raises:
      UserError: the corpus has no training pair.
    """
    sources, targets, _ = zip(*sample_pairs(corpus, temperature, max_sentences), strict=True)
    pairs = list(zip(tokenizers.source.encode(sources), tokenizers.target.encode(targets), strict=True))
    sizes = tokenizers.source.vocabulary_size, tokenizers.target.vocabulary_size
    if not tokenizers.is_shared:
        return Vectors(*separate_vectors(pairs, *sizes, dim))
    vectors = shared_vectors(pairs, sizes[0], dim)
    return Vectors(vectors, vectors)


def shared_vectors(pairs: SentencePairs, vocabulary: int, dim: int) -> np.ndarray:
    """Returns a unit vector for each piece of both sides, `[vocabulary, dim] float32`, from ids of pairs."""
    generator = np.random.default_rng(0)
    noise = _unit(generator.normal(size=(vocabulary, dim)))
    translated, english = _side_vectors(pairs, noise, noise, generator)
    counts = [np.bincount(np.concatenate(side), minlength=vocabulary) for side in zip(*pairs, strict=True)]
    in_english = (counts[1] / np.maximum(counts[0] + counts[1], 1))[:, None]
    return _finished(in_english * english + (1 - in_english) * translated, noise)


def separate_vectors(
    pairs: SentencePairs, num_sources: int, num_targets: int, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns unit vectors of source and of target pieces, `[num_sources, dim]` and `[num_targets, dim] float32`."""
    generator = np.random.default_rng(0)
    source_noise, target_noise = (_unit(generator.normal(size=(size, dim))) for size in (num_sources, num_targets))
    source, target = _side_vectors(pairs, source_noise, target_noise, generator)
    return _finished(source, source_noise), _finished(target, target_noise)


def _side_vectors(
    pairs: SentencePairs, source_noise: np.ndarray, target_noise: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns unit vectors of source and target pieces, of the shapes of their random parts."""
    vocabulary, dim = target_noise.shape
    rotation = np.linalg.qr(generator.normal(size=(dim, dim)))[0]
    reduced = min(_CONTEXT_DIMENSIONS, dim // 2, vocabulary - 1)
    contexts = context_vectors([target for _, target in pairs], vocabulary, reduced)
    rotated = contexts @ rotation[: contexts.shape[1]]
    english = _unit(_CONTEXT_WEIGHT * rotated + np.sqrt(1 - _CONTEXT_WEIGHT**2) * target_noise)

    table = translation_probabilities(pairs, len(source_noise), vocabulary)
    table[table < _LEAST_PROBABILITY] = 0.0
    return _unit(_unit(table @ english.astype(np.float32)) + _RANDOM_WEIGHT * source_noise), english


def _finished(vectors: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Returns unit vectors of float32; those of special pieces are random."""
    vectors = _unit(vectors)
    special = list(SPECIAL_IDS.values())
    vectors[special] = noise[special]
    return vectors.astype(np.float32)


def context_vectors(sentences: Sequence[np.ndarray], vocabulary: int, dim: int) -> np.ndarray:
    """Returns unit vectors `[vocabulary, dim]`: pieces with the same neighbours have like ones, unseen pieces zero.

    Args:
      sentences: ids `[length]`; equal sentences count once.
      vocabulary: the number of pieces.
      dim: less than `vocabulary`.
    """
    ends = SPECIAL_IDS["bos"], SPECIAL_IDS["eos"]
    gap = np.full(_REACH, SPECIAL_IDS["pad"], np.int32)
    different = {sentence.tobytes(): sentence for sentence in sentences}.values()
    text = np.concatenate([part for ids in different for part in ([ends[0]], ids, [ends[1]], gap)])
    blocks = []
    for distance in range(1, _REACH + 1):
        before, after = text[:-distance], text[distance:]
        inside = (before != gap[0]) & (after != gap[0])
        entries = before[inside], after[inside]
        counts = scipy.sparse.csr_array((np.ones(len(entries[0])), entries), shape=(vocabulary, vocabulary))
        blocks += [_positive_pmi(counts), _positive_pmi(counts.T.tocsr())]
    features = scipy.sparse.hstack(blocks).tocsr()
    left, values, _ = linalg.svds(features, k=dim, rng=np.random.default_rng(0))
    return _unit(left * np.sqrt(values))


def write(file: str, vectors: Vectors, tokenizers: Tokenizers, settings: dict[str, Any]):
    """Writes the vectors of tokenizers' pieces to a safetensors file, completely or not at all.

    Args:
      file: whose name ends with `SUFFIX`.
      vectors: of `train`.
      tokenizers: of the pieces.
      settings: what the vectors were made from, in terms of JSON; see `is_up_to_date`.

    Raises:
      UserError: the file cannot be written, as on a full disk.
    """
    metadata = {"format": _FORMAT, "tokenizers": list(tokenizers.hashes), "settings": settings}
    tables = {"shared": vectors.source} if tokenizers.is_shared else vectors._asdict()
    tensor_files.save(file, file, tables, {_METADATA: json.dumps(metadata, sort_keys=True)})


def read(file: str, tokenizers: Tokenizers, flag: str) -> Vectors:
    """Returns the vectors of a file that `write` made for the same tokenizers.

    Raises:
      UserError: no such file, another file, or one of other tokenizers; names `flag`.
    """
    if not pathlib.Path(file).is_file():
        raise UserError(f"{flag}={file}: there is no such file; `python -m tools.train_embeddings` makes one.")
    try:
        metadata, tables = _load(file)
        version, identity = metadata["format"], metadata.get("tokenizers")
        vectors = Vectors(*(tables["shared" if "shared" in tables else side] for side in SIDES))
    except _NOT_OURS as error:
        raise UserError(f"{flag}={file} is not a file of tools.train_embeddings ({error}).") from None
    if version != _FORMAT:
        raise UserError(f"{flag}={file}: format {version!r}; this program knows {_FORMAT}. Make the file again.")
    if identity != list(tokenizers.hashes) or any(
        len(table) != tokenizers.by_side[side].vocabulary_size for side, table in vectors._asdict().items()
    ):
        raise UserError(f"{flag}={file} was made with another tokenizer; make it again with --tokenizers of the model.")
    return vectors


def is_up_to_date(file: str, tokenizers: Tokenizers, settings: dict[str, Any]) -> bool:
    """Returns whether `file` is complete and has the vectors of these settings."""
    expected = {"format": _FORMAT, "tokenizers": list(tokenizers.hashes), "settings": settings}
    try:
        return pathlib.Path(file).is_file() and _load(file)[0] == expected
    except _NOT_OURS:
        return False


def _load(file: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with safetensors.safe_open(file, "numpy") as opened:
        metadata = json.loads((opened.metadata() or {})[_METADATA])
    return metadata, safetensors_numpy.load_file(file)


def extend(vectors: np.ndarray, rows: int) -> np.ndarray:
    """Returns `vectors [V, dim]` with random unit vectors after them: `[rows, dim]`, for a model of `rows` pieces."""
    surplus = np.random.default_rng(1).normal(size=(rows - len(vectors), vectors.shape[1]))
    return np.concatenate([vectors, _unit(surplus).astype(vectors.dtype)])


def _positive_pmi(counts: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Returns the positive pointwise mutual information of rows and columns, of the same shape as `counts`.

    The frequency of columns is smoothed with the exponent 0.75 (Levy et al. 2015).
    """
    entries = counts.tocoo()
    rows, columns = counts.sum(axis=1), counts.sum(axis=0) ** 0.75
    expected = rows[entries.row] * columns[entries.col] / columns.sum()
    values = np.maximum(np.log(entries.data / expected), 0.0)
    return scipy.sparse.csr_array((values, (entries.row, entries.col)), shape=counts.shape)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Divides rows by their length; zero stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 1e-6)
