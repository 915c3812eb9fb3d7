"""MADLAD-400, whose models are of T5's class: the source begins with the language of its translation."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.importing import madlad_tokenizer, t5_models
from lingvo_moe.importing.family import Texts
from lingvo_moe.importing.model_config import Fields
from lingvo_moe.importing.t5_weights import GATED, T5Places
from lingvo_moe.models.translation import Translation


class Madlad:
    """MADLAD-400."""

    description = "MADLAD-400"
    registered: tuple[str, ...] = ("madlad",)
    required: Mapping[str, Any] = {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        **t5_models.REQUIRED,
    }
    defaults: Mapping[str, Any] = types.MappingProxyType({"feed_forward_proj": "relu", "tie_word_embeddings": True})

    def model_fields(self, fields: Fields) -> dict[str, Any]:
        """See `Family`."""
        return t5_models.dimensions(fields) | {"num_experts": 0}

    def texts(self, directory: pathlib.Path, fields: Fields, name: str) -> Texts:
        """See `Family`."""
        ids, tokenizers = madlad_tokenizer.IDS, madlad_tokenizer.convert(directory, name)
        return t5_models.texts(fields, tokenizers, ids, ids["unk"], madlad_tokenizer.FILE)

    def places(self, model: Translation, rows: np.ndarray, fields: Fields) -> T5Places:
        """See `Family`."""
        return T5Places(model, rows, GATED)
