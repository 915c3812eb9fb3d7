"""Hybrid language models: experts along x, their hidden dimension along y (GSPMD section 5.5 and table 7, after GLaM).

The table gives experts, H, N and weights; 12 layers of M 8192 with heads of 128 have those weights (33 to 804 x 2^30).
"""

from __future__ import annotations

from lingvo_moe import registry
from params.language_models import LargeRecipe, SmallRecipe


class Hybrid(LargeRecipe):
    """A column of table 7; a dense layer has the size of one expert."""

    num_layers, model_dim, head_dim = 12, 8192, 128


@registry.register
class MoE33B8E(Hybrid):
    """2.12 s a step, 55.3 % of peak, 12.3 GB."""

    num_experts, hidden_dim, num_heads, mesh, batch_size = 8, 32_768, 128, (8, 4), 32


@registry.register
class MoE57B16E(Hybrid):
    """2.19 s a step, 50.2 % of peak, 12.9 GB."""

    num_experts, hidden_dim, num_heads, mesh, batch_size = 16, 32_768, 128, (16, 8), 128


@registry.register
class MoE420B32E(Hybrid):
    """2.08 s a step, 50.8 % of peak, 11.9 GB."""

    num_experts, hidden_dim, num_heads, mesh, batch_size = 32, 131_072, 512, (32, 16), 128


@registry.register
class MoE804B64E(Hybrid):
    """1.92 s a step, 53.8 % of peak, 8.5 GB."""

    num_experts, hidden_dim, num_heads, mesh, batch_size = 64, 131_072, 512, (64, 32), 512


@registry.register
class Small(SmallRecipe):
    """Four experts along x, each sharded in two along y."""

    num_experts = 4
