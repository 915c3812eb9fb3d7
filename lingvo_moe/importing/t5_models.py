"""What models of T5's architecture have in common, of the fields of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.importing.model_config import MOST_LAYERS, Fields

REQUIRED: Mapping[str, Any] = {"layer_norm_epsilon": 1e-6, "is_decoder_only": False}


def layer_counts(fields: Fields) -> tuple[int, int]:
    """Returns the numbers of layers of the encoder and of the decoder."""
    encoder = fields.count("num_layers", MOST_LAYERS)
    return encoder, fields.count("num_decoder_layers", MOST_LAYERS, default=encoder)


def dimensions(fields: Fields) -> dict[str, Any]:
    """Returns the fields of our model that the dimensions decide."""
    encoder, decoder = layer_counts(fields)
    vocabulary = fields.vocabulary + 1  # with bos, which theirs lack, and no prediction is
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
