"""Times of collectives by our model of the links (`lingvo_moe/analysis/hardware.py`), as in GShard figure 9."""

from __future__ import annotations

from lingvo_moe.analysis.hardware import Torus
from lingvo_moe.engines.topology import v3_slice
from tools.report.plans import V3

PARTITIONS = tuple(2**exponent for exponent in range(4, 12))
SIZES = (8, 32)  # MiB
KINDS = {"AllToAll": "all-to-all", "AllReduce": "all-reduce"}


def milliseconds(kind: str, partitions: int, mebibytes: int) -> float:
    """Returns the time of a collective among all cores of the squarest TPU v3 slice of that many."""
    chips = tuple(map(int, v3_slice(partitions).partition(":")[2].split("x")))
    return 1e3 * Torus(V3, chips).seconds(kind, mebibytes * 2**20, range(partitions))


def growth(kind: str) -> float:
    """Returns how many times as long a collective takes among the most partitions as among the fewest."""
    return milliseconds(kind, PARTITIONS[-1], SIZES[0]) / milliseconds(kind, PARTITIONS[0], SIZES[0])
