"""Dense language models: GSPMD tables 2 and 3 on 2-D meshes, table 4 in pipelines, and GShard (ICLR 2021) table 3.

Weights are counted in binary billions: 64B are 32 layers of 2 x 2^30. `--set layout=NAME` selects a layout of GSPMD
table 1: `gspmd_attempt_1`, `gspmd_attempt_2`, or `gspmd`, the finalized one, which `auto` stands for.
"""

from __future__ import annotations

from lingvo_moe import registry
from params.language_models import LargeRecipe, SmallRecipe


class Wide(LargeRecipe):
    """GSPMD table 2: 2B weights per layer."""

    model_dim, hidden_dim, num_heads, head_dim = 8192, 65_536, 128, 256
    mesh = (32, 64)


@registry.register
class Dense64BMesh8x16(Wide):
    """Table 2, first column: 5.74 s a step, 62.7 % of peak, 15.3 GB."""

    num_layers, mesh, batch_size = 32, (8, 16), 64


@registry.register
class Dense64BMesh16x32(Wide):
    """Table 2, second column: 6.25 s a step, 57.1 % of peak, 13.3 GB."""

    num_layers, mesh, batch_size = 32, (16, 32), 256


@registry.register
class Dense64BMesh32x64(Wide):
    """Table 2, third column: 6.30 s a step, 56.9 % of peak, 15.56 GB."""

    num_layers, batch_size = 32, 1024


@registry.register
class Dense64B(Wide):
    """GShard (ICLR) table 3: half the batch; 150.7 thousand tokens/s, 48.4 % of the matrix unit's peak."""

    num_layers, batch_size = 32, 512


@registry.register
class Dense128B(Wide):
    """Table 2: 6.31 s a step, 56.5 % of peak, 14.0 GB. GShard (ICLR) table 3: 73.5 thousand tokens/s, 48.5 %."""

    num_layers, batch_size = 64, 512


@registry.register
class Dense256B(Wide):
    """Table 2: 6.71 s a step, 54.1 % of peak, 12.9 GB."""

    num_layers, batch_size = 128, 256


@registry.register
class Dense512B(Wide):
    """Table 2: 7.64 s a step, 47.5 % of peak, 13.6 GB."""

    num_layers, batch_size = 256, 128


@registry.register
class Dense1T(Wide):
    """Table 2, last column: 12.66 s a step, 55.6 % of peak, 15.8 GB. GShard (ICLR) table 3: 9.23 thousand tokens/s.

    Its layers are four times as large as those of the other columns.
    """

    num_layers, model_dim, hidden_dim, num_heads, batch_size = 128, 16_384, 131_072, 256, 128


@registry.register
class Dense4T(Wide):
    """GShard (ICLR) table 3: 1.36 thousand tokens/s, 28.8 % of the matrix unit's peak.

    8 GiB of weights per core and float32 gradients of the same size do not fit in 16 GB (docs/planning.md).
    """

    remat = "full"
    num_layers, model_dim, hidden_dim, num_heads, batch_size = 128, 32_768, 262_144, 512, 32


class Narrow(LargeRecipe):
    """GSPMD table 3: 16B weights, 64 layers, small matrices."""

    num_layers, model_dim, hidden_dim, num_heads, head_dim = 64, 4096, 16_384, 64, 128


@registry.register
class Narrow16BMesh4x16(Narrow):
    """Table 3, first column: 12.4 GB."""

    mesh, batch_size = (4, 16), 48


@registry.register
class Narrow16BMesh8x16(Narrow):
    """Table 3, second column: 14.6 GB."""

    mesh, batch_size = (8, 16), 96


@registry.register
class Narrow16BMesh8x32(Narrow):
    """Table 3, third column: 14.8 GB."""

    mesh, batch_size = (8, 32), 192


@registry.register
class Narrow16BMesh16x4(Narrow):
    """Table 3, fourth column: 13.8 GB."""

    mesh, batch_size = (16, 4), 48


@registry.register
class Narrow16BMesh16x8(Narrow):
    """Table 3, fifth column: 12.7 GB."""

    mesh, batch_size = (16, 8), 96


@registry.register
class Narrow16BMesh32x8(Narrow):
    """Table 3, last column: 14.1 GB."""

    mesh, batch_size = (32, 8), 192


class Pipelined(Narrow):
    """GSPMD table 4: the model of table 3 by GPipe on a mesh of stages, data and in-layer shards.

    The batch is of 1024 sequences in all columns; every repeat of a microbatch is recomputed from its input.
    """

    batch_size = 1024
    pipeline, remat = "gpipe", "full"


@registry.register
class Pipelined16BMesh2x16x8(Pipelined):
    """Table 4: 2 stages, 16 microbatches of 64 sequences."""

    mesh, microbatches = (2, 16, 8), 16


@registry.register
class Pipelined16BMesh4x16x4(Pipelined):
    """Table 4: 4 stages, 16 microbatches of 64 sequences."""

    mesh, microbatches = (4, 16, 4), 16


@registry.register
class Pipelined16BMesh4x16x4Small(Pipelined):
    """Table 4: 4 stages, 32 microbatches of 32 sequences."""

    mesh, microbatches = (4, 16, 4), 32


@registry.register
class Pipelined16BMesh8x16x2(Pipelined):
    """Table 4: 8 stages, 32 microbatches of 32 sequences."""

    mesh, microbatches = (8, 16, 2), 32


@registry.register
class Pipelined16BMesh8x8x4(Pipelined):
    """Table 4: 8 stages, 32 microbatches of 32 sequences, half as many devices for data."""

    mesh, microbatches = (8, 8, 4), 32


@registry.register
class Small(SmallRecipe):
    """A dense model for eight devices, with the same layout."""
