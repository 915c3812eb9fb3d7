"""Conformers: the pipelined models of GSPMD section 5.3 and table 5, and a small one that recognises speech.

Table 5's batch is `microbatches x rows`. The paper states neither the devices nor the length of a recording. Weights of
6.47B in 13.8 GB fit one core for each stage, and with that the printed times and utilisations give 620 to 690
positions; here 640, 25.6 seconds of frames of 10 ms. It names no vocabulary, number of channels or kernel either; with
those here the models have the printed numbers of weights, in binary billions as in the other tables.
"""

from __future__ import annotations

from lingvo_moe import registry
from lingvo_moe.data.batching import default_shards
from lingvo_moe.data.log_mel import LogMel
from lingvo_moe.data.speech import SpeechInput
from lingvo_moe.experiment import Experiment, Recipe
from lingvo_moe.models.speech import SpeechRecognition
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.training_schedule import TrainingSchedule

_LAYOUT = "pipeline_data"


class Pipelined(Recipe):
    """A column of table 5: M 3072, H 12288, 16 heads, one row per microbatch, bfloat16 activations."""

    num_layers: int
    stages: int
    microbatches: int
    pipeline = "gpipe"

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        mesh = DeviceMesh((self.stages,))
        return Experiment(
            model=SpeechRecognition(
                target_vocabulary=32,
                num_layers=self.num_layers,
                model_dim=3072,
                hidden_dim=12_288,
                num_heads=16,
                head_dim=192,
                activation_dtype="bfloat16",
                remat="full",
                pipeline=self.pipeline,
                stages=self.stages,
                microbatches=self.microbatches,
            ),
            optimizer=Adafactor(learning_rate=InverseSquareRoot()),
            input=SpeechInput(
                batch_size=self.microbatches,
                source_length=2560,
                target_length=512,
                shards=default_shards(mesh, _LAYOUT),
            ),
            training=TrainingSchedule(steps=400_000, log_every=100, evaluate_every=1000, checkpoint_every=1000),
            mesh=mesh,
            layout=_LAYOUT,
        )


@registry.register
class Conformer6B(Pipelined):
    """Table 5, first column: 8.40 s a step, 59.4 % raw utilisation, 10.0 % bubbles, 13.8 GB."""

    num_layers, stages, microbatches = 32, 8, 64


@registry.register
class Conformer6BSmall(Pipelined):
    """Table 5, second column: 2.80 s a step, 57.9 % raw utilisation, 29.9 % bubbles, 12.2 GB."""

    num_layers, stages, microbatches = 32, 8, 16


@registry.register
class Conformer6BCircular(Pipelined):
    """Table 5, third column: 2.30 s a step, 53.9 % raw utilisation, 9.0 % bubbles, 14.1 GB."""

    num_layers, stages, microbatches, pipeline = 32, 8, 16, "circular"


@registry.register
class Conformer13B(Pipelined):
    """Table 5, fourth column: 18.37 s a step, 60.5 % raw utilisation, 10.4 % bubbles, 15.4 GB."""

    num_layers, stages, microbatches = 64, 16, 128


@registry.register
class Conformer13BSmall(Pipelined):
    """Table 5, fifth column: 5.58 s a step, 59.0 % raw utilisation, 31.0 % bubbles, 12.8 GB."""

    num_layers, stages, microbatches = 64, 16, 32


@registry.register
class Conformer13BCircular(Pipelined):
    """Table 5, last column: 4.42 s a step, 50.6 % raw utilisation, 9.6 % bubbles, 14.8 GB."""

    num_layers, stages, microbatches, pipeline = 64, 16, 32, "circular"


@registry.register
class Small(Recipe):
    """Recognises the English of `tools.build_speech`, letter by letter; for one processor."""

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        return Experiment(
            model=SpeechRecognition(
                target_vocabulary=64,
                num_layers=4,
                model_dim=128,
                hidden_dim=384,
                num_heads=4,
                head_dim=32,
                num_bins=40,
                subsampling_channels=16,
                kernel_size=9,
                residual_dropout=0.05,
                unroll=True,
            ),
            optimizer=Adafactor(learning_rate=InverseSquareRoot(peak_value=0.025, decay_after=400, warmup_steps=100)),
            input=SpeechInput(
                batch_size=16, source_length=320, target_length=48, temperature=1.0, features=LogMel(num_bins=40)
            ),
            training=TrainingSchedule(steps=2500, evaluate_every=250, checkpoint_every=250),
            mesh=DeviceMesh((1,)),
            corpus="build/speech/corpus",
            tokenizers="build/speech/tokenizers",
        )
