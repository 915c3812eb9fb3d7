"""The names and shapes of the weights of T5's class, as of MADLAD-400.

T5 does not divide logits of attention by the root of a head's dimension, and does not multiply embeddings by the root
of M. Here both are done, so the weights differ by these factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from lingvo_moe.importing.weights import Place, Places

_SHARED = "shared.weight"
_SUBLAYERS = {
    "encoder": {"self_attention": "SelfAttention", "feed_forward": "DenseReluDense"},
    "decoder": {
        "self_attention": "SelfAttention",
        "cross_attention": "EncDecAttention",
        "feed_forward": "DenseReluDense",
    },
}
_MATRICES = {"query": "q", "key": "k", "value": "v", "output": "o", "wi": "wi_0", "wi_linear": "wi_1", "wo": "wo"}


class T5Places(Places):
    """Where the files have the weights of such a model."""

    copies: Mapping[str, tuple[str, ...]] = {_SHARED: ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")}
    # Written by early versions of the library; they have no part in a result.
    ignored = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

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
            index = list(_SUBLAYERS[stack]).index(sublayer)
            for repeat, number in enumerate(self.layers_of(stack, layer)):
                prefix = f"{stack}.block.{number}.layer.{index}"
                yield self._of_sublayer(prefix, _SUBLAYERS[stack][sublayer], weight, (repeat,), shape[1:])

    def _of_sublayer(
        self, prefix: str, sublayer: str, weight: str, index: tuple[int, ...], shape: tuple[int, ...]
    ) -> Place:
        """That of a weight of one sublayer: `wi`, for instance."""
        if weight == "norm/scale":
            return Place(f"{prefix}.layer_norm.weight", shape, index)
        # `output` contracts over heads and their elements, the others over the first dimension.
        fan_in = math.prod(shape[:-1] if weight == "output" else shape[:1])
        scale = math.sqrt(self.model.head_dim) if weight == "query" else 1.0
        return Place(
            f"{prefix}.{sublayer}.{_MATRICES[weight]}.weight", (math.prod(shape) // fan_in, fan_in), index, scale
        )
