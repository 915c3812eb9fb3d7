"""The command `train`, from flags to results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from absl import flags

from lingvo_moe.cli import run_flags
from lingvo_moe.distributed.process_group import ProcessGroup


def train(values: flags.FlagValues):
    """`train`: see `training.loop`."""
    logdir, changes = run_flags.logdir(values), {"training.steps": values.steps}
    run_flags.configure(values, changes)  # a mistake is told before others are waited for
    with _process_group(values) as processes:
        name, config, engine = run_flags.set_up(values, changes, processes.count)
        # Not before: checkpoints import JAX, which sets up libtpu its own way where TensorFlow has not yet.
        from lingvo_moe.training import loop

        metrics = loop.train(name, config, engine, logdir, run_flags.say, processes)
    if metrics and processes.is_primary:
        run_flags.say(
            f"trained for {config.training.steps} steps: cross-entropy {metrics['cross_entropy']:.3f}"
            + (f", held out {metrics['valid/cross_entropy']:.3f}" if "valid/cross_entropy" in metrics else "")
            + f"; curves: tensorboard --logdir={values.logdir}"
        )


@contextlib.contextmanager
def _process_group(values: flags.FlagValues) -> Iterator[ProcessGroup]:
    """All that train the same model; one that fails tells the others."""
    with run_flags.connect(values) as processes:
        if processes.count == 1:
            yield processes
            return
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo tells there of each connection, and train of nothing
        from lingvo_moe.distributed import jax_runtime

        with jax_runtime.joined(processes):
            yield processes
