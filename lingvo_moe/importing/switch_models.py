"""Switch Transformers: T5's architecture with experts, each token with one (Fedus, Zoph and Shazeer 2021).

They were trained to fill in gaps of English texts, and are to be trained further.
"""

from __future__ import annotations

import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.importing import switch_tokenizer, t5_models
from lingvo_moe.importing.family import Texts
from lingvo_moe.importing.model_config import MOST_LAYERS, Fields
from lingvo_moe.importing.t5_weights import SWITCH, T5Places
from lingvo_moe.models.translation import Translation

_STACKS = ("encoder", "decoder")


class Switch:
    """Switch Transformers."""

    description = "Switch Transformers"
    registered: tuple[str, ...] = ("switch",)
    required: Mapping[str, Any] = {
        "feed_forward_proj": "relu",
        "dense_act_fn": "relu",
        "is_gated_act": False,
        "tie_word_embeddings": True,
        "router_bias": False,
        **t5_models.REQUIRED,
    }
    defaults: Mapping[str, Any] = types.MappingProxyType({})

    def model_fields(self, fields: Fields) -> dict[str, Any]:
        """See `Family`."""
        counts = zip(_STACKS, t5_models.layer_counts(fields))
        encoder, decoder = (_pattern(fields, stack, layers) for stack, layers in counts)
        return t5_models.dimensions(fields) | {
            "num_experts": fields.count("num_experts", default=8),
            "layer_pattern": decoder,
            "encoder_layer_pattern": encoder if encoder != decoder else (),
        }

    def texts(self, directory: pathlib.Path, fields: Fields, name: str) -> Texts:
        """See `Family`."""
        ids, tokenizers = switch_tokenizer.IDS, switch_tokenizer.convert(directory, name)
        return t5_models.texts(fields, tokenizers, ids, ids["pad"], switch_tokenizer.FILE)

    def places(self, model: Translation, rows: np.ndarray, fields: Fields) -> T5Places:
        """See `Family`."""
        return T5Places(model, rows, SWITCH)


def _pattern(fields: Fields, stack: str, layers: int) -> tuple[str, ...]:
    """Returns the layer pattern of a stack: with experts are its second layer and every n-th from there on."""
    field = f"num_sparse_{stack}_layers"
    sparse = fields.count(field, MOST_LAYERS, default=3)
    if layers % sparse:
        raise fields.wrong(field, f"a divisor of the {layers} layers")
    step = layers // sparse
    return ("moe",) if step == 1 else ("dense", "moe", *("dense",) * (step - 2))
