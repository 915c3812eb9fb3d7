"""NLLB-200 and NLLB-MoE: public translators of 202 languages, in all directions (NLLB Team 2022, arXiv 2207.04672).

Their weights are imported, see docs/imported_models.md. Dimensions are those of the published configurations; dropout,
label smoothing and the learning rate are for fine-tuning.
"""

from __future__ import annotations

from lingvo_moe import registry
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.experiment import Experiment, Recipe
from lingvo_moe.models.translation import Translation
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.training_schedule import TrainingSchedule

_EOS = 1  # the decoder's input begins with it


class Imported(Recipe):
    """What all imported models have in common; half of the layers are the encoder's."""

    num_layers: int
    model_dim: int
    hidden_dim: int
    num_heads = 16
    num_experts = 0
    layer_pattern: tuple[str, ...] = ()
    num_devices = 1
    decoding_batch = 16
    vocabulary = 256_206

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        return Experiment(
            model=Translation(
                source_vocabulary=self.vocabulary,
                target_vocabulary=self.vocabulary,
                tied_embeddings=True,
                num_layers=self.num_layers,
                num_encoder_layers=self.num_layers // 2,
                model_dim=self.model_dim,
                hidden_dim=self.hidden_dim,
                num_heads=self.num_heads,
                head_dim=self.model_dim // self.num_heads,
                biases=True,
                norm_epsilon=1e-5,
                position_offset=2,
                num_experts=self.num_experts,
                layer_pattern=self.layer_pattern,
                num_groups=self.num_devices,
                # 0.001, times E^2: our auxiliary loss is 1/E^2 in perfect balance.
                aux_loss_weight=0.001 * self.num_experts**2,
                residual_dropout=0.1,
                attention_dropout=0.1,
                label_smoothing=0.1,
                remat="keep_outputs",
            ),
            optimizer=Adafactor(
                learning_rate=InverseSquareRoot(peak_value=0.001, decay_after=10_000, warmup_steps=100)
            ),
            input=InputConfig(batch_size=16, source_length=128, target_length=128, bos_id=_EOS),
            training=TrainingSchedule(steps=10_000),
            search=BeamSearch(max_length=128, length_alpha=1.0, bos_id=_EOS, force_first=True),
            mesh=DeviceMesh((self.num_devices,)),
            decoding_batch=self.decoding_batch,
        )


@registry.register
class Dense600M(Imported):
    """NLLB-200-Distilled-600M: 0.6B weights."""

    num_layers, model_dim, hidden_dim = 24, 1024, 4096


@registry.register
class Dense1300M(Imported):
    """NLLB-200-1.3B and NLLB-200-Distilled-1.3B: 1.4B weights."""

    num_layers, model_dim, hidden_dim = 48, 1024, 8192


@registry.register
class Dense3300M(Imported):
    """NLLB-200-3.3B: 3.3B weights."""

    num_layers, model_dim, hidden_dim = 48, 2048, 8192


@registry.register
class MoE54B(Imported):
    """NLLB-MoE-54B: 128 experts in every fourth layer, top-2."""

    num_layers, model_dim, hidden_dim = 48, 2048, 8192
    num_experts, layer_pattern = 128, ("dense", "dense", "dense", "moe")
    num_devices, decoding_batch = 8, 256
