"""Embeddings for another tokenizer: trained weights go on with a vocabulary of another corpus or other settings."""

from __future__ import annotations

import numpy as np

from lingvo_moe.data.tokenizer import Tokenizer

_SPACE = "▁"  # SentencePiece's mark of the beginning of a word


def transfer(table: np.ndarray, old: Tokenizer, new: Tokenizer) -> np.ndarray:
    """Returns the table of the pieces of `new`, from that of the pieces of `old`.

    A piece of both keeps its row. Another one has the mean of the rows of the pieces that `old` splits it into (Gee et
    al. 2022, "Fast vocabulary transfer").

    Args:
      table: `[V, M]` of floats; V is at least the size of both vocabularies. Rows after the vocabulary are kept.
      old: the tokenizer that the table was trained with.
      new: the one that it will be used with.
    """
    rows = {piece: row for row, piece in enumerate(old.pieces(range(old.vocabulary_size)))}
    result = table.copy()
    for row, piece in enumerate(new.pieces(range(new.vocabulary_size))):
        result[row] = table[rows[piece]] if piece in rows else table[_parts(piece, old)].mean(axis=0)
    return result


def _parts(piece: str, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the ids of the pieces of a piece's text, `[length]`, without those of a space alone.

    Of a text that has no others it is the unknown piece.
    """
    ids = tokenizer.encode([piece.replace(_SPACE, " ")])[0]
    is_space = np.array([part == _SPACE for part in tokenizer.pieces(ids)], bool)
    return ids[~is_space] if (~is_space).any() else np.array([tokenizer.unk_id])
