"""The published tables about the models of the zoo, as the papers print them.

Every value is a text with the paper's own digits. A cell that the paper leaves empty, or that its text does not
determine, is None.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Row:
    """A model in a published table.

    Attributes:
      model: its name in the paper.
      plan: the name of the registered model and of its plan.
      mesh: shape of the device mesh.
      batch: tokens (GShard table 3) or sequences per step.
      steps_per_second, core_years, days: of training on a trillion tokens.
      memory: peak, GB per core.
      seconds: time of one step.
      utilisation: percentage of the cores' peak.
      all_to_all: percentage of the step.
      kilotokens: thousands of tokens per second.
      bubbles, recomputed: percentages of a pipeline's computation.
    """

    model: str
    plan: str
    mesh: str
    batch: str
    steps_per_second: str | None = None
    core_years: str | None = None
    days: str | None = None
    memory: str | None = None
    seconds: str | None = None
    utilisation: str | None = None
    all_to_all: str | None = None
    kilotokens: str | None = None
    bubbles: str | None = None
    recomputed: str | None = None

    @property
    def cores(self) -> int:
        """The number of cores of the mesh."""
        return math.prod(map(int, self.mesh.strip("()").split(",")))

    @property
    def step(self) -> float | None:
        """Seconds of one step, as printed or from the printed steps per second."""
        if self.seconds is not None:
            return float(self.seconds)
        return None if self.steps_per_second is None else 1 / float(self.steps_per_second)


@dataclasses.dataclass(frozen=True)
class Table:
    """A published table: its paper and number, its subject, its rows, and which of its figures are omitted here."""

    source: str
    title: str
    rows: tuple[Row, ...]
    left_out: str = ""

    @property
    def families(self) -> str:
        """The modules of its models, separated by commas."""
        return ",".join(sorted({row.plan.partition(".")[0] for row in self.rows}))


GSHARD = (
    "Lepikhin et al. 2020, “GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding”, "
    "arXiv 2006.16668"
)
GSHARD_ICLR = "the same, ICLR 2021"
GSPMD = "Xu et al. 2021, “GSPMD: General and Scalable Parallelization for ML Computation Graphs”, arXiv 2105.04663"
PAPERS = (("GShard", GSHARD), ("GShard, ICLR", GSHARD_ICLR), ("GSPMD", GSPMD))


def _m4(model: str, plan: str, cores: int, batch: str, *figures: str | None) -> Row:
    return Row(model, f"m4.{plan}", f"({cores})", batch, *figures)


GSHARD_3 = Table(
    "GShard table 3",
    "Multilingual translation, M4",
    (
        _m4("MoE(2048E, 36L)", "MoE2048E36L", 2048, "4M", "0.72", "22.4", "4.0"),
        _m4("MoE(2048E, 12L)", "MoE2048E12L", 2048, "4M", "2.15", "7.5", "1.4"),
        _m4("MoE(512E, 36L)", "MoE512E36L", 512, "1M", "1.05", "15.5", "11.0"),
        _m4("MoE(512E, 12L)", "MoE512E12L", 512, "1M", "3.28", "4.9", "3.5"),
        _m4("MoE(128E, 36L)", "MoE128E36L", 128, "1M", "0.67", "6.1", "17.3"),
        _m4("MoE(128E, 12L)", "MoE128E12L", 128, "1M", "2.16", "1.9", "5.4"),
        _m4("T(96L)", "Dense96L", 2048, "4M", None, "∼235.5", "∼42"),
    ),
)
# Table 1's largest row; its speed is not published.
TRILLION = _m4("MoE(2048E, 60L)", "MoE2048E60L", 2048, "4M")


def _benchmark(model: str, plan: str, mesh: str, batch: str, memory: str, *figures: str | None) -> Row:
    seconds, utilisation, all_to_all = (*figures, None, None, None)[:3]
    return Row(model, plan, mesh, batch, memory=memory, seconds=seconds, utilisation=utilisation, all_to_all=all_to_all)


GSPMD_2 = Table(
    "GSPMD table 2",
    "Dense language models with wide layers, two-dimensional meshes",
    (
        _benchmark("64B", "dense_lm.Dense64BMesh8x16", "(8,16)", "64", "15.3", "5.74", "62.7"),
        _benchmark("64B", "dense_lm.Dense64BMesh16x32", "(16,32)", "256", "13.3", "6.25", "57.1"),
        _benchmark("64B", "dense_lm.Dense64BMesh32x64", "(32,64)", "1024", "15.56", "6.30", "56.9"),
        _benchmark("128B", "dense_lm.Dense128B", "(32,64)", "512", "14.0", "6.31", "56.5"),
        _benchmark("256B", "dense_lm.Dense256B", "(32,64)", "256", "12.9", "6.71", "54.1"),
        _benchmark("512B", "dense_lm.Dense512B", "(32,64)", "128", "13.6", "7.64", "47.5"),
        _benchmark("1T", "dense_lm.Dense1T", "(32,64)", "128", "15.8", "12.66", "55.6"),
    ),
)
# The models that table 1 compares three layouts on.
OF_THREE_LAYOUTS = GSPMD_2.rows[:3]

GSPMD_3 = Table(
    "GSPMD table 3",
    "Narrow dense language models of 16B weights",
    (
        _benchmark("16B", "dense_lm.Narrow16BMesh4x16", "(4,16)", "48", "12.4"),
        _benchmark("16B", "dense_lm.Narrow16BMesh8x16", "(8,16)", "96", "14.6"),
        _benchmark("16B", "dense_lm.Narrow16BMesh8x32", "(8,32)", "192", "14.8"),
        _benchmark("16B", "dense_lm.Narrow16BMesh16x4", "(16,4)", "48", "13.8"),
        _benchmark("16B", "dense_lm.Narrow16BMesh16x8", "(16,8)", "96", "12.7"),
        _benchmark("16B", "dense_lm.Narrow16BMesh32x8", "(32,8)", "192", "14.1"),
    ),
    "Step times (3.10 to 5.71 s) and utilisations (27.1 to 45.7 %) are omitted: the text at hand does not show which "
    "column each belongs to.",
)

GSPMD_4 = Table(
    "GSPMD table 4",
    "The model of table 3 in pipelines: mesh of stages, data and in-layer shards; microbatches × their sequences",
    tuple(
        Row("16B", f"dense_lm.Pipelined16BMesh{plan}", mesh, batch, **figures)
        for plan, mesh, batch, figures in (
            ("2x16x8", "(2,16,8)", "16 × 64", {"bubbles": "5.6"}),
            (
                "4x16x4",
                "(4,16,4)",
                "16 × 64",
                {
                    "memory": "13.3",
                    "seconds": "22.3",
                    "utilisation": "58.0",
                    "bubbles": "14.8",
                    "recomputed": "21.3",
                },
            ),
            ("4x16x4Small", "(4,16,4)", "32 × 32", {"bubbles": "8.0"}),
            ("8x16x2", "(8,16,2)", "32 × 32", {}),
            ("8x8x4", "(8,8,4)", "32 × 32", {}),
        )
    ),
    "The other figures are omitted: the text at hand does not show which column each belongs to (8 stages have bubbles "
    "of 16.1 and 16.5 %; memory is 11.5 to 15.0 GB, a step 22.2 to 24.0 s). The paper's utilisation counts bubbles and "
    "recomputation, the one here does not.",
)

GSPMD_5 = Table(
    "GSPMD table 5",
    "Conformers in pipelines, a stage on each core: microbatches × their recordings",
    tuple(
        Row(
            model,
            f"conformer.Conformer{plan}",
            mesh,
            batch,
            memory=memory,
            seconds=seconds,
            utilisation=utilisation,
            bubbles=bubbles,
        )
        for model, plan, mesh, batch, memory, seconds, utilisation, bubbles in (
            ("6.47B", "6B", "(8)", "64 × 1", "13.8", "8.40", "59.4", "10.0"),
            ("6.47B", "6BSmall", "(8)", "16 × 1", "12.2", "2.80", "57.9", "29.9"),
            ("6.47B, circular", "6BCircular", "(8)", "16 × 1", "14.1", "2.30", "53.9", "9.0"),
            ("12.95B", "13B", "(16)", "128 × 1", "15.4", "18.37", "60.5", "10.4"),
            ("12.95B", "13BSmall", "(16)", "32 × 1", "12.8", "5.58", "59.0", "31.0"),
            ("12.95B, circular", "13BCircular", "(16)", "32 × 1", "14.8", "4.42", "50.6", "9.6"),
        )
    ),
    "The paper prints neither devices nor lengths; cores and recordings of 640 positions follow from its memory, times "
    "and utilisations. Its recomputation (21.3 to 22.9 %, once 29.9 %) is omitted: the text at hand does not show "
    "which column each belongs to. The paper's utilisation counts bubbles and recomputation, the one here does not.",
)

GSPMD_6 = Table(
    "GSPMD table 6",
    "Sparse language models, one expert per core",
    (
        _benchmark("10B, 32E", "sparse_lm.MoE10B32E", "(32)", "128", "10.8", "0.98", "58.2", "2"),
        _benchmark("37B, 128E", "sparse_lm.MoE37B128E", "(128)", "512", "11.2", "1.01", "49.8", "6"),
        _benchmark("145B, 512E", "sparse_lm.MoE145B512E", "(512)", "2048", "11.2", "1.10", "49.8", "9"),
        _benchmark("577B, 2048E", "sparse_lm.MoE577B2048E", "(2048)", "8192", "11.6", "1.51", "46.80", "11"),
    ),
)

GSPMD_7 = Table(
    "GSPMD table 7",
    "Hybrid language models: experts along x, their hidden dimension along y",
    (
        _benchmark("33B, 8E", "hybrid_lm.MoE33B8E", "(8,4)", "32", "12.3", "2.12", "55.3"),
        _benchmark("57B, 16E", "hybrid_lm.MoE57B16E", "(16,8)", "128", "12.9", "2.19", "50.2"),
        _benchmark("420B, 32E", "hybrid_lm.MoE420B32E", "(32,16)", "128", "11.9", "2.08", "50.8"),
        _benchmark("804B, 64E", "hybrid_lm.MoE804B64E", "(64,32)", "512", "8.5", "1.92", "53.8"),
    ),
)

GSPMD_8 = Table(
    "GSPMD table 8",
    "3D U-Nets: volumes along x, a spatial dimension of each along y",
    tuple(
        _benchmark(f"{side}³", f"unet.Volume{side}Mesh{mesh.replace(',', 'x')}", f"({mesh})", batch, *figures)
        for side, mesh, batch, *figures in (
            ("128", "1,1", "4", "14.3", "2.99", "47.9"),
            ("128", "1,2", "4", "14.8", "1.56", "43.7"),
            ("128", "1,4", "4", "7.9", "0.79", "43.5"),
            ("128", "1,8", "4", "4.5", "0.39", "43.5"),
            ("128", "1,16", "4", "2.7", "0.19", "43.8"),
            ("256", "4,16", "8", "14.9", "1.66", "20.5"),
            ("256", "2,32", "8", "8.52", "0.76", "41.2"),
        )
    ),
    "A v3 slice has eight cores or more: the plans of the first three rows have 8, 4 and 2 times the batch, on "
    "as many times the cores along x, so the work of a core is the same. The paper names no channels; those here are "
    "the original U-Net's. All are compiled without libtpu's space-to-batch pass. Where the text at hand prints "
    "figures out of order, they are placed as docs/images.md says.",
)

GSHARD_ICLR_3 = Table(
    "GShard (ICLR) table 3",
    "Dense language models on 2048 cores",
    tuple(
        Row(model, plan, "(32,64)", batch, utilisation=utilisation, kilotokens=kilotokens)
        for model, plan, batch, utilisation, kilotokens in (
            ("64B", "dense_lm.Dense64B", "512", "48.4", "150.7"),
            ("128B", "dense_lm.Dense128B", "512", "48.5", "73.5"),
            ("1T", "dense_lm.Dense1T", "128", "47.2", "9.23"),
            ("4T", "dense_lm.Dense4T", "32", "28.8", "1.36"),
        )
    ),
    "The paper does not print the mesh; the one here is GSPMD's of the same size.",
)

BENCHMARKS = (GSPMD_2, GSPMD_3, GSPMD_4, GSPMD_5, GSPMD_6, GSPMD_7, GSPMD_8, GSHARD_ICLR_3)


def rows() -> tuple[Row, ...]:
    """Returns the rows of all tables."""
    return tuple(row for table in (GSHARD_3, *BENCHMARKS) for row in table.rows)


def highest_utilisation() -> tuple[str, str]:
    """Returns the highest utilisation that GSPMD prints, in per cent, and its table."""
    printed = ((row.utilisation, table.source) for table in BENCHMARKS for row in table.rows)
    found = [(value, source) for value, source in printed if value and source.startswith("GSPMD")]
    return max(found, key=lambda entry: float(entry[0]))
