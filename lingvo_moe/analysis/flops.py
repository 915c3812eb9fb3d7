"""The floating-point operations that a model asks for, to compare a step with the cores' peak: no rematerialisation, no
capacity that stays empty, no gating."""

from __future__ import annotations

from lingvo_moe import tree
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.layers.base import Weight
from lingvo_moe.models.transformer import Transformer

# One multiplication and one addition forward; the backward pass makes as many for the inputs and for the weights.
_PER_PRODUCT = 2 * 3


def training_step(model: Transformer, batch: InputConfig) -> float:
    """Operations of one training step over all cores: products with weights, and attention's two over its keys.

    Each token goes through as many experts as its router selects; all positions of a row are counted, paddings and masked ones too, as utilisation is
    usually published.
    """
    rows, lengths = batch.batch_size, batch.lengths
    products = 0.0
    for path, weight in tree.flatten(model.weights()).items():
        if weight.fan_in and not path.endswith("embedding/table"):
            share = _active_share(model, path, weight)
            products += rows * lengths[_side(path, tuple(lengths))] * weight.size * share
    width = model.num_heads * model.head_dim
    for queries, keys, layers in _attentions(model, lengths):
        products += layers * rows * 2 * queries * keys * width
    return _PER_PRODUCT * products


def _active_share(model: Transformer, path: str, weight: Weight) -> float:
    """The share of a weight that computes a token: of experts, `decoder/layer_1/feed_forward/...`, as many as a router selects."""
    if "E" not in weight.logical_axes:
        return 1.0
    stack, layer, *_ = path.split("/")
    experts_per_token = model.feed_forwards(stack)[int(layer.removeprefix("layer_"))].experts_per_token
    return experts_per_token / weight.shape[weight.logical_axes.index("E")]


def _side(path: str, sides: tuple[str, ...]) -> str:
    """The side whose tokens a weight is multiplied with: the encoder's, and keys and values over its outputs, the source's."""
    of_memory = "cross_attention/key" in path or "cross_attention/value" in path
    return "source" if "source" in sides and (path.startswith("encoder/") or of_memory) else "target"


def _attentions(model: Transformer, lengths: dict[str, int]) -> list[tuple[int, int, int]]:
    """(queries, keys, layers) of each kind of attention."""
    layers = model.num_layers // len(lengths)
    found = [(length, length, layers) for length in lengths.values()]
    if len(lengths) == 2:
        found.append((lengths["target"], lengths["source"], layers))
    return found
