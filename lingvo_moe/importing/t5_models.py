"""What models of T5's architecture have in common: fields of config.json, and ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizer
from lingvo_moe.importing.family import Texts
from lingvo_moe.importing.model_config import MOST_LAYERS, Fields

REQUIRED: Mapping[str, Any] = {"layer_norm_epsilon": 1e-6, "is_decoder_only": False}


def layer_counts(fields: Fields) -> tuple[int, int]:
    """Returns the numbers of layers of the encoder and of the decoder."""
    encoder = fields.count("num_layers", MOST_LAYERS)
    return encoder, fields.count("num_decoder_layers", MOST_LAYERS, default=encoder)


def dimensions(fields: Fields) -> dict[str, Any]:
    """Returns the fields of our model that the dimensions decide."""
    encoder, decoder = layer_counts(fields)
    vocabulary = fields.vocabulary + 1  # bos, see `rows_of_ids`
    return {
        "num_layers": encoder + decoder,
        "num_encoder_layers": encoder,
        "model_dim": fields.count("d_model"),
        "hidden_dim": fields.count("d_ff"),
        "num_heads": fields.count("num_heads"),
        "head_dim": fields.count("d_kv"),
        "source_vocabulary": vocabulary,
        "target_vocabulary": vocabulary,
        "relative_buckets": fields.count("relative_attention_num_buckets", default=32),
        "relative_distance": fields.count("relative_attention_max_distance", default=128),
        "excluded_ids": (SPECIAL_IDS["bos"],),
    }


def texts(fields: Fields, tokenizers: Mapping[str, Tokenizer], ids: Mapping[str, int], start: int, file: str) -> Texts:
    """Returns the tokenizers of a model, and the rows of its table.

    Args:
      fields: of config.json.
      tokenizers: by side.
      ids: theirs of `pad`, `eos` and `unk`.
      start: what the decoder's input begins with.
      file: what the ids are read from.

    Raises:
      UserError: config.json has other ids, or fewer pieces than the tokenizer.
    """
    expected = {"pad_token_id": ids["pad"], "eos_token_id": ids["eos"], "decoder_start_token_id": start}
    fields.check_ids(expected, file)
    fields.check_pieces(tokenizers["source"].vocabulary_size - 1)  # without our bos
    return Texts(tokenizers, rows_of_ids(ids, fields.vocabulary))


def rows_of_ids(ids: Mapping[str, int], size: int) -> np.ndarray:
    """Returns the rows of their table with our ids, in the order of these.

    Ours have the special ids of `data.tokenizer`. Of these, bos has no row there, and is neither read nor predicted
    here, so all other ids are larger by one.

    Args:
      ids: theirs of `pad`, `eos` and `unk`, which are the first three.
      size: of their table.
    """
    theirs = {**ids, "bos": ids["unk"]}
    special = [theirs[name] for name in sorted(SPECIAL_IDS, key=SPECIAL_IDS.__getitem__)]
    return np.concatenate([special, np.arange(len(ids), size)])
