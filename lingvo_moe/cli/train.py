"""The command `train`, from flags to results."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator

from lingvo_moe import lazy
from lingvo_moe.cli import logging_setup, run_setup
from lingvo_moe.cli.run_config import TrainConfig
from lingvo_moe.distributed import watchdog
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.steps import weight_specs

_log = logging.getLogger(__name__)


def train(config: TrainConfig):
    """`train`: see `training.loop`."""
    logdir, changes = config.log_directory(), {"training.steps": config.steps}
    run_setup.configure(config, changes)  # reports a mistake before waiting for other processes
    with _process_group(config) as processes:
        name, experiment, engine = run_setup.set_up(config, "train", changes, processes.count)
        if not processes.is_primary:
            logging_setup.warnings_only()
        # Not earlier: checkpoints import JAX, which would set libtpu up its own way before TensorFlow does.
        from lingvo_moe.training import loop

        with _initial_weights(config, name, experiment, processes.count) as weights:
            metrics = loop.train(name, experiment, engine, logdir, processes, initial_weights=weights)
    if metrics:
        _log.info(
            f"trained for {experiment.training.steps} steps: cross-entropy {metrics['cross_entropy']:.3f}"
            + (f", held out {metrics['valid/cross_entropy']:.3f}" if "valid/cross_entropy" in metrics else "")
            + f"; curves: tensorboard --logdir={config.logdir}"
        )


@contextlib.contextmanager
def _initial_weights(
    config: TrainConfig, name: str, experiment: Experiment, processes: int
) -> Iterator[pathlib.Path | None]:
    """Yields the log directory with the weights of --initial_weights, a temporary one if that is a file.

    None without the flag, and where training resumes: the weights may be gone by then.
    """
    if config.initial_weights is None:
        yield None
        return
    from lingvo_moe.training import checkpoint_tools  # imports JAX, see `train`
    from lingvo_moe.training.checkpoint import Checkpoints

    if Checkpoints(config.log_directory()).steps():
        _log.info(f"--initial_weights has no effect: --logdir={config.logdir} has checkpoints")
        yield None
        return
    given = pathlib.Path(config.initial_weights)
    if given.suffix != checkpoint_tools.SUFFIX:
        if not (given / "checkpoints").is_dir():
            raise UserError(
                f"--initial_weights={given}: there are no checkpoints; expected a log directory, or a file whose name "
                f"ends with {checkpoint_tools.SUFFIX}."
            )
        yield given
        return
    if processes > 1:
        raise UserError(
            f"--initial_weights={given}: {processes} processes read weights from a log directory that all machines "
            f"share, not from a file. Make one with `checkpoint convert --input={given} --model={name} --logdir=DIR` "
            f"and pass --initial_weights=DIR."
        )
    specs = weight_specs(experiment.model.weights())
    with checkpoint_tools.as_logdir(given, name, specs, "--initial_weights") as logdir:
        yield logdir


@contextlib.contextmanager
def _process_group(config: TrainConfig) -> Iterator[ProcessGroup]:
    """Joins the processes that train the same model, if there are several."""
    member = run_setup.membership(config)
    if member is None:
        yield ProcessGroup()
        return
    watchdog.supervise(member)
    # Not later: the runtime writes why it ends this process to file descriptor 2, which the import redirects.
    lazy.import_tensorflow()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo reports each connection there, and train prints nothing
    from lingvo_moe.distributed import jax_runtime

    with jax_runtime.join(member, config.platform) as processes:
        yield processes
