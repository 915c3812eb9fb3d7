"""Training on a machine that has a GPU but no TensorFlow: programs are made elsewhere and run with JAX there."""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.errors import UserError

PROGRAMS = ("train", "evaluate")
FACTS = "facts.json"
WEIGHTS = "initial.safetensors"


class Facts(NamedTuple):
    """What a feed and a run know about programs.

    Attributes:
      model: the registered name.
      config: of the batches.
      schedule: of the learning rate, by field.
      vocabularies: the sizes of the model's, by side.
    """

    model: str
    config: InputConfig
    schedule: dict[str, float]
    vocabularies: dict[str, int]

    def check_tokenizers(self, directory: str):
        """Raises UserError if the tokenizers in `directory` are larger than the model's vocabularies."""
        tokenizers = Tokenizers.load(directory)
        for side, size in self.vocabularies.items():
            if (pieces := getattr(tokenizers, side).vocabulary_size) > size:
                raise UserError(
                    f"--tokenizers={directory}: the {side} tokenizer has {pieces} pieces, {self.model}'s "
                    f"{side}_vocabulary is {size}; name the tokenizers of the initial weights."
                )


def read_facts(directory: pathlib.Path) -> Facts:
    """Reads the facts of programs; raises UserError for another directory."""
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        return Facts(facts["model"], InputConfig(**facts["input"]), facts["schedule"], facts["vocabularies"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{directory / FACTS}: not what tools.gpu_training.make writes ({error}); make it again."
        ) from None
