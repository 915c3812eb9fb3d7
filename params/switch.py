"""Switch Transformers: public models with experts, T5's architecture (Fedus, Zoph and Shazeer 2021, arXiv 2101.03961).

Their weights are imported, see docs/imported_models.md. They fill in gaps of English texts, and are to be trained
further. Dimensions are those of the published configurations; the learning rate is for fine-tuning.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe import registry
from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.experiment import Experiment
from params.t5 import OfT5


class Switch(OfT5):
    """What all have in common: experts in every other layer, of which each token has one."""

    num_layers, model_dim, hidden_dim, num_heads = 24, 768, 3072, 12
    layer_pattern = ("dense", "moe")
    vocabulary = 32_129
    bos_id = SPECIAL_IDS["pad"]

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        other = super().experiment()
        return dataclasses.replace(other, model=dataclasses.replace(other.model, router="switch", capacity_factor=1.25))


@registry.register
class Base8(Switch):
    """Switch-Base-8: 8 experts, 0.6B weights."""

    num_experts = 8


@registry.register
class Base16(Switch):
    """Switch-Base-16: 16 experts, 1.1B weights."""

    num_experts = 16


@registry.register
class Base32(Switch):
    """Switch-Base-32: 32 experts, 2B weights."""

    num_experts = 32


@registry.register
class Base64(Switch):
    """Switch-Base-64: 64 experts, 3.8B weights."""

    num_experts = 64


@registry.register
class Base128(Switch):
    """Switch-Base-128: 128 experts, 7.4B weights."""

    num_experts = 128


@registry.register
class Base256(Switch):
    """Switch-Base-256: 256 experts, 14.7B weights."""

    num_experts = 256
