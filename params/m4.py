"""The M4 family: massively multilingual translation into English, 100 languages (GShard section 4 and table 1).

Dimensions, dropout, optimizer and vocabularies are those of GShard appendix A.2, the mesh is one expert per TPU v3
core, and a batch has two groups per core (appendix A.6 of GShard's ICLR version). The small models run on a
workstation.
"""

from __future__ import annotations

from lingvo_moe import registry
from lingvo_moe.data.batching import InputConfig, default_shards
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.experiment import Experiment, Recipe
from lingvo_moe.models.translation import Translation
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.training_schedule import TrainingSchedule

MILLION_TOKENS = 2**20
DECODING_POSITIONS = 2**14  # E * C of a group in a step of decoding: equal AllToAlls for each number of experts


def aux_loss_weight(num_experts: int) -> float:
    """Returns k of loss = cross-entropy + k * l_aux: 0.01 E^2. The papers do not give k.

    In perfect balance Algorithm 1's l_aux is 1/E^2, so k = 0.01 E^2 gives it the same weight in every row of table 1.
    """
    return 0.01 * num_experts**2


class M4(Recipe):
    """The settings that all models of table 1 share; a row adds the numbers of experts, layers and cores.

    Batch tokens are source tokens: section 3 of GShard's ICLR version speaks of "1T tokens (source side tokens after
    sub-word segmentation) in 250k training steps", which are 4M in each. Read so, the published speed of the rows of
    128 cores is above what GSPMD reports for any model; docs/planning.md has the figures.
    """

    num_experts: int
    num_layers: int
    num_cores: int
    batch_tokens: int = MILLION_TOKENS
    sequence_length = 128
    model_dim = 1024
    hidden_dim = 8192
    num_heads = 16
    head_dim = 128
    dropout = 0.1
    source_vocabulary = 64_000
    target_vocabulary = 32_000
    activation_dtype = "float32"
    layout = "auto"
    # The first axis of the mesh, where there are several stages.
    stages = 1
    pipeline = "none"
    microbatches = 1
    # The fastest rematerialisation that fits the 16 GB of a core (`plan --search=remat`).
    remat = "keep_hidden"

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        cores = self.num_cores
        mesh = DeviceMesh((cores,) if self.stages == 1 else (self.stages, cores // self.stages))
        return Experiment(
            model=self._model(),
            optimizer=Adafactor(learning_rate=InverseSquareRoot()),
            input=InputConfig(
                batch_size=self.batch_tokens // self.sequence_length,
                source_length=self.sequence_length,
                target_length=self.sequence_length,
                temperature=5.0,
                shards=default_shards(mesh, self.layout),
            ),
            # GShard section 4.4: every model sees a trillion source tokens.
            training=TrainingSchedule(
                steps=10**12 // self.batch_tokens, log_every=100, evaluate_every=1000, checkpoint_every=1000
            ),
            search=BeamSearch(max_length=self.sequence_length),
            mesh=mesh,
            layout=self.layout,
            decoding_batch=32 * self.num_cores,
        )

    def _model(self) -> Translation:
        return Translation(
            source_vocabulary=self.source_vocabulary,
            target_vocabulary=self.target_vocabulary,
            num_layers=self.num_layers,
            model_dim=self.model_dim,
            hidden_dim=self.hidden_dim,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_experts=self.num_experts,
            num_groups=2 * self.num_cores,
            # Capacity for every token of a group (C = S) would make buffers a thousand times as large; see
            # `MixtureOfExperts`. A core is a group. The encoder has capacity for four times the mean load, a step
            # of decoding for all hypotheses of two sentences (E = 2048), eight (512), all 32 (128).
            inference_capacity_factor=8.0 if self.num_experts else None,
            inference_min_capacity=DECODING_POSITIONS // self.num_experts if self.num_experts else 1,
            inference_num_groups=self.num_cores,
            aux_loss_weight=aux_loss_weight(self.num_experts),
            input_dropout=self.dropout,
            residual_dropout=self.dropout,
            attention_dropout=self.dropout,
            activation_dtype=self.activation_dtype,
            remat=self.remat,
            pipeline=self.pipeline,
            stages=self.stages,
            microbatches=self.microbatches,
        )


@registry.register
class MoE2048E36L(M4):
    """Table 1 (1): 600B weights; 44.3 BLEU, 4 days on 2048 cores (table 3)."""

    num_experts, num_layers, num_cores, batch_tokens = 2048, 36, 2048, 4 * MILLION_TOKENS
    remat = "keep_outputs"


@registry.register
class MoE2048E12L(M4):
    """Table 1 (2): 200B weights; 41.3 BLEU, 1.4 days on 2048 cores."""

    num_experts, num_layers, num_cores, batch_tokens = 2048, 12, 2048, 4 * MILLION_TOKENS


@registry.register
class MoE512E36L(M4):
    """Table 1 (3): 150B weights; 43.7 BLEU, 11 days on 512 cores."""

    num_experts, num_layers, num_cores = 512, 36, 512
    remat = "keep_outputs"


@registry.register
class MoE512E12L(M4):
    """Table 1 (4): 50B weights; 40.0 BLEU, 3.5 days on 512 cores."""

    num_experts, num_layers, num_cores = 512, 12, 512


@registry.register
class MoE128E36L(M4):
    """Table 1 (5): 37B weights; 39.0 BLEU, 17.3 days on 128 cores."""

    num_experts, num_layers, num_cores = 128, 36, 128
    remat = "keep_outputs"


@registry.register
class MoE128E12L(M4):
    """Table 1 (6): 12.5B weights; 36.7 BLEU, 5.4 days on 128 cores."""

    num_experts, num_layers, num_cores = 128, 12, 128


@registry.register
class MoE2048E60L(M4):
    """Table 1, last row: 1T weights, with bfloat16 activations (GShard section 4.3).

    With replicated dense weights, and gradients of the same size, it takes 14.2 of a core's 15.5 GiB (`plan` with
    `--set layout=gshard`); with the dense layers' sharded update 11.0, and a step is 3 % faster.
    """

    num_experts, num_layers, num_cores, batch_tokens = 2048, 60, 2048, 4 * MILLION_TOKENS
    activation_dtype = "bfloat16"
    layout = "gshard_sharded_update"
    remat = "keep_outputs"


@registry.register
class Dense96L(M4):
    """T(96L), 2.3B weights: 36.9 BLEU, about 42 days on 2048 cores (table 3).

    GPipe's head size of 64 (Huang et al. 2019, the paper's [15]) gives the published 2.3B; 128 would give 2.9B.
    Replicated weights, and gradients of the same size, do not fit in 16 GB, so the layout shards their update.
    """

    num_experts, num_layers, num_cores, batch_tokens = 0, 96, 2048, 4 * MILLION_TOKENS
    head_dim = 64
    layout = "gshard_sharded_update"
    remat = "keep_outputs"


@registry.register
class Dense96LGPipe(Dense96L):
    """T(96L) as it was trained, by GPipe: 8 stages of 6 layers of each stack, 256 of each stage for the batch.

    The paper gives neither stages nor microbatches. A microbatch has 512 tokens of each side on a core; bubbles are
    18 % of the iterations. Weights of layers are stored by stage, so that their update needs no sharding.
    """

    layout = "pipeline_gshard"
    pipeline, stages, microbatches = "gpipe", 8, 32
    remat = "full"


class Bilingual(M4):
    """A model for one language into English: the baselines of section 4.2."""

    num_experts, num_layers, num_cores = 0, 12, 8
    batch_tokens = 2**18
    source_vocabulary = target_vocabulary = 32_000
    head_dim = 64


@registry.register
class TransformerBig(Bilingual):
    """The baseline for high-resource languages.

    With feed-forward layers of 8192 it has the 0.4B weights of figure 6; those of Vaswani et al. 2017 have 4096.
    """

    model_dim, hidden_dim, num_heads, dropout = 1024, 8192, 16, 0.3


@registry.register
class TransformerBase(Bilingual):
    """The baseline for low-resource languages."""

    model_dim, hidden_dim, num_heads, dropout = 512, 2048, 8, 0.1


@registry.register
class Quickstart(Recipe):
    """The model of `make quickstart`: 8 experts in each MoE layer, 2 virtual CPU devices, minutes on two cores."""

    steps = 5800

    def experiment(self) -> Experiment:
        """Returns the full configuration; docs/results.md has the trials that led to it."""
        return Experiment(
            model=self._model(),
            # 0.02 for the first half, then on a straight line to a tenth of it, and this for the last steps.
            optimizer=Adafactor(
                beta1=0.9,
                learning_rate=InverseSquareRoot(
                    peak_value=0.02,
                    decay_after=self.steps,
                    warmup_steps=150,
                    cooldown_after=self.steps // 2,
                    cooldown_steps=self.steps * 9 // 20,
                ),
            ),
            # Lengths in the proportion of source and target tokens, so that both rows are filled.
            input=InputConfig(
                batch_size=16, source_length=64, target_length=56, temperature=5.0, name_substitution=0.5
            ),
            training=TrainingSchedule(steps=self.steps, evaluate_every=400, checkpoint_every=200),
            search=BeamSearch(max_length=48, length_alpha=1.0),
            mesh=DeviceMesh((2,)),
            # As `auto`, but the embedding tables are sharded along the vocabulary: each device updates a part of them.
            layout="BGE:x,V~x",
            matmul_precision="bfloat16",
            decoding_batch=64,
            corpus="build/quickstart/corpus",
            tokenizers="build/quickstart/tokenizers",
        )

    def _model(self) -> Translation:
        # No dropout: a trial did not lower the loss (docs/results.md).
        return Translation(
            # So most words of the three languages are one piece, of which counting finds a translation.
            source_vocabulary=24_000,
            target_vocabulary=8000,
            tied_embeddings=True,
            twin_keys=True,
            num_layers=4,
            model_dim=256,
            hidden_dim=512,
            num_heads=4,
            head_dim=64,
            num_experts=8,
            num_groups=8,
            # With both, a step takes three quarters of the CPU time, and the loss is the same.
            capacity_factor=1.25,
            sampled_softmax=3072,
            aux_loss_weight=aux_loss_weight(8),
            unroll=True,
        )


@registry.register
class QuickstartMedium(Quickstart):
    """The same, with as many steps as fit in 20 minutes on two cores of an Intel Xeon whose AMX is hidden."""

    steps = 3600


@registry.register
class QuickstartShort(Quickstart):
    """The same, with as many steps as fit in 20 minutes on two cores without AVX512-BF16."""

    steps = 1800


@registry.register
class Pocket(Recipe):
    """44 languages into English in a file of 39 MB; see docs/pocket.md."""

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        return Experiment(
            # No dropout: training runs from the fourth on set it with --set, see docs/pocket.md.
            model=Translation(
                # 1500 pieces for each language. English alone has fewer than all, and a smaller softmax.
                source_vocabulary=64_000,
                target_vocabulary=8000,
                tied_embeddings=True,
                twin_keys=True,
                # Twelve of the encoder, which reads a sentence once, and two of the decoder.
                num_layers=14,
                num_encoder_layers=12,
                encoder_layer_pattern=("dense", "dense", "dense", "dense", "dense", "moe"),
                model_dim=256,
                hidden_dim=512,
                num_heads=4,
                head_dim=64,
                num_experts=16,
                # Larger groups than m4.Quickstart's: with 16 experts, fewer tokens exceed a capacity.
                num_groups=4,
                aux_loss_weight=aux_loss_weight(16),
                unroll=True,
            ),
            # The number of steps need not be known: 0.03, decreasing from step 10,000 on. To end the training,
            # `--set optimizer.learning_rate.cooldown_after=STEP` and `cooldown_steps`.
            optimizer=Adafactor(
                beta1=0.9, learning_rate=InverseSquareRoot(peak_value=0.03, decay_after=10_000, warmup_steps=200)
            ),
            input=InputConfig(
                batch_size=16,
                source_length=96,
                target_length=76,
                temperature=3.0,
                sentence_balance=0.5,
                name_substitution=0.5,
            ),
            training=TrainingSchedule(log_every=20, evaluate_every=500, checkpoint_every=200, keep=8),
            search=BeamSearch(max_length=72, length_alpha=1.0),
            reread_below=0.6,
            matmul_precision="bfloat16",
            corpus="build/pocket/corpus",
            tokenizers="build/pocket/tokenizers",
        )


@registry.register
class Small(Recipe):
    """Hundreds of languages, the `debian` corpus, on an 8-core workstation or one GPU: 16 experts in each MoE layer."""

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        return Experiment(
            model=Translation(
                source_vocabulary=16_000,
                target_vocabulary=8000,
                num_layers=8,
                model_dim=256,
                hidden_dim=1024,
                num_heads=4,
                head_dim=64,
                num_experts=16,
                num_groups=32,
                aux_loss_weight=aux_loss_weight(16),
                input_dropout=0.1,
                residual_dropout=0.1,
                label_smoothing=0.1,
            ),
            optimizer=Adafactor(learning_rate=InverseSquareRoot(peak_value=0.0316, decay_after=1000, warmup_steps=200)),
            input=InputConfig(batch_size=32, source_length=96, target_length=48, temperature=5.0),
            training=TrainingSchedule(steps=100_000, log_every=20, evaluate_every=500, checkpoint_every=250),
            search=BeamSearch(max_length=64),
            mesh=DeviceMesh((8,)),
            corpus="build/debian/corpus",
            tokenizers="build/debian/tokenizers",
        )
