"""Opus-MT: public translators from one language or several into one or several (Tiedemann and Thottingal 2020).

They were trained with Marian. Their weights are imported, see docs/imported_models.md. Dimensions are those of the
published configurations; dropout, label smoothing and the learning rate are for fine-tuning. The vocabulary is that of
each pair of languages, so its size here is only a usual one.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe import registry
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.experiment import Experiment
from params.nllb import Imported


class Opus(Imported):
    """What both have in common: post-norm layers, and positions as in the paper of the Transformer."""

    decoding_batch = 32

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        other = super().experiment()
        model = dataclasses.replace(
            other.model, post_norm=True, wavelengths="paper", logits_bias=True, position_offset=0
        )
        texts = InputConfig(batch_size=32, source_length=128, target_length=128)
        return dataclasses.replace(other, model=model, input=texts, search=BeamSearch(max_length=128, length_alpha=1.0))


@registry.register
class Base(Opus):
    """Models named opus-mt-SOURCE-TARGET: 0.07B weights."""

    num_layers, model_dim, hidden_dim, num_heads = 12, 512, 2048, 8
    layer_pattern = ("dense:activation=swish",)
    vocabulary = 58_102


@registry.register
class Big(Opus):
    """Models named opus-mt-tc-big-SOURCE-TARGET: 0.2B weights."""

    num_layers, model_dim, hidden_dim, num_heads = 12, 1024, 4096, 16
    vocabulary = 60_000
