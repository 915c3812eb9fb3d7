"""Sparse language models on 1-D meshes, one expert of each MoE layer per device: GSPMD table 6.

The table gives experts, batch and weights; 36 layers with M4's dimensions have those weights (577 x 2^30 with 2048
experts).
"""

from __future__ import annotations

from lingvo_moe import registry
from params.language_models import LargeRecipe, SmallRecipe


class Sparse(LargeRecipe):
    """A column of table 6: four sequences per device."""

    num_layers, model_dim, hidden_dim, num_heads, head_dim = 36, 1024, 8192, 16, 128


@registry.register
class MoE10B32E(Sparse):
    """0.98 s a step, 58.2 % of peak, 10.8 GB."""

    num_experts, mesh, batch_size = 32, (32,), 128


@registry.register
class MoE37B128E(Sparse):
    """1.01 s a step, 49.8 % of peak, 11.2 GB."""

    num_experts, mesh, batch_size = 128, (128,), 512


@registry.register
class MoE145B512E(Sparse):
    """1.10 s a step, 49.8 % of peak, 11.2 GB."""

    num_experts, mesh, batch_size = 512, (512,), 2048


@registry.register
class MoE577B2048E(Sparse):
    """1.51 s a step, 46.8 % of peak, 11.6 GB."""

    num_experts, mesh, batch_size = 2048, (2048,), 8192


@registry.register
class Small(SmallRecipe):
    """Eight experts on eight devices."""

    num_experts, mesh = 8, (8,)
