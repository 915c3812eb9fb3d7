"""The names and shapes of weights of T5's architecture: those of MADLAD-400 and of Switch Transformers.

T5 does not divide logits of attention by the root of a head's dimension, and does not multiply embeddings by the root
of M. Here both are done, so the weights differ by these factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lingvo_moe.importing.weights import Place, Places
from lingvo_moe.models.translation import Translation

_SHARED = "shared.weight"
_SUBLAYERS = {
    "encoder": ("self_attention", "feed_forward"),
    "decoder": ("self_attention", "cross_attention", "feed_forward"),
}
_ATTENTION = {"self_attention": "SelfAttention", "cross_attention": "EncDecAttention"}
_MATRICES = {"query": "q", "key": "k", "value": "v", "output": "o", "wo": "wo"}


class Names(NamedTuple):
    """The names of feed-forward layers, which differ between the two kinds of models.

    Attributes:
      layer: of one.
      matrices: of its matrices.
    """

    layer: str
    matrices: Mapping[str, str]


GATED = Names("DenseReluDense", {"wi": "wi_0", "wi_linear": "wi_1"})
SWITCH = Names("mlp", {"wi": "wi"})


class T5Places(Places):
    """Where the files have the weights of such a model."""

    # Written by early versions of the library; they have no part in a result.
    ignored = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

    def __init__(self, model: Translation, rows: np.ndarray, names: Names):
        """Makes the places of a model; `names` are those of feed-forward layers."""
        super().__init__(model, rows)
        self._feed_forward, self._matrices = names.layer, {**_MATRICES, **names.matrices}
        tied = ("lm_head.weight",) if model.tied_softmax else ()
        self.copies = {_SHARED: ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *tied)}

    def of(self, path: str) -> Iterator[Place]:
        """See `Places`."""
        shape = self.specs[path].shape
        stack, _, rest = path.partition("/")
        if stack == "embedding":
            scale = 1.0 / math.sqrt(self.model.model_dim)
            yield Place(_SHARED, (self.vocabulary, *shape[1:]), scale=scale, rows=self.rows, is_transposed=False)
        elif stack == "softmax":
            yield Place("lm_head.weight", (self.vocabulary, shape[0]), rows=self.rows)
        elif rest == "relative_bias":
            table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield Place(table, shape, is_transposed=False)
        elif rest == "norm/scale":
            yield Place(f"{stack}.final_layer_norm.weight", shape)
        else:
            layer, sublayer, weight = rest.split("/", 2)
            has_experts = f"{stack}/{layer}/feed_forward/gate" in self.specs
            for repeat, number in enumerate(self.layers_of(stack, layer)):
                prefix = f"{stack}.block.{number}.layer.{_SUBLAYERS[stack].index(sublayer)}"
                owner = f"{prefix}.{_ATTENTION.get(sublayer, self._feed_forward)}"
                if weight == "norm/scale":
                    yield Place(f"{prefix}.layer_norm.weight", shape[1:], (repeat,))
                elif weight == "gate":
                    yield Place(f"{owner}.router.classifier.weight", shape[:0:-1], (repeat,))
                elif sublayer in _ATTENTION or not has_experts:
                    yield self._of_matrix(owner, weight, (repeat,), shape[1:])
                else:
                    for expert in range(shape[1]):
                        yield self._of_matrix(f"{owner}.experts.expert_{expert}", weight, (repeat, expert), shape[2:])

    def _of_matrix(self, owner: str, weight: str, index: tuple[int, ...], shape: tuple[int, ...]) -> Place:
        """That of a matrix of a layer or an expert: `wi`, for instance."""
        # `output` contracts over heads and their elements, the others over the first dimension.
        fan_in = math.prod(shape[:-1] if weight == "output" else shape[:1])
        scale = math.sqrt(self.model.head_dim) if weight == "query" else 1.0
        return Place(f"{owner}.{self._matrices[weight]}.weight", (math.prod(shape) // fan_in, fan_in), index, scale)
