"""The floating-point operations (FLOPs) of a model, for the utilisation: a step's FLOPs over the peak of the devices.

Rematerialisation, empty expert capacity, dispatch and combine are not counted; the matmul with the router's weight is.
"""

from __future__ import annotations

from lingvo_moe import tree
from lingvo_moe.data.batching import BatchConfig
from lingvo_moe.layers.base import Weight
from lingvo_moe.models.segmentation import UNet
from lingvo_moe.models.transformer import Transformer

# A multiplication and an addition forward; the backward pass has as many for the inputs and for the weights.
_TRAINING_FLOPS_PER_MAC = 2 * 3


def training_step(model: Transformer | UNet, batch: BatchConfig) -> float:
    """Returns the FLOPs of a training step over all devices: matmuls with weights, and the matmuls of attention.

    Each token goes through as many experts as its router selects. All positions of a row are counted, including padding
    and masked ones, as is usual in published utilisations.
    """
    macs = model.attention_macs(batch.lengths)
    for path, weight in tree.flatten(model.weights()).items():
        if weight.fan_in:
            macs += model.positions_of(path, batch.lengths) * weight.size * _active_fraction(model, path, weight)
    return _TRAINING_FLOPS_PER_MAC * batch.batch_size * macs


def _active_fraction(model: Transformer | UNet, path: str, weight: Weight) -> float:
    """Returns the fraction of a weight that a token uses: of experts, those that the layer's router selects for it."""
    if "E" not in weight.logical_axes or not isinstance(model, Transformer):
        return 1.0
    stack, layer, *_ = path.split("/")
    experts_per_token = model.feed_forwards(stack)[int(layer.removeprefix("layer_"))].experts_per_token
    return experts_per_token / weight.shape[weight.logical_axes.index("E")]
