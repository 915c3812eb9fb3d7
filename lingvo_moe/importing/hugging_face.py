"""Public models in Hugging Face's format as experiments of ours; each family of models says how it is read.

Their Transformers are ours: fairseq's with biases, another epsilon, positions that count from 2, and eos as the
decoder's first token; Marian's post-norm; those of T5's architecture with its norm and positions, and with gates or
experts. `Experiment` has settings for these. The registered models of the families' modules in `params` have the
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
from lingvo_moe.importing import (
    fairseq_models,
    madlad_models,
    marian_models,
    model_directory,
    switch_models,
    weights,
)
from lingvo_moe.importing.family import Family
from lingvo_moe.importing.model_config import Fields
from lingvo_moe.importing.model_directory import CONFIG
from lingvo_moe.models.translation import Translation

_FAMILIES: Mapping[str, Family] = {
    "m2m_100": fairseq_models.Multilingual(),
    "nllb-moe": fairseq_models.WithExperts(),
    "marian": marian_models.Marian(),
    "t5": madlad_models.Madlad(),
    "switch_transformers": switch_models.Switch(),
}
# The families of registered models with imported weights.
REGISTERED = tuple(dict.fromkeys(name for family in _FAMILIES.values() for name in family.registered))


class Described(NamedTuple):
    """What a directory says of its model, without the weights.

    Attributes:
      name: the registered name.
      settings: `field=value` of what differs from it.
      model: with these settings.
      fields: the fields of the model that config.json decides.
      places: where the files have the weights.
      tokenizers: by side.
    """

    name: str
    settings: tuple[str, ...]
    model: Translation
    fields: Mapping[str, Any]
    places: weights.Places
    tokenizers: Mapping[str, Tokenizer]


class Imported(NamedTuple):
    """A model in our form.

    Attributes:
      name: the registered name.
      settings: `field=value` of what differs from it.
      theta: the weights by path, in float32.
      tokenizers: by side.
    """

    name: str
    settings: tuple[str, ...]
    theta: dict[str, np.ndarray]
    tokenizers: Mapping[str, Tokenizer]


def describe(directory: pathlib.Path, name: str) -> Described:
    """Reads what a directory says of its model.

    Args:
      directory: with config.json, the SentencePiece models and the JSON files of the tokenizers.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: a file is missing or corrupt, or the model is of another kind.
    """
    fields = Fields(model_directory.read_json(directory / CONFIG, name), name)
    family = _FAMILIES.get(fields.model_type) if isinstance(fields.model_type, str) else None
    if family is None:
        expected = ", ".join(f"{each} ({known.description})" for each, known in _FAMILIES.items())
        raise UserError(f"{name}: {CONFIG} has model_type {fields.model_type!r}; expected one of {expected}.")
    fields.require(family.required, family.defaults)
    of_model = family.model_fields(fields)
    registered, model, settings = _closest(of_model, family.registered, name)
    texts = family.texts(directory, fields, name)
    places = family.places(model, texts.rows, fields)
    return Described(registered, settings + texts.settings, model, of_model, places, texts.tokenizers)


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
    return Imported(found.name, found.settings, theta, found.tokenizers)


def _closest(
    fields: Mapping[str, Any], families: tuple[str, ...], directory: str
) -> tuple[str, Translation, tuple[str, ...]]:
    """Returns the registered model that differs in the fewest fields, its model with these fields, and these.

    One with experts if the fields have some, and one without otherwise. Raises UserError, which begins with the name of
    the directory, for fields with which there is no model.
    """
    found = []
    for registered in registry.names():
        if registered.partition(".")[0] in families:
            model = experiments.unchecked(registered).model
            changed = {field: value for field, value in fields.items() if getattr(model, field) != value}
            is_other_kind = bool(model.num_experts) != bool(fields["num_experts"])
            found.append((is_other_kind, len(changed), registered, changed))
    *_, name, changed = min(found, key=lambda each: each[:3])
    settings = tuple(f"model.{field}={overrides.text(value)}" for field, value in changed.items())
    try:
        model = experiments.unchecked(name, settings).model
    except UserError as error:
        raise UserError(f"{directory}: {CONFIG} is of no model that can be imported: {error}") from None
    assert isinstance(model, Translation)  # as all of these families
    return name, model, settings
