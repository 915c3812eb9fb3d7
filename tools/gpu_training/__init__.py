"""Training on a machine that has a GPU but no TensorFlow: programs are made elsewhere and run with JAX there."""

from __future__ import annotations

import json
import pathlib

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.errors import UserError

PROGRAMS = ("train", "evaluate")
FACTS = "facts.json"
WEIGHTS = "initial.safetensors"


def read_facts(directory: pathlib.Path) -> tuple[str, InputConfig, dict]:
    """Returns (model, input, schedule of the learning rate) of programs; raises UserError for another directory."""
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        return facts["model"], InputConfig(**facts["input"]), facts["schedule"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{directory / FACTS}: not what tools.gpu_training.make writes ({error}); make it again."
        ) from None
