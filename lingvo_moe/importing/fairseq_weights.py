"""The names and shapes of weights of M2M-100, NLLB-200, NLLB-MoE and Marian, which Hugging Face derives from fairseq's.

In inference, Hugging Face multiplies the outputs of experts by 1 - moe_token_dropout. Here that is a part of their
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lingvo_moe.importing.weights import Place, Places
from lingvo_moe.models.translation import Translation

_SHARED = "model.shared.weight"
_LOGITS_BIAS = "final_logits_bias"
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj", "wi": "fc1", "wo": "fc2"}
_NORM = {"norm/scale": "weight", "norm/bias": "bias"}


class Names(NamedTuple):
    """The names of a layer's parts, which differ between the two kinds of models.

    Attributes:
      cross_attention: the attention of a decoder to the encoder's outputs.
      feed_forward: the prefix of the feed-forward layer's tensors.
      feed_forward_norm: the normalisation before it.
    """

    cross_attention: str
    feed_forward: str
    feed_forward_norm: str


DENSE = Names("encoder_attn", "", "final_layer_norm")
SPARSE = Names("cross_attention", "ffn.", "ff_layer_norm")


class FairseqPlaces(Places):
    """Where the files have the weights of such a model."""

    copies: Mapping[str, tuple[str, ...]] = {
        _SHARED: ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    }
    ignored = tuple(  # the table of sinusoids
        f"model.{side}.embed_positions.{of}" for side in ("encoder", "decoder") for of in ("weight", "weights")
    )

    def __init__(self, model: Translation, rows: np.ndarray, names: Names, expert_scale: float = 1.0):
        """Makes the places of a model.

        Args:
          model: whose weights they are.
          rows: see `Places`.
          names: of the parts of a layer.
          expert_scale: which multiplies the outputs of experts.
        """
        super().__init__(model, rows)
        self._names, self._expert_scale = names, expert_scale

    def of(self, path: str) -> Iterator[Place]:
        """See `Places`."""
        shape = self.specs[path].shape
        stack, _, rest = path.partition("/")
        if stack == "embedding":
            yield Place(_SHARED, (self.vocabulary, *shape[1:]), rows=self.rows, is_transposed=False)
        elif stack == "softmax":
            yield Place(_LOGITS_BIAS, (1, self.vocabulary), rows=_without_repeated(self.rows))
        elif rest in _NORM:
            yield Place(f"model.{stack}.layer_norm.{_NORM[rest]}", shape)
        else:
            layer, _, of_layer = rest.partition("/")
            has_experts = f"{stack}/{layer}/feed_forward/gate" in self.specs
            for repeat, number in enumerate(self.layers_of(stack, layer)):
                prefix = f"model.{stack}.layers.{number}"
                yield from self._of_layer(prefix, of_layer, repeat, shape[1:], has_experts)

    def _of_layer(
        self, prefix: str, path: str, repeat: int, shape: tuple[int, ...], has_experts: bool
    ) -> Iterator[Place]:
        """Those of a weight of one layer: `feed_forward/wi`, for instance."""
        sublayer, _, weight = path.partition("/")
        attention = {"self_attention": "self_attn", "cross_attention": self._names.cross_attention}.get(sublayer)
        owner = f"{prefix}.{attention}." if attention else f"{prefix}.{self._names.feed_forward}"
        if weight in _NORM:
            norm = f"{attention}_layer_norm" if attention else self._names.feed_forward_norm
            yield Place(f"{prefix}.{norm}.{_NORM[weight]}", shape, (repeat,))
        elif weight == "gate":
            yield Place(f"{owner}router.classifier.weight", shape[::-1], (repeat,))
        elif attention or not has_experts:
            yield Place(*_projection(owner, weight, shape), (repeat,))
        else:
            scale = self._expert_scale if weight.startswith("wo") else 1.0
            for expert in range(shape[0]):
                tensor = _projection(f"{owner}experts.expert_{expert}.", weight, shape[1:])
                yield Place(*tensor, (repeat, expert), scale)


def _without_repeated(rows: np.ndarray) -> np.ndarray:
    """Returns rows with -1 for those that came before."""
    _, first = np.unique(rows, return_index=True)
    return np.where(np.isin(np.arange(len(rows)), first), rows, -1)


def _projection(owner: str, weight: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the name and the shape of a matrix or a bias of a linear layer: of `wi` or `wi_bias`, for instance."""
    matrix = weight.removesuffix("_bias")
    tensor = f"{owner}{_PROJECTIONS[matrix]}"
    if matrix != weight:
        return f"{tensor}.bias", (math.prod(shape),)
    # `output` contracts over heads and their elements, the others over the first dimension.
    fan_in = math.prod(shape[:-1] if weight == "output" else shape[:1])
    return f"{tensor}.weight", (math.prod(shape) // fan_in, fan_in)
