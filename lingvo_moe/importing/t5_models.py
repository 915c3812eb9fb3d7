"""MADLAD-400, whose models are of T5's class: the source begins with the language of its translation."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.importing import t5_tokenizer
from lingvo_moe.importing.family import Texts
from lingvo_moe.importing.model_config import MOST_LAYERS, Fields
from lingvo_moe.importing.t5_weights import T5Places
from lingvo_moe.models.translation import Translation


class T5:
    """MADLAD-400."""

    description = "MADLAD-400"
    registered: tuple[str, ...] = ("madlad",)
    required: Mapping[str, Any] = {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-6,
        "is_decoder_only": False,
    }

    def model_fields(self, fields: Fields) -> dict[str, Any]:
        """See `Family`."""
        encoder = fields.count("num_layers", MOST_LAYERS)
        decoder = fields.count("num_decoder_layers", MOST_LAYERS, default=encoder)
        vocabulary = fields.vocabulary + 1  # bos, see `t5_tokenizer`
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
            "num_experts": 0,
            "excluded_ids": (SPECIAL_IDS["bos"],),
        }

    def texts(self, directory: pathlib.Path, fields: Fields, name: str) -> Texts:
        """See `Family`."""
        ids = {f"{special}_token_id": t5_tokenizer.IDS[special] for special in ("pad", "eos")}
        fields.check_ids(ids | {"decoder_start_token_id": t5_tokenizer.IDS["unk"]}, t5_tokenizer.FILE)
        tokenizers = t5_tokenizer.convert(directory, name)
        fields.check_pieces(tokenizers["source"].vocabulary_size - 1)
        return Texts(tokenizers, t5_tokenizer.rows_of_ids(fields.vocabulary))

    def places(self, model: Translation, rows: np.ndarray, fields: Fields) -> T5Places:
        """See `Family`."""
        return T5Places(model, rows)
