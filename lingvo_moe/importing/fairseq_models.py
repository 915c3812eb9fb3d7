"""M2M-100, NLLB-200 and NLLB-MoE: texts begin with their language, on both sides."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.data.tokenizer import SIDES
from lingvo_moe.importing import fairseq_tokenizer
from lingvo_moe.importing.fairseq_weights import DENSE, SPARSE, FairseqPlaces, Names
from lingvo_moe.importing.family import Texts
from lingvo_moe.importing.model_config import MOST_LAYERS, Fields
from lingvo_moe.models.translation import Translation

_STACKS = ("encoder", "decoder")
REQUIRED: Mapping[str, Any] = {"scale_embedding": True, "tie_word_embeddings": True}  # of Marian's models, too


class Multilingual:
    """M2M-100 and NLLB-200, which has the type of M2M-100."""

    description = "M2M-100, NLLB-200"
    registered: tuple[str, ...] = ("m2m100", "nllb")
    required: Mapping[str, Any] = {"activation_function": "relu", **REQUIRED}
    defaults: Mapping[str, Any] = types.MappingProxyType({})
    names: Names = DENSE

    def model_fields(self, fields: Fields) -> dict[str, Any]:
        """See `Family`."""
        return dimensions(fields) | {"num_experts": 0, "layer_pattern": (), "encoder_layer_pattern": ()}

    def texts(self, directory: pathlib.Path, fields: Fields, name: str) -> Texts:
        """See `Family`."""
        shared = fairseq_tokenizer.convert(directory, name)
        fields.check_pieces(shared.vocabulary_size)
        return Texts(dict.fromkeys(SIDES, shared), fairseq_tokenizer.rows_of_ids(fields.vocabulary))

    def places(self, model: Translation, rows: np.ndarray, fields: Fields) -> FairseqPlaces:
        """See `Family`."""
        return FairseqPlaces(model, rows, self.names, self._expert_scale(fields))

    def _expert_scale(self, fields: Fields) -> float:
        return 1.0


class WithExperts(Multilingual):
    """NLLB-MoE."""

    description = "NLLB-MoE"
    required: Mapping[str, Any] = {
        **Multilingual.required,
        "router_bias": False,
        "moe_eval_capacity_token_fraction": 1.0,
        "second_expert_policy": "all",
    }
    names = SPARSE

    def model_fields(self, fields: Fields) -> dict[str, Any]:
        """See `Family`."""
        encoder, decoder = (("dense",) * (_sparse_step(fields, stack) - 1) + ("moe",) for stack in _STACKS)
        return dimensions(fields) | {
            "num_experts": fields.count("num_experts"),
            "layer_pattern": decoder,
            "encoder_layer_pattern": encoder if encoder != decoder else (),
        }

    def _expert_scale(self, fields: Fields) -> float:
        # Hugging Face's default where the file lacks it.
        return 1.0 - fields.share("moe_token_dropout", 0.2)


def dimensions(fields: Fields) -> dict[str, Any]:
    """Returns the fields of our model that the dimensions of these models, and of Marian's, decide."""
    encoder, decoder = (fields.count(f"{stack}_layers", MOST_LAYERS) for stack in _STACKS)
    heads, width = _of_both_stacks(fields, "attention_heads"), fields.count("d_model")
    if width % heads:
        raise fields.wrong("d_model", f"a multiple of the {heads} heads")
    return {
        "num_layers": encoder + decoder,
        "num_encoder_layers": encoder,
        "model_dim": width,
        "hidden_dim": _of_both_stacks(fields, "ffn_dim"),
        "num_heads": heads,
        "head_dim": width // heads,
        "source_vocabulary": fields.vocabulary,
        "target_vocabulary": fields.vocabulary,
    }


def _of_both_stacks(fields: Fields, field: str) -> int:
    encoder, decoder = (fields.count(f"{stack}_{field}") for stack in _STACKS)
    if encoder != decoder:
        raise fields.wrong(f"decoder_{field}", f"{encoder}, as encoder_{field}: our stacks have the same")
    return encoder


def _sparse_step(fields: Fields, stack: str) -> int:
    step, layers = fields.count(f"{stack}_sparse_step"), fields.count(f"{stack}_layers", MOST_LAYERS)
    if layers % step:
        raise fields.wrong(f"{stack}_sparse_step", f"a divisor of the {layers} layers")
    return step
