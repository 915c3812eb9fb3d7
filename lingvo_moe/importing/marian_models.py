"""Opus-MT: Marian's models with a SentencePiece model of each side, and one table of the pieces of both."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.data.tokenizer import SIDES
from lingvo_moe.importing import fairseq_models, marian_tokenizer
from lingvo_moe.importing.fairseq_weights import DENSE, FairseqPlaces
from lingvo_moe.importing.family import Texts
from lingvo_moe.importing.model_config import Fields
from lingvo_moe.models.translation import Translation

_SWISH = ("dense:activation=swish",)
_LAYER_PATTERNS: dict[str, tuple[str, ...]] = {"relu": (), "swish": _SWISH, "silu": _SWISH}


class Marian:
    """Opus-MT."""

    description = "Opus-MT"
    registered: tuple[str, ...] = ("opus",)
    required: Mapping[str, Any] = {
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "static_position_embeddings": True,
        "share_encoder_decoder_embeddings": True,
        **fairseq_models.REQUIRED,
    }
    defaults: Mapping[str, Any] = types.MappingProxyType({"scale_embedding": False})

    def model_fields(self, fields: Fields) -> dict[str, Any]:
        """See `Family`."""
        vocabulary = fields.vocabulary + 1  # bos, see `marian_tokenizer.rows_of_ids`
        return fairseq_models.dimensions(fields) | {
            "source_vocabulary": vocabulary,
            "target_vocabulary": vocabulary,
            "num_experts": 0,
            "layer_pattern": _LAYER_PATTERNS[fields.choice("activation_function", tuple(_LAYER_PATTERNS))],
            "encoder_layer_pattern": (),
        }

    def texts(self, directory: pathlib.Path, fields: Fields, name: str) -> Texts:
        """See `Family`."""
        pieces = marian_tokenizer.read_vocabulary(directory, name)
        special = marian_tokenizer.special_ids(pieces)
        starts = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), special["pad"])
        fields.check_ids({"eos_token_id": special["eos"], **starts}, marian_tokenizer.VOCABULARY)
        tokenizers = marian_tokenizer.convert(directory, pieces, name)
        fields.check_pieces(len(pieces), are_all=True)
        settings = tuple(
            f"input.{side}_language={tokenizers[side].own_language}"
            for side in SIDES
            if side == "source" or not tokenizers["source"].names_target
        )
        return Texts(tokenizers, marian_tokenizer.rows_of_ids(pieces), settings)

    def places(self, model: Translation, rows: np.ndarray, fields: Fields) -> FairseqPlaces:
        """See `Family`."""
        return FairseqPlaces(model, rows, DENSE)
