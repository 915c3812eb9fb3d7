"""M2M-100, NLLB-200, NLLB-MoE and Opus-MT in Hugging Face's format, as experiments of ours.

Their Transformers are ours with biases and another epsilon; those of fairseq with positions that count from 2 and eos
as the decoder's first token, Marian's post-norm. `Experiment` has settings for these. The registered models of
`params.m2m100`, `params.nllb` and `params.opus` have the dimensions of the published ones; other dimensions are
settings of one of these.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.data.tokenizer import SIDES, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing import fairseq_tokenizer, marian_tokenizer, model_directory, weights
from lingvo_moe.importing.model_config import Fields
from lingvo_moe.importing.model_directory import CONFIG
from lingvo_moe.models.translation import Translation


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
    of_model = fields.of_model()
    registered, model, settings = fields.closest(of_model)
    if fields.is_marian:
        texts = marian_tokenizer.read_vocabulary(directory, name)
        special, pieces = marian_tokenizer.special_ids(texts), len(texts)
        starts = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), special["pad"])
        fields.check_ids({"eos_token_id": special["eos"], **starts}, marian_tokenizer.VOCABULARY)
        tokenizers: Mapping[str, Tokenizer] = marian_tokenizer.convert(directory, texts, name)
        rows, fits = marian_tokenizer.rows_of_ids(texts), pieces == fields.vocabulary
        settings += tuple(
            f"input.{side}_language={tokenizers[side].own_language}"
            for side in SIDES
            if side == "source" or not tokenizers["source"].names_target
        )
    else:
        shared = fairseq_tokenizer.convert(directory, name)
        tokenizers = dict.fromkeys(SIDES, shared)
        rows = fairseq_tokenizer.rows_of_ids(fields.vocabulary)
        pieces = shared.vocabulary_size
        fits = pieces <= fields.vocabulary
    if not fits:
        raise UserError(
            f"{name}: the tokenizer has {pieces} pieces, but {CONFIG} has vocab_size {fields.vocabulary}, so they are "
            f"of two models; copy the files again."
        )
    places = weights.Places(model, fields.kind.names, rows, fields.expert_scale)
    return Described(registered, settings, model, of_model, places, tokenizers)


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
