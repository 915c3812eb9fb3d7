"""For tests of plans: one of plausible size, without compiling anything, and the stride of a collective."""

from __future__ import annotations

import numpy as np

from lingvo_moe.analysis.collectives import Collective
from lingvo_moe.analysis.plan import CollectiveCost, Memory, Plan
from lingvo_moe.engines.topology import v3_slice

GIB = 2**30


def training_plan(model: str, cores: int, mesh: str = "", **changes) -> Plan:
    """Returns a plan of a training step of 0.5 s, a fifth of it AllToAll, on a TPU v3 slice.

    Args:
      model: the registered model's name.
      cores: the number of cores.
      mesh: the mesh's shape; by default one-dimensional.
      **changes: fields with other values.
    """
    values = {
        "model": model,
        "changes": (),
        "program": "train",
        "topology": v3_slice(cores),
        "mesh": mesh or f"{cores}",
        "devices": cores,
        "weights": 10**10,
        "layout": "auto",
        "remat": "keep_hidden",
        "batch_size": 64,
        "num_groups": 64,
        "num_experts": 0,
        "num_layers": 12,
        "activation_dtype": "float32",
        "tokens": 2**20,
        "model_flops": 0.25 * cores * 61.5e12,
        "memory": Memory(2 * GIB, GIB, GIB // 64, GIB // 1024, 5 * GIB),
        "collectives": (
            CollectiveCost("all-to-all", cores, 24, 2**28, 0.1),
            CollectiveCost("all-reduce", cores, 35, 2**30, 0.05),
        ),
        "cycles": 329_000_000,
        "rematerialised_cycles": 32_900_000,
        "cycles_by_part": {"experts": 200_000_000, "gating": 29_000_000, "other": 100_000_000},
        "compute_seconds": 0.35,
        "unknown_loops": 0,
        "lower_seconds": 1.0,
        "compile_seconds": 1.0,
    }
    return Plan(**values | changes)


def stride(collective: Collective) -> int:
    """Returns the smallest difference between the numbers of two devices of a group."""
    return int(np.diff(collective.group).min()) if len(collective.group) > 1 else 1
