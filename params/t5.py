"""What the imported models of T5's architecture have in common: MADLAD-400 and Switch Transformers."""

from __future__ import annotations

import dataclasses

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.experiment import Experiment
from params.nllb import Imported


class OfT5(Imported):
    """RMSNorm, relative positions, and no biases; `bos_id` is what the decoder's input begins with."""

    bos_id: int

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        other = super().experiment()
        model = dataclasses.replace(
            other.model,
            biases=False,
            norm="rms",
            norm_epsilon=1e-6,
            position_offset=0,
            relative_buckets=32,
            excluded_ids=(SPECIAL_IDS["bos"],),
            label_smoothing=0.0,
        )
        texts = InputConfig(batch_size=16, source_length=128, target_length=128, bos_id=self.bos_id)
        search = BeamSearch(max_length=128, length_alpha=1.0, bos_id=self.bos_id)
        return dataclasses.replace(other, model=model, input=texts, search=search)
