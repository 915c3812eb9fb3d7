"""The weights that inference runs with: those of a checkpoint, restored onto the devices of a program."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.steps import weight_specs
from lingvo_moe.training import checkpoint_arrays, compiling
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.tokenizer_match import same_tokenizers


@contextlib.contextmanager
def trained_weights(
    name: str, experiment: Experiment, logdir: str | pathlib.Path, step: int | None = None, compiled: str | None = None
) -> Iterator[Callable[[dict], tuple[int, dict]]]:
    """Opens the newest checkpoint of a log directory, or that of `step`, before a program for it is compiled.

    That it is compiled is logged, unless it comes from the program cache.

    Args:
      name: the registered name of the model.
      experiment: its experiment.
      logdir: the log directory that it was trained in.
      step: of a checkpoint that is known to be the model's.
      compiled: what is compiled, for the log; None for the model's `name`.

    Yields:
      A function from the shardings of the weights to (step, weights).

    Raises:
      UserError: no checkpoint, or one of another model or with other tokenizers; of a given `step`, which is known to
        have these, only when it is restored. When they are restored, weights that are not finite.
    """
    specs = weight_specs(experiment.model.weights())
    with contextlib.closing(Checkpoints(logdir)) as checkpoints, contextlib.ExitStack() as until_compiled:
        if step is None:
            tokenizer_hashes = checkpoints.tokenizer_hashes(checkpoints.newest_compatible_step(name, specs))
            if not same_tokenizers(experiment, tokenizer_hashes):
                raise UserError(
                    f"--tokenizers={experiment.tokenizers}: not the tokenizers that {logdir} was trained with; pass "
                    f"those."
                )
        until_compiled.enter_context(
            compiling.announced(compiled or name, experiment, experiment.platform, compiling.UNLESS_CACHED)
        )

        def restore(shardings: dict) -> tuple[int, dict]:
            until_compiled.close()
            found, theta = checkpoints.restore_theta(name, specs, shardings, step)
            remedy = "delete it to use the checkpoint before it, or name another --logdir"
            checkpoint_arrays.check_finite(theta, str(checkpoints.path(found)), remedy)
            return found, theta

        yield restore
