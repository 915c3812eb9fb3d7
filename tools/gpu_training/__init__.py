"""Training on a machine that has a GPU but no TensorFlow: programs are made elsewhere and run with JAX there."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
from typing import NamedTuple

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.errors import UserError
from lingvo_moe.ranges import COUNT, COUNT_OR_0

PROGRAMS = ("train", "evaluate")
FACTS = "facts.json"
WEIGHTS = "initial.safetensors"


class Facts(NamedTuple):
    """What a feed and a run know about programs.

    Attributes:
      model: the registered name.
      config: of the batches.
      schedule: the numbers of steps of the learning rate's parts, by field.
      vocabularies: the sizes of the model's, by side; for `Tokenizers.load_for`.
    """

    model: str
    config: InputConfig
    schedule: dict[str, int]
    vocabularies: dict[str, int]


def count(text: str) -> int:
    """Returns the value of a flag, 1 to 2^31 - 1; argparse prints the error behind the flag's name."""
    with contextlib.suppress(ValueError):
        if (value := int(text)) in COUNT:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: expected {COUNT}")


def seed(text: str) -> int:
    """As `count`, from 0."""
    with contextlib.suppress(ValueError):
        if (value := int(text)) in COUNT_OR_0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: expected {COUNT_OR_0}")


def read_facts(directory: pathlib.Path) -> Facts:
    """Reads the facts of programs; raises UserError for another directory."""
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        schedule = {name: int(facts["schedule"][name]) for name in ("warmup_steps", "cooldown_after", "cooldown_steps")}
        return Facts(facts["model"], InputConfig(**facts["input"]), schedule, facts["vocabularies"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{directory / FACTS}: not what tools.gpu_training.make writes ({error}); make it again."
        ) from None
