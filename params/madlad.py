"""MADLAD-400: public translators of more than 400 languages (Kudugunta et al. 2023, arXiv 2309.04662).

Their weights are imported, see docs/imported_models.md. Dimensions are those of the published configurations, of T5's
architecture; dropout and the learning rate are for fine-tuning.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe import registry
from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.experiment import Experiment
from params.t5 import OfT5


class Madlad(OfT5):
    """What all have in common: gated layers, and a softmax with weights of its own."""

    head_dim = 128
    layer_pattern = ("dense:activation=gelu:gated=true",)
    vocabulary = 256_001
    bos_id = SPECIAL_IDS["unk"]

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        other = super().experiment()
        model = dataclasses.replace(other.model, head_dim=self.head_dim, tied_softmax=False)
        return dataclasses.replace(other, model=model)


@registry.register
class Dense3B(Madlad):
    """MADLAD-400-3B-MT: 2.9B weights."""

    num_layers, model_dim, hidden_dim, num_heads = 64, 1024, 8192, 16


@registry.register
class Dense7B(Madlad):
    """MADLAD-400-7B-MT and MADLAD-400-7B-MT-BT: 8.3B weights."""

    num_layers, model_dim, hidden_dim, num_heads = 96, 2048, 8192, 16


@registry.register
class Dense10B(Madlad):
    """MADLAD-400-10B-MT: 10.7B weights."""

    num_layers, model_dim, hidden_dim, num_heads = 64, 2048, 16_384, 32
