"""3D U-Nets: the rows of GSPMD section 5.6 and table 8, and a small one for one processor.

The paper names the model (Cicek et al. 2016), the sizes of images and batches and the device meshes, but no channels:
here they are those of Cicek et al., whose 19,069,955 weights the model has for three channels and labels, and 2,336
scales of the normalisation.
"""

from __future__ import annotations

from lingvo_moe import registry
from lingvo_moe.data.volumes import VolumeInput
from lingvo_moe.experiment import Experiment, Recipe
from lingvo_moe.models.segmentation import UNet
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.training_schedule import TrainingSchedule


class Spatial(Recipe):
    """A column of table 8: volumes of `side`^3, shared by the devices of the mesh's second axis; bfloat16."""

    side: int = 128
    batch_size: int = 4
    mesh: tuple[int, int]

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        return Experiment(
            model=UNet(activation_dtype="bfloat16"),
            optimizer=Adafactor(learning_rate=InverseSquareRoot(peak_value=0.00316, decay_after=1000)),
            input=VolumeInput(batch_size=self.batch_size, size=(self.side,) * 3),
            training=TrainingSchedule(steps=100_000, log_every=100, evaluate_every=1000, checkpoint_every=1000),
            mesh=DeviceMesh(self.mesh),
            layout="spatial_data",
            corpus="",
            tokenizers="",
        )


@registry.register
class Volume128Mesh1x1(Spatial):
    """Table 8, first column: 2.99 s a step, 47.9 % utilisation, 14.3 GB."""

    mesh = (1, 1)


@registry.register
class Volume128Mesh1x2(Spatial):
    """Table 8, second column: 1.56 s a step, 43.7 % utilisation, 14.8 GB."""

    mesh = (1, 2)


@registry.register
class Volume128Mesh1x4(Spatial):
    """Table 8, third column: 0.79 s a step, 43.5 % utilisation, 7.9 GB."""

    mesh = (1, 4)


@registry.register
class Volume128Mesh1x8(Spatial):
    """Table 8, fourth column: 0.39 s a step, 43.5 % utilisation, 4.5 GB."""

    mesh = (1, 8)


@registry.register
class Volume128Mesh1x16(Spatial):
    """Table 8, fifth column: 0.19 s a step, 43.8 % utilisation, 2.7 GB."""

    mesh = (1, 16)


@registry.register
class Volume256Mesh4x16(Spatial):
    """Table 8, sixth column: 1.66 s a step, 20.5 % utilisation, 14.9 GB."""

    side, batch_size, mesh = 256, 8, (4, 16)


@registry.register
class Volume256Mesh2x32(Spatial):
    """Table 8, last column: 0.76 s a step, 41.2 % utilisation, 8.52 GB."""

    side, batch_size, mesh = 256, 8, (2, 32)


@registry.register
class Small(Recipe):
    """Tells ellipsoids from tubes in volumes of 32^3; for one processor."""

    def experiment(self) -> Experiment:
        """Returns the full configuration."""
        return Experiment(
            model=UNet(num_layers=3, base_channels=4),
            optimizer=Adafactor(learning_rate=InverseSquareRoot(peak_value=0.00707, decay_after=200, warmup_steps=20)),
            input=VolumeInput(batch_size=2),
            training=TrainingSchedule(steps=600, evaluate_every=100, checkpoint_every=100),
            mesh=DeviceMesh((1,)),
            layout="spatial",
            corpus="",
            tokenizers="",
        )
