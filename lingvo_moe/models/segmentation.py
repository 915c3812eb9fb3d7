"""Segmentation of volumes by a 3D U-Net (Cicek et al. 2016, arXiv 1606.06650; GSPMD section 5.6 and table 8).

The layers annotate nothing: the sharding of the voxels, the model's input, propagates to all of them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from lingvo_moe import ranges
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.layers.images.convolution import Convolution, TransposedConvolution
from lingvo_moe.layers.images.normalization import InstanceNorm
from lingvo_moe.layers.images.pooling import MaxPooling
from lingvo_moe.layers.summaries import magnitude
from lingvo_moe.lazy import tf
from lingvo_moe.models.choices import ACTIVATION_DTYPES, check_choices
from lingvo_moe.ranges import COUNT, Range

_WINDOW = 3  # of a convolution, along each dimension
_HALF = (2, 2, 2)  # window and stride
_MOST_LEVELS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionBlock(Layer):
    """Two convolutions of 3^3, each with instance normalisation and ReLU.

    Cicek et al. normalise by batch, of one volume, and use its own statistics in evaluation too: that is instance
    normalisation. Their convolutions shrink a volume by 2 along each dimension; here zeros pad it, so every voxel has a
    class, and the sizes at all levels are powers of two apart, as equal parts for devices need.

    Attributes:
      channels: of the input, of the first and of the second convolution.
    """

    channels: tuple[int, int, int]

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {name: layer.weights() for name, layer in self._layers.items()}

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, X, Y, Z, I]` to `[B, X, Y, Z, O]`; raises UserError for volumes that are too small."""
        layers, outputs = self._layers, inputs
        for name in ("first", "second"):
            outputs = layers[name](theta[name], outputs, context)
            outputs = tf.nn.relu(layers[f"{name}_norm"](theta[f"{name}_norm"], outputs, context))
        return outputs

    @property
    def _layers(self) -> dict[str, Convolution | InstanceNorm]:
        layers: dict[str, Convolution | InstanceNorm] = {}
        for name, inputs, outputs in zip(("first", "second"), self.channels, self.channels[1:]):
            layers[name] = Convolution(inputs=inputs, outputs=outputs, window=(_WINDOW,) * 3, bias=False)
            layers[f"{name}_norm"] = InstanceNorm(channels=outputs)
        return layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNet(Layer):
    """Halves a volume level by level, and doubles it again, concatenated with the skip connection of each level.

    Attributes:
      num_layers: the levels; each but the first has half the size of the one above, and twice its channels.
      base_channels: of the very first convolution.
      channels: of the voxels.
      classes: of a voxel; 0 is the background.
      dice_weight: w in loss = cross-entropy + w (1 - Dice), for classes of few voxels.
      activation_dtype: `float32`, or `bfloat16` for mixed precision; weights are float32.
    """

    num_layers: int = 4
    base_channels: int = 32
    channels: int = 1
    classes: int = 3
    dice_weight: float = 1.0
    activation_dtype: str = "float32"

    sides = ("source", "target")
    # It reads no text, and has no experts, pipeline or loop of layers.
    vocabularies: ClassVar[dict[str, int]] = {}
    num_experts, num_groups = 0, 1
    unroll, remat, pipeline, stages, microbatches = True, "none", "none", 1, 1

    def __post_init__(self):
        check_choices(self, {"activation_dtype": ACTIVATION_DTYPES})
        channels = dict.fromkeys(("base_channels", "channels"), COUNT)
        ranges.check("model.", self, {"num_layers": Range(2), "classes": Range(2), **channels, "dice_weight": Range()})
        if self.num_layers > _MOST_LEVELS:
            raise UserError(
                f"model.num_layers is {self.num_layers}; it must be at most {_MOST_LEVELS}: each level halves a volume."
            )

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {name: layer.weights() for name, layer in self._layers.items()}

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """The loss of one batch and what to report.

        Args:
          theta: tensors for `weights()`.
          batch: `source`: voxels `[B, X, Y, Z, channels] float32`; `target`: labels `[B, X, Y, Z] int32` and
            segment_ids `[B] int32`, 0 for an empty row.
          context: of the call.

        Returns:
          (loss to minimise, scalar; metrics: `cross_entropy` in nats per voxel, `tokens`, the number of voxels, and
          `dice`, of probabilities, the mean over the classes except the background, with 1 voxel added to numerator and
          denominator).

        Raises:
          UserError: volumes that the levels cannot halve, or that are too small for the windows or the devices.
        """
        logits = self._classify(theta, batch["source"], context)
        labels = tf.one_hot(batch["target"]["labels"], self.classes)
        present = tf.cast(tf.not_equal(batch["target"]["segment_ids"], 0), tf.float32)[:, None, None, None, None]
        voxels = tf.reduce_sum(present) * math.prod(logits.shape[1:4])
        nats = -tf.reduce_sum(labels * tf.nn.log_softmax(logits) * present)
        cross_entropy = tf.math.divide_no_nan(nats, voxels)
        dice = self._dice(tf.nn.softmax(logits) * present, labels * present)
        metrics = {"cross_entropy": cross_entropy, "tokens": voxels, "dice": dice}
        return cross_entropy + self.dice_weight * (1.0 - dice), metrics

    def segment(self, theta: dict, source: dict, context: Context) -> tf.Tensor:
        """See `protocols.SegmentingModel`: the most probable class of each voxel, `[B, X, Y, Z] int32`."""
        return tf.argmax(self._classify(theta, source, context), axis=-1, output_type=tf.int32)

    def positions_of(self, path: str, lengths: dict[str, int]) -> float:
        """See `protocols.ExperimentModel`; a level has an eighth of the voxels of the one above."""
        block, _, level = path.split("/")[0].rpartition("_")
        # Each voxel of the level below multiplies the kernel of a transposed convolution once.
        depth = int(level) + (block == "upsampling") if block else 0
        return lengths["source"] / 8**depth

    def settings_of_layers(self, field: str) -> list[tuple[str, str, Any]]:
        """See `protocols.ExperimentModel`; it has no feed-forward layers."""
        del field
        return []

    def attention_macs(self, lengths: dict[str, int]) -> float:
        """See `Transformer`; there is no attention."""
        del lengths
        return 0.0

    def check_size(self, size: tuple[int, ...], devices: tuple[int, ...] = (1, 1, 1)):
        """Raises UserError for volumes that cannot be halved from level to level, or leave less than a window.

        Args:
          size: X, Y and Z in voxels.
          devices: how many share each of them. They must divide it, and not exceed what is left at the last level.
        """
        multiple = 2 ** (self.num_layers - 1)
        if any(voxels % multiple for voxels in size):
            raise UserError(
                f"input.size is {'x'.join(map(str, size))}; {self.num_layers} levels (model.num_layers) halve each "
                f"side {self.num_layers - 1} times, so use multiples of {multiple}."
            )
        if min(size) < _WINDOW * multiple:
            raise UserError(
                f"input.size is {'x'.join(map(str, size))}; a side of the last of {self.num_layers} levels has "
                f"{min(size) // multiple}, fewer than the {_WINDOW} voxels of a window; use at least "
                f"{_WINDOW * multiple}, or fewer levels (model.num_layers)."
            )
        for axis, voxels, sharing in zip("XYZ", size, devices):
            if voxels % sharing or voxels // multiple < sharing:
                raise UserError(
                    f"input.size has {voxels} voxels along {axis}, {voxels // multiple} at the last of "
                    f"{self.num_layers} levels; the {sharing} devices along {axis} must divide the first number and "
                    f"not exceed the second. Use fewer devices for {axis} (--devices, --mesh), larger volumes, or "
                    f"fewer levels (model.num_layers)."
                )

    def _classify(self, theta: dict, source: dict, context: Context) -> tf.Tensor:
        """Returns logits `[B, X, Y, Z, classes] float32`."""
        self.check_size(tuple(source["voxels"].shape[1:-1]))
        context = context.in_dtype(self.activation_dtype)
        layers, outputs, skips = self._layers, context.cast(source["voxels"]), []

        def call(name: str, inputs: tf.Tensor) -> tf.Tensor:
            with tf.name_scope(name):
                result = layers[name](theta[name], inputs, context)
            context.summarize(name, lambda: magnitude(result))
            return result

        for level in range(self.num_layers):
            outputs = call(
                f"analysis_{level}", MaxPooling(window=_HALF, strides=_HALF)({}, outputs, context) if level else outputs
            )
            skips.append(outputs)
        for level in reversed(range(self.num_layers - 1)):
            outputs = tf.concat([skips[level], call(f"upsampling_{level}", outputs)], axis=-1)
            outputs = call(f"synthesis_{level}", outputs)
        return tf.cast(call("softmax", outputs), tf.float32)

    def _dice(self, probabilities: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """The mean over classes of (2 |P and L| + 1) / (|P| + |L| + 1), of all voxels `[B, X, Y, Z, classes]`."""
        both, either = (
            tf.reduce_sum(part, axis=(0, 1, 2, 3))[1:] for part in (probabilities * labels, probabilities + labels)
        )
        return tf.reduce_mean((2.0 * both + 1.0) / (either + 1.0))  # 1 for a class that nobody has

    @property
    def _layers(self) -> dict[str, ConvolutionBlock | Convolution | TransposedConvolution]:
        layers: dict[str, ConvolutionBlock | Convolution | TransposedConvolution] = {}
        widths = [self.base_channels * 2 ** (level + 1) for level in range(self.num_layers)]
        for level, width in enumerate(widths):
            inputs = widths[level - 1] if level else self.channels
            layers[f"analysis_{level}"] = ConvolutionBlock(channels=(inputs, width // 2, width))
        for level in reversed(range(self.num_layers - 1)):
            width, below = widths[level], widths[level + 1]
            layers[f"upsampling_{level}"] = TransposedConvolution(
                inputs=below, outputs=below, window=_HALF, strides=_HALF, bias=False
            )
            layers[f"synthesis_{level}"] = ConvolutionBlock(channels=(below + width, width, width))
        layers["softmax"] = Convolution(inputs=widths[0], outputs=self.classes, window=(1, 1, 1))
        return layers
