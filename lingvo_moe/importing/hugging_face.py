"""M2M-100, NLLB-200 and NLLB-MoE in Hugging Face's format, as experiments of ours.

Their Transformers are ours with biases, another epsilon, positions that count from 2, and eos as the decoder's first
token; `Experiment` has settings for these. The registered models of `params.m2m100` and `params.nllb` have the
dimensions of the published ones; other dimensions are settings of one of these.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe import experiment as experiments
from lingvo_moe import overrides, registry
from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing import model_directory, tokenizer, weights
from lingvo_moe.importing.model_directory import CONFIG
from lingvo_moe.models.translation import Translation

FAMILIES = ("m2m100", "nllb")  # of registered models
_DENSE, _SPARSE = "m2m_100", "nllb-moe"  # NLLB-200 without experts is of the class of M2M-100
_SIDES = ("encoder", "decoder")
# What the models of these types must have, to be computed by our layers.
_REQUIRED = {
    "activation_function": "relu",
    "scale_embedding": True,
    "tie_word_embeddings": True,
    "router_bias": False,
    "moe_eval_capacity_token_fraction": 1.0,
    "second_expert_policy": "all",
}


class Described(NamedTuple):
    """What a directory says of its model, without the weights.

    Attributes:
      name: the registered name.
      settings: `field=value` of what differs from it.
      model: with these settings.
      fields: the fields of the model that config.json decides.
      places: where the files have the weights.
      tokenizer: of both sides.
    """

    name: str
    settings: tuple[str, ...]
    model: Translation
    fields: Mapping[str, Any]
    places: weights.Places
    tokenizer: Tokenizer


class Imported(NamedTuple):
    """A model in our form.

    Attributes:
      name: the registered name.
      settings: `field=value` of what differs from it.
      theta: the weights by path, in float32.
      tokenizer: of both sides.
    """

    name: str
    settings: tuple[str, ...]
    theta: dict[str, np.ndarray]
    tokenizer: Tokenizer


def describe(directory: pathlib.Path, name: str) -> Described:
    """Reads what a directory says of its model, of type m2m_100 or nllb-moe.

    Args:
      directory: with config.json, sentencepiece.bpe.model and the JSON files of the tokenizer.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: a file is missing or corrupt, or the model is of another kind.
    """
    config = model_directory.read_json(directory / CONFIG, name)
    if (kind := config.get("model_type")) not in (_DENSE, _SPARSE):
        raise UserError(
            f"{name}: {CONFIG} has model_type {kind!r}; expected {_DENSE} (M2M-100, NLLB-200) or {_SPARSE} (NLLB-MoE)."
        )
    fields = _Fields(config, name)
    of_model = fields.of_model()
    registered, model, settings = fields.closest(of_model)
    converted = tokenizer.convert(directory, name)
    if (pieces := converted.vocabulary_size) > (size := model.source_vocabulary):
        raise UserError(
            f"{name}: the tokenizer has {pieces} pieces, but {CONFIG} has vocab_size {size}, so they are of two "
            f"models; copy the files again."
        )
    places = weights.Places(model, weights.SPARSE if kind == _SPARSE else weights.DENSE, fields.expert_scale)
    return Described(registered, settings, model, of_model, places, converted)


def read(directory: pathlib.Path, name: str) -> Imported:
    """Reads a model.

    Args:
      directory: as of `describe`, with safetensors files besides.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: as `describe`, or a file of weights is missing or corrupt.
    """
    found = describe(directory, name)
    with model_directory.tensors(directory, name) as tensors:
        theta = weights.read(found.places, tensors, name)
    return Imported(found.name, found.settings, theta, found.tokenizer)


class _Fields:
    """The fields of a config.json."""

    def __init__(self, config: Mapping[str, Any], name: str):
        self._config, self._name = config, name
        for field, expected in _REQUIRED.items():
            if config.get(field, expected) != expected:
                raise UserError(f"{name}: {CONFIG} has {field} {config[field]!r}; only {expected!r} can be imported.")

    @property
    def expert_scale(self) -> float:
        """What multiplies the outputs of experts in inference."""
        # Hugging Face's default where the file lacks it; models without experts do not use it.
        dropped = self._config.get("moe_token_dropout", 0.2)
        if not isinstance(dropped, (int, float)) or not 0 <= dropped < 1:
            raise self._wrong("moe_token_dropout", "a share below 1")
        return 1.0 - dropped

    def closest(self, fields: Mapping[str, Any]) -> tuple[str, Translation, tuple[str, ...]]:
        """See `_closest`; raises UserError for fields with which there is no model."""
        try:
            return _closest(fields)
        except UserError as error:
            raise UserError(f"{self._name}: {CONFIG} is of no model that can be imported: {error}") from None

    def of_model(self) -> dict[str, Any]:
        """The fields of our model, by name."""
        encoder, decoder = (self._count(f"{side}_layers") for side in _SIDES)
        heads, width = self._of_both_sides("attention_heads"), self._count("d_model")
        if width % heads:
            raise self._wrong("d_model", f"a multiple of the {heads} heads")
        vocabulary = self._count("vocab_size")
        return {
            "num_layers": encoder + decoder,
            "num_encoder_layers": encoder,
            "model_dim": width,
            "hidden_dim": self._of_both_sides("ffn_dim"),
            "num_heads": heads,
            "head_dim": width // heads,
            "source_vocabulary": vocabulary,
            "target_vocabulary": vocabulary,
            **self._experts(),
        }

    def _experts(self) -> dict[str, Any]:
        if self._config["model_type"] == _DENSE:
            return {"num_experts": 0, "layer_pattern": (), "encoder_layer_pattern": ()}
        steps = [self._sparse_step(side) for side in _SIDES]
        encoder, decoder = (("dense",) * (step - 1) + ("moe",) for step in steps)
        return {
            "num_experts": self._count("num_experts"),
            "layer_pattern": decoder,
            "encoder_layer_pattern": encoder if encoder != decoder else (),
        }

    def _sparse_step(self, side: str) -> int:
        step, layers = self._count(f"{side}_sparse_step"), self._count(f"{side}_layers")
        if layers % step:
            raise self._wrong(f"{side}_sparse_step", f"a divisor of the {layers} layers")
        return step

    def _of_both_sides(self, field: str) -> int:
        encoder, decoder = (self._count(f"{side}_{field}") for side in _SIDES)
        if encoder != decoder:
            raise self._wrong(f"decoder_{field}", f"{encoder}, as encoder_{field}: our stacks have the same")
        return encoder

    def _count(self, field: str) -> int:
        value = self._config.get(field)
        if type(value) is not int or value < 1:
            raise self._wrong(field, "a whole number from 1")
        return value

    def _wrong(self, field: str, expected: str) -> UserError:
        return UserError(f"{self._name}: {CONFIG} has {field} {self._config.get(field)!r}; expected {expected}.")


def _closest(fields: Mapping[str, Any]) -> tuple[str, Translation, tuple[str, ...]]:
    """Returns the registered model that differs in the fewest fields, its model with these fields, and these.

    One with experts if the fields have some, and one without otherwise.
    """
    found = []
    for registered in registry.names():
        if registered.partition(".")[0] in FAMILIES:
            model = experiments.unchecked(registered).model
            changed = {field: value for field, value in fields.items() if getattr(model, field) != value}
            is_other_kind = bool(model.num_experts) != bool(fields["num_experts"])
            found.append((is_other_kind, len(changed), registered, changed))
    *_, name, changed = min(found, key=lambda each: each[:3])
    settings = tuple(f"model.{field}={overrides.text(value)}" for field, value in changed.items())
    model = experiments.unchecked(name, settings).model
    assert isinstance(model, Translation)  # as all of FAMILIES
    return name, model, settings
