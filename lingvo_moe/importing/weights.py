"""The weights of M2M-100, NLLB-200 and NLLB-MoE in Hugging Face's format, as those of `models.translation.Translation`.

A linear layer of PyTorch has `[outputs, inputs]` where ours has `[inputs, outputs]`, and each layer has tensors of its
own where ours are stacked. In inference, Hugging Face multiplies the outputs of experts by 1 - moe_token_dropout. Here
that is a part of their weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.importing.model_directory import CONFIG, Tensors
from lingvo_moe.importing.tokenizer import ROWS_OF_SPECIAL_IDS
from lingvo_moe.models.translation import Translation
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.steps import weight_specs
from lingvo_moe.utils import progress
from lingvo_moe.utils.counts import counted

_SHARED = "model.shared.weight"
# Copies of the shared table, which some versions write, also in its place, and the table of sinusoids.
_COPIES = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
_IGNORED = (*_COPIES, "model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights")
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj", "wi": "fc1", "wo": "fc2"}
_ROUTER = "router.classifier.weight"
# A model with more than this many times the weights of the files is refused before memory is allocated for it.
_MOST_TIMES = 8


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


class Weights:
    """Reads the weights of a model."""

    def __init__(self, model: Translation, tensors: Tensors, names: Names, expert_scale: float):
        """Makes a reader.

        Args:
          model: whose weights are read.
          tensors: of the directory.
          names: of the parts of a layer.
          expert_scale: which multiplies the outputs of experts.
        """
        self._model, self._tensors, self._names, self._expert_scale = model, tensors, names, expert_scale
        self._read: set[str] = set()

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Returns the weights by path, in float32.

        Args:
          name: what messages call the directory.

        Raises:
          UserError: a tensor is missing, has another shape, or is of something that our model does not have.
        """
        specs = tree.flatten(weight_specs(self._model.weights()))
        count = sum(math.prod(spec.shape) for spec in specs.values())
        if count > _MOST_TIMES * self._tensors.size:  # a smaller difference is that of a tensor, which is named below
            raise UserError(
                f"{name}: by {CONFIG}, the model has {count:,} weights, but the files of weights have only "
                f"{self._tensors.size:,}; copy the files again."
            )
        theta = {
            path: self._weight(path, spec) for path, spec in progress.track(specs.items(), "reading", unit="arrays")
        }
        if unknown := sorted(self._tensors.shapes.keys() - self._read - set(_IGNORED)):
            raise UserError(
                f"{name}: a model with this {CONFIG} has no tensor {unknown[0]!r}, and the files have "
                f"{counted(len(unknown), 'such tensor')}; expected M2M-100, NLLB-200 or NLLB-MoE as Hugging Face's "
                f"library writes them."
            )
        return theta

    def _weight(self, path: str, spec: Spec) -> np.ndarray:
        stack, _, rest = path.partition("/")
        if stack not in self._model.stack_layers:
            return self._table(spec.shape)
        if rest.startswith("norm/"):
            return self._tensor(f"model.{stack}.layer_norm", rest, spec.shape)
        layer, _, of_layer = rest.partition("/")
        period, index = len(self._model.layer_patterns[stack]), int(layer.removeprefix("layer_"))
        value = np.empty(spec.shape, np.float32)
        for repeat in range(spec.shape[0]):
            value[repeat] = self._of_layer(f"model.{stack}.layers.{repeat * period + index}", of_layer, spec.shape[1:])
        return value

    def _table(self, shape: tuple[int, ...]) -> np.ndarray:
        """The embeddings, in the order of our special ids."""
        there = [name for name in (_SHARED, *_COPIES) if name in self._tensors.shapes]
        table = self._get(there[0] if there else _SHARED, shape)
        return np.concatenate([table[list(ROWS_OF_SPECIAL_IDS)], table[len(ROWS_OF_SPECIAL_IDS) :]])

    def _of_layer(self, prefix: str, path: str, shape: tuple[int, ...]) -> np.ndarray:
        """A weight of one layer: `feed_forward/wi`, for instance."""
        sublayer, _, weight = path.partition("/")
        attention = {"self_attention": "self_attn", "cross_attention": self._names.cross_attention}.get(sublayer)
        if weight.startswith("norm/"):
            norm = f"{attention}_layer_norm" if attention else self._names.feed_forward_norm
            return self._tensor(f"{prefix}.{norm}", weight, shape)
        owner = f"{prefix}.{attention}." if attention else f"{prefix}.{self._names.feed_forward}"
        if weight == "gate":
            return self._get(owner + _ROUTER, shape[::-1]).T
        if f"{owner}{_ROUTER}" not in self._tensors.shapes:
            return self._projection(owner, weight, shape)
        value = np.empty(shape, np.float32)
        for expert in range(shape[0]):
            value[expert] = self._projection(f"{owner}experts.expert_{expert}.", weight, shape[1:])
        if weight.startswith("wo"):
            value *= np.float32(self._expert_scale)  # in place: those of the largest model have 51 GB
        return value

    def _projection(self, owner: str, weight: str, shape: tuple[int, ...]) -> np.ndarray:
        """A matrix or a bias of a linear layer: `wi` or `wi_bias`, for instance."""
        matrix = weight.removesuffix("_bias")
        tensor = f"{owner}{_PROJECTIONS[matrix]}"
        if matrix != weight:
            return self._get(f"{tensor}.bias", (int(np.prod(shape)),)).reshape(shape)
        # `output` contracts over heads and their elements, the others over the first dimension.
        fan_in = int(np.prod(shape[:-1] if weight == "output" else shape[:1]))
        return self._get(f"{tensor}.weight", (int(np.prod(shape)) // fan_in, fan_in)).T.reshape(shape)

    def _tensor(self, tensor: str, path: str, shape: tuple[int, ...]) -> np.ndarray:
        """A part of a normalisation: `norm/scale` or `norm/bias`."""
        return self._get(f"{tensor}.{'weight' if path.endswith('scale') else 'bias'}", shape)

    def _get(self, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        self._read.add(tensor)
        return self._tensors.read(tensor, tuple(shape))
