"""The file of scores that eval writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lingvo_moe.cli.run_config import EvalConfig
from lingvo_moe.utils import output_files


def write_scores(config: EvalConfig, name: str, step: int, scores: Sequence[Any] | None = None, **further: Any):
    """Writes scores to the file of `--json`, if one is given, as one JSON object.

    Args:
      config: with the file and the split.
      name: the registered name of the model.
      step: of its checkpoint.
      scores: dataclasses, one for each language, voice or class; None for a language model, which has none of these.
      further: values of the object.
    """
    if not config.json:
        return
    rows = {} if scores is None else {"scores": [dataclasses.asdict(score) for score in scores]}
    written = {"model": name, "step": step, "split": config.split, **rows, **further}
    with output_files.atomic_writer(config.json) as file:
        json.dump(output_files.as_json(written), file, indent=1, ensure_ascii=False)
