"""The command plan: compiles a model for devices that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math

from lingvo_moe.analysis import plan as planning
from lingvo_moe.analysis import plan_text, remedies, search
from lingvo_moe.cli import layouts
from lingvo_moe.cli.run_config import PlanConfig
from lingvo_moe.engines import cluster, topology
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import unchecked
from lingvo_moe.models.segmentation import UNet
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import counts, output_files

_logger = logging.getLogger(__name__)


def plan(config: PlanConfig):
    """`plan`: compiles for a TPU slice or GPU cluster without one; prints a step's memory, communication and time."""
    _check_flags(config)
    name = config.full_name()
    own = unchecked(name, config.assignments)
    if not isinstance(own.model, Transformer | UNet):
        raise UserError(
            f"plan counts the work of a Transformer or UNet; {name} is a {type(own.model).__name__}, which `train` and "
            f"`eval` can use."
        )
    if config.program == "decode" and not own.decodes:
        raise UserError(f"--program=decode: {name} neither translates nor generates; plan its training.")
    given = config.device_mesh()
    mesh = given or own.mesh
    target = cluster.target_of(config.topology or topology.v3_slice(mesh.size), config.compiler_options)
    mesh = given or _mesh_of(target, mesh)
    target.check(mesh)
    with contextlib.redirect_stdout(output_files.table_stream(config.json)):
        if search.LAYOUT in config.search:
            chosen = layouts.find(config, dataclasses.replace(own, mesh=mesh), target)
            if chosen is None:
                return
        else:
            chosen = _compile(config, target, mesh)
    if config.json:
        chosen.save(config.json)
    text = plan_text.text(chosen, config.tokens, config.price_per_hour, _sufficient(chosen, target))
    print(text, end="", file=output_files.table_stream(config.json))


def _check_flags(config: PlanConfig):
    """Raises UserError for flags of `plan` that are out of range, or mean nothing beside the others."""
    output_files.check_path("--json", config.json)
    search.check_dimensions(config.search)
    if config.program != "train" and config.search:
        raise UserError(f"--search compares training steps; leave out --program={config.program}.")
    for flag in ("tokens", "price_per_hour", "budget"):
        if not math.isfinite(getattr(config, flag) or 0):
            raise UserError(f"--{flag}={getattr(config, flag)}: expected a finite number.")
    for flag in ("budget", "top"):
        if flag in config.given and search.LAYOUT not in config.search:
            raise UserError(f"--{flag} is for --search=layout; add that, or leave --{flag} out.")
    if search.LAYOUT in config.search and not config.top:
        for flag in ("tokens", "price_per_hour"):
            if flag in config.given:
                raise UserError(
                    f"--{flag}={getattr(config, flag):g} is for the cost of a compiled plan, and --top=0 compiles "
                    f"nothing; leave one of them out."
                )


def _mesh_of(target: topology.Slice | cluster.Cluster, mesh: DeviceMesh) -> DeviceMesh:
    """Returns the model's own mesh if it has as many devices as the target, otherwise all devices in one axis."""
    return mesh if mesh.size == len(target.devices) else DeviceMesh((len(target.devices),))


def _compile(config: PlanConfig, target: topology.Slice | cluster.Cluster, mesh: DeviceMesh) -> planning.Plan:
    """Plans the model as it is, or the fastest of a search for settings."""
    name = config.full_name()
    experiment = layouts.planned(name, config.assignments, mesh)
    if config.program == "decode":
        experiment.decoding_specs()  # raises UserError before the log says that it compiles
    weights, devices = f"{experiment.model.num_weights():,}", counts.counted(len(target.devices), "device")
    _logger.info("compiling %s, %s weights, for %s of %s ...", name, weights, devices, target.name)
    if config.search:
        return _search(config, target, mesh)
    return planning.make(name, experiment, target, config.program, list(config.assignments))


def _search(config: PlanConfig, target: topology.Slice | cluster.Cluster, mesh: DeviceMesh) -> planning.Plan:
    """Prints each trial when it is done; returns the plan of the fastest that fits, or of the unchanged settings."""
    trials, name = [], config.full_name()
    print(plan_text.LEGEND)
    for trial in search.search(
        name,
        target,
        list(config.search),
        config.assignments,
        lambda assignments: layouts.planned(name, [f"mesh={mesh}", *assignments]),
    ):
        trials.append(trial)
        print(plan_text.trial(trial), flush=True)
    best = max(trials, key=lambda trial: trial.tokens_per_second)
    fitting = sum(trial.plan is not None and trial.plan.fits for trial in trials)
    if not fitting:
        print("none of the settings fits; the plan of the unchanged settings:\n")
    else:
        print(
            f"\nfastest of the {fitting} that fit: "
            f"{' '.join(f'--set {c}' for c in best.changes) or 'the unchanged settings'}\n"
        )
    return best.plan


def _sufficient(chosen: planning.Plan, target: topology.Slice | cluster.Cluster) -> remedies.Sufficient | None:
    """Predicts how many devices a training step fits that does not fit the target; None for anything else."""
    if chosen.fits or chosen.program != "train":
        return None
    experiment = layouts.planned(chosen.model, chosen.changes, DeviceMesh.parse(chosen.mesh))
    return remedies.sufficient(experiment, target)
