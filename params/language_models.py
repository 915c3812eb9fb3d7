"""Base classes of the decoder-only language models (GSPMD section 5): vocabulary, sequence, precision, optimizer."""

from __future__ import annotations

from lingvo_moe.data.batching import InputConfig, default_shards
from lingvo_moe.experiment import Experiment, Recipe
from lingvo_moe.models.language_model import LanguageModel
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.training_schedule import TrainingSchedule
from params.m4 import DECODING_POSITIONS, aux_loss_weight

TRILLION_TOKENS = 10**12


class LargeRecipe(Recipe):
    """A row of GSPMD's tables: float32 weights, bfloat16 activations, sequences of 1024 tokens, Adafactor.

    `batch_size` is in sequences. Each sequence is a group of the gating (GSPMD section 5.4: EBCM).
    """

    num_layers: int
    model_dim: int
    hidden_dim: int
    num_heads: int
    head_dim: int
    mesh: tuple[int, ...]
    batch_size: int
    num_experts = 0
    sequence_length = 1024
    # The fastest rematerialisation that fits the 16 GB of a core (`plan --search=remat`).
    remat = "keep_hidden"
    # Stages of a pipeline are the first axis of the mesh.
    pipeline = "none"
    microbatches = 1

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        return Experiment(
            model=LanguageModel(
                target_vocabulary=32_000,
                num_layers=self.num_layers,
                model_dim=self.model_dim,
                hidden_dim=self.hidden_dim,
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                num_experts=self.num_experts,
                num_groups=self.batch_size,
                # Outside training the devices along x are a group each, as in `params.m4`; in a step of decoding an
                # expert has capacity for all hypotheses of two prompts or more.
                inference_capacity_factor=2.0 if self.num_experts else None,
                inference_min_capacity=DECODING_POSITIONS // self.num_experts if self.num_experts else 1,
                inference_num_groups=self.mesh[0] if self.num_experts else 0,
                aux_loss_weight=aux_loss_weight(self.num_experts),
                activation_dtype="bfloat16",
                remat=self.remat,
                pipeline=self.pipeline,
                stages=1 if self.pipeline == "none" else self.mesh[0],
                microbatches=self.microbatches,
            ),
            optimizer=Adafactor(learning_rate=InverseSquareRoot()),
            input=InputConfig(
                batch_size=self.batch_size,
                source_length=0,
                target_length=self.sequence_length,
                temperature=5.0,
                shards=default_shards(DeviceMesh(self.mesh)),
            ),
            training=TrainingSchedule(
                steps=TRILLION_TOKENS // (self.batch_size * self.sequence_length),
                log_every=100,
                evaluate_every=1000,
                checkpoint_every=1000,
            ),
            mesh=DeviceMesh(self.mesh),
            decoding_batch=self.batch_size,
        )


class SmallRecipe(Recipe):
    """The small model of a family: eight devices, which may be virtual CPU devices, and the quickstart's corpus."""

    num_experts = 0
    mesh: tuple[int, ...] = (4, 2)

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        return Experiment(
            model=LanguageModel(
                target_vocabulary=4000,
                num_layers=4,
                model_dim=128,
                hidden_dim=512,
                num_heads=4,
                head_dim=32,
                num_experts=self.num_experts,
                num_groups=16,
                aux_loss_weight=aux_loss_weight(self.num_experts),
                residual_dropout=0.1,
                remat="keep_hidden",
            ),
            optimizer=Adafactor(learning_rate=InverseSquareRoot(peak_value=0.05, decay_after=400, warmup_steps=100)),
            input=InputConfig(batch_size=16, source_length=0, target_length=128, temperature=5.0),
            training=TrainingSchedule(steps=3000, evaluate_every=250, checkpoint_every=250),
            mesh=DeviceMesh(self.mesh),
            corpus="build/quickstart/corpus",
            tokenizers="build/quickstart/tokenizers",
        )
