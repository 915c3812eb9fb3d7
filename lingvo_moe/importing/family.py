"""What the importer needs of a family of models, those of one `model_type` in config.json."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.importing.model_config import Fields
from lingvo_moe.importing.weights import Places
from lingvo_moe.models.translation import Translation


class Texts(NamedTuple):
    """How a model reads and writes texts.

    Attributes:
      tokenizers: by side.
      rows: of their table of embeddings, in the order of our ids.
      settings: `field=value` of the experiment that follow from the tokenizers.
    """

    tokenizers: Mapping[str, Tokenizer]
    rows: np.ndarray
    settings: tuple[str, ...] = ()


class Family(Protocol):
    """Models of one type; each method raises UserError, which begins with the directory's name, for what it refuses.

    Attributes:
      description: the models, for messages.
      registered: families of registered models with such weights.
      required: the values that fields of config.json must have for our layers to compute the model.
      defaults: what Hugging Face's library takes where config.json lacks such a field, if that is another value.
    """

    description: str
    registered: tuple[str, ...]
    required: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def model_fields(self, fields: Fields) -> dict[str, Any]:
        """Returns the fields of our model, by name."""
        ...

    def texts(self, directory: pathlib.Path, fields: Fields, name: str) -> Texts:
        """Reads the tokenizers of a directory, which messages call `name`."""
        ...

    def places(self, model: Translation, rows: np.ndarray, fields: Fields) -> Places:
        """Returns where the files have the weights of our model; `rows` are those of `Texts`."""
        ...
