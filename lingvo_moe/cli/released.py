"""The model that `translate` uses if none is named: that of the directory `released` in this package, if it is there.

The directory has `weights.safetensors`, which `checkpoint convert --output --dtype=int8` wrote, and `tokenizers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

from lingvo_moe import experiment
from lingvo_moe.cli.run_config import TranslateConfig
from lingvo_moe.steps import weight_specs

MODEL = "m4.Pocket"
DIRECTORY = pathlib.Path(__file__).parent.parent / "released"


@contextlib.contextmanager
def by_default(config: TranslateConfig) -> Iterator[TranslateConfig]:
    """Yields `config`; if it names no model and no log directory, with those of the released model, if there is one.

    The log directory is temporary: to make it from the file takes a second or two.

    Raises:
      UserError: the file does not hold the weights of the released model, changed by the assignments of `config`.
    """
    weights = DIRECTORY / "weights.safetensors"
    if config.model or config.logdir or not weights.is_file():
        yield config
        return
    specs = weight_specs(experiment.get(MODEL, config.assignments).model.weights())
    from lingvo_moe.training import checkpoint_tools  # slow; a mistake in --set is reported before it

    with checkpoint_tools.as_logdir(weights, MODEL, specs) as logdir:
        tokenizers = config.tokenizers or str(DIRECTORY / "tokenizers")
        yield dataclasses.replace(config, model=MODEL, logdir=str(logdir), tokenizers=tokenizers)
