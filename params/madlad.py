"""MADLAD-400: public translators into 419 languages (Kudugunta et al. 2023, arXiv 2309.04662).

Their weights are imported, see docs/imported_models.md. Dimensions are those of the published configurations, of T5's
architecture; dropout and the learning rate are for fine-tuning.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe import registry
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.experiment import Experiment
from params.nllb import Imported

_UNKNOWN = SPECIAL_IDS["unk"]  # the decoder's input begins with it


class Madlad(Imported):
    """What all have in common: RMSNorm, relative positions, gated layers, a softmax of its own, and no biases."""

    head_dim = 128
    layer_pattern = ("dense:activation=gelu:gated=true",)
    vocabulary = 256_001

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        other = super().experiment()
        model = dataclasses.replace(
            other.model,
            head_dim=self.head_dim,
            biases=False,
            norm="rms",
            norm_epsilon=1e-6,
            position_offset=0,
            relative_buckets=32,
            tied_softmax=False,
            excluded_ids=(SPECIAL_IDS["bos"],),
            label_smoothing=0.0,
        )
        texts = InputConfig(batch_size=16, source_length=128, target_length=128, bos_id=_UNKNOWN)
        search = BeamSearch(max_length=128, length_alpha=1.0, bos_id=_UNKNOWN)
        return dataclasses.replace(other, model=model, input=texts, search=search)


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
