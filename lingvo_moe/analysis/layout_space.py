"""The legal layouts of a model on a number of devices."""
from __future__ import annotations
import dataclasses
from lingvo_moe.sharding.layout import DeviceMesh, AxisRule, Layout


@dataclasses.dataclass(frozen=True)
class Candidate:
    layout: Layout
    remat: str
    batch_size: int
    pipeline: str = "none"
    stages: int = 1
    microbatches: int = 1

    @property
    def mesh(self): return self.layout.mesh

    @property
    def accumulates(self): return self.microbatches > 1
