"""The command `train`, from flags to results."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping

from lingvo_moe import lazy
from lingvo_moe.cli import initial_weights, logging_setup, run_setup
from lingvo_moe.cli.run_config import TrainConfig
from lingvo_moe.data.batching import BatchConfig
from lingvo_moe.distributed import watchdog
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import LAYOUTS, Layout
from lingvo_moe.utils import allocator
from lingvo_moe.utils.counts import counted

_logger = logging.getLogger(__name__)


def train(config: TrainConfig):
    """`train`: see `training.loop`."""
    logdir, changes = config.log_directory(), {"training.steps": config.steps}
    run_setup.configure(config, changes)  # reports a mistake before waiting for other processes
    with _process_group(config) as processes:
        name, experiment, engine = run_setup.set_up(config, "train", changes, processes.count)
        if not processes.is_primary:
            logging_setup.warnings_only()
        else:
            for warning in filter(None, (_stages_together(experiment), _unused_axes(experiment))):
                _logger.warning(warning)
        # Not earlier: checkpoints import JAX, which would set libtpu up its own way before TensorFlow does.
        from lingvo_moe.training import loop

        values = initial_weights.embeddings(config, name, experiment)
        others, weights = initial_weights.weights(config, name, experiment)
        metrics = loop.train(
            name, experiment, engine, logdir, processes, initial_weights=others, initial_values=values | weights
        )
    if metrics:
        if engine.platform == "cpu" and allocator.is_missing():
            _logger.info("training on CPU cores is faster with jemalloc, on Debian the package %s", allocator.PACKAGE)
        held_out = f", held out {metrics['valid/cross_entropy']:.3f}" if "valid/cross_entropy" in metrics else ""
        _logger.info(
            "trained for %s: cross-entropy %.3f%s; curves: tensorboard --logdir=%s",
            counted(experiment.training.steps, "step"),
            metrics["cross_entropy"],
            held_out,
            config.logdir,
        )
        _report_rejected(experiment.input, metrics)


def _stages_together(experiment: Experiment) -> str:
    """Returns a warning of a pipeline whose stages the layout does not divide among devices; empty if it does."""
    layout, pipeline = Layout.of(experiment.mesh, experiment.layout), experiment.model.pipeline
    if pipeline == "none" or layout.is_one_device or layout.num_shards("P", "P") > 1:
        return ""
    axes = len(experiment.mesh.shape)
    named = ((name, LAYOUTS.get(name)) for name in LAYOUTS.names())
    dividing = [
        name
        for name, each in named
        if each.num_mesh_axes == axes and any("P" in rule.logical_axes for rule in each.rules)
    ]
    remedy = f"pass --set layout={dividing[0]}" if dividing else "pass --mesh with one, two or three axes"
    return (
        f"model.pipeline is {pipeline}, but layout {experiment.layout} does not shard its stages over the mesh "
        f"{experiment.mesh}: each device computes all of them, so the pipeline saves no time. Instead {remedy}, or "
        f"leave the pipeline out."
    )


def _unused_axes(experiment: Experiment) -> str:
    """Returns a warning of mesh axes along which the layout shards nothing; empty if there are none."""
    layout, mesh = Layout.of(experiment.mesh, experiment.layout), experiment.mesh
    unused = layout.unused_axes
    if not unused:
        return ""
    only_x = ":" in experiment.layout and {axis for rule in layout.rules for axis in rule.mesh_axes} == {"x"}
    remedy = f"Pass --mesh={mesh.size}, or" if only_x else "Pass"
    return (
        f"layout {experiment.layout} shards nothing along the ax{'i' if len(unused) == 1 else 'e'}s "
        f"{', '.join(unused)} of the mesh {mesh}: devices there repeat the computation of others. {remedy} "
        f"--set layout=NAME with a layout for all axes."
    )


def _report_rejected(config: BatchConfig, metrics: Mapping[str, float]):
    """Says how much of the training data was left out; it is a warning from a tenth on."""
    rejected, drawn = round(metrics["rejected_pairs"]), round(metrics["drawn_pairs"])
    if not rejected:
        return
    text = f"{rejected:,} of {drawn:,} training examples were left out, as they do not fit {config.shown_lengths}"
    if rejected < 0.1 * drawn:
        _logger.info(text)
    else:
        _logger.warning("%s; increase with %s", text, config.longer_rows)


@contextlib.contextmanager
def _process_group(config: TrainConfig) -> Iterator[ProcessGroup]:
    """Connects the processes that train the same model, if there are several."""
    member = run_setup.membership(config)
    if member is None:
        yield ProcessGroup()
        return
    watchdog.supervise(member)
    logging_setup.show_from(logging.INFO)  # `main` has hidden what the parent has said
    # Not later: the runtime writes why it ends this process to file descriptor 2, which the import redirects.
    lazy.import_tensorflow()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo reports each connection there, and train prints nothing
    from lingvo_moe.distributed import jax_runtime

    with jax_runtime.join(member, config.platform) as processes:
        yield processes
