"""The weights of translators in Hugging Face's format, as those of `models.translation.Translation`.

A linear layer of PyTorch has `[outputs, inputs]` where ours has `[inputs, outputs]`, and each layer has tensors of its
own where ours are stacked. In inference, Hugging Face multiplies the outputs of experts by 1 - moe_token_dropout. Here
that is a part of their weights. `Places` says which tensor holds what, for `read` and for `export`, which writes them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.importing.model_directory import CONFIG, Tensors
from lingvo_moe.models.translation import Translation
from lingvo_moe.steps import weight_specs
from lingvo_moe.utils import progress
from lingvo_moe.utils.counts import counted

_SHARED = "model.shared.weight"
# Copies of the shared table, which some versions write, also in its place, and the table of sinusoids.
_COPIES = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
_SINUSOIDS = tuple(
    f"model.{side}.embed_positions.{of}" for side in ("encoder", "decoder") for of in ("weight", "weights")
)
_IGNORED = (*_COPIES, *_SINUSOIDS)
_LOGITS_BIAS = "final_logits_bias"
_NO_TOKEN = -30.0  # the bias of the logit of an id that their model lacks: one that is never likely
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj", "wi": "fc1", "wo": "fc2"}
_NORM = {"norm/scale": "weight", "norm/bias": "bias"}
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


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor of the files, and the part of one of our weights that has the same values.

    Attributes:
      tensor: its name.
      shape: its shape; of a matrix `[outputs, inputs]`.
      index: of the part: that of the repeat, and that of the expert, where the weight is of several.
      scale: what multiplies the tensor's values to make ours.
      rows: of a table of embeddings, or of the values for all tokens: for each of ours, the row there, or -1 for none,
        where ours are `_NO_TOKEN`. None for what is not by token.
    """

    tensor: str
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()
    scale: float = 1.0
    rows: np.ndarray | None = None

    def to_ours(self, tensor: np.ndarray, weight: np.ndarray):
        """Copies a tensor of `shape` to its part of our weight."""
        part = weight[self.index]
        if self.rows is None:
            part[:] = tensor.T.reshape(part.shape)
        else:
            # Without a copy of the table; -1 is its last row, until the next line.
            np.take(tensor.reshape(-1, *part.shape[1:]), self.rows, axis=0, out=part, mode="wrap")
            part[self.rows < 0] = _NO_TOKEN
        if self.scale != 1.0:
            part *= np.float32(self.scale)

    def from_ours(self, weight: np.ndarray, dtype: DTypeLike) -> np.ndarray:
        """Returns the tensor of `shape` of our weight, a copy."""
        part = weight[self.index]
        if self.scale != 1.0:
            part = part / np.float32(self.scale)
        if self.rows is None:
            return np.array(part.reshape(self.shape[::-1]).T, dtype, order="C")
        there = self.rows >= 0
        tensor = np.empty(self.shape, dtype).reshape(-1, *part.shape[1:])
        tensor[self.rows[there]] = part[there]  # of two rows for one, as of Marian's padding and our bos, the later one
        return tensor.reshape(self.shape)


class Places:
    """Where the files have the weights of a model.

    Attributes:
      specs: those of our weights, by path.
    """

    def __init__(self, model: Translation, names: Names, rows: np.ndarray, expert_scale: float):
        """Makes the places of a model.

        Args:
          model: whose weights they are.
          names: of the parts of a layer.
          rows: of the table of embeddings there, in the order of our ids.
          expert_scale: which multiplies the outputs of experts.
        """
        self._rows, self._vocabulary = rows, int(rows.max()) + 1
        self.specs = tree.flatten(weight_specs(model.weights()))
        self._model, self._names, self._expert_scale = model, names, expert_scale

    def of(self, path: str) -> Iterator[Place]:
        """Yields the places of the parts of a weight, in their order; all together are the whole weight."""
        shape = self.specs[path].shape
        stack, _, rest = path.partition("/")
        if stack == "embedding":
            yield Place(_SHARED, (self._vocabulary, *shape[1:]), rows=self._rows)
        elif stack == "softmax":
            yield Place(_LOGITS_BIAS, (1, self._vocabulary), rows=_without_repeated(self._rows))
        elif rest in _NORM:
            yield Place(f"model.{stack}.layer_norm.{_NORM[rest]}", shape)
        else:
            layer, _, of_layer = rest.partition("/")
            has_experts = f"{stack}/{layer}/feed_forward/gate" in self.specs
            period, first = len(self._model.layer_patterns[stack]), int(layer.removeprefix("layer_"))
            for repeat in range(shape[0]):
                prefix = f"model.{stack}.layers.{repeat * period + first}"
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


def read(places: Places, tensors: Tensors, name: str) -> dict[str, np.ndarray]:
    """Returns the weights by path, in float32.

    Args:
      places: of the weights.
      tensors: of the directory.
      name: what messages call the directory.

    Raises:
      UserError: a tensor is missing, has another shape, or is of something that our model does not have.
    """
    count = sum(math.prod(spec.shape) for spec in places.specs.values())
    if count > _MOST_TIMES * tensors.size:  # a smaller difference is that of a tensor, which is named below
        raise UserError(
            f"{name}: by {CONFIG}, the model has {count:,} weights, but the files of weights have only "
            f"{tensors.size:,}; copy the files again."
        )
    theta = {
        path: _read_weight(places, path, tensors) for path in progress.track(places.specs, "reading", unit="arrays")
    }
    known = {place.tensor for path in theta for place in places.of(path)}
    if unknown := sorted(tensors.shapes.keys() - known - set(_IGNORED)):
        raise UserError(
            f"{name}: a model with this {CONFIG} has no tensor {unknown[0]!r}, and the files have "
            f"{counted(len(unknown), 'such tensor')}; expected one of the types of models that can "
            f"be imported, as Hugging Face's library writes it."
        )
    return theta


def _read_weight(places: Places, path: str, tensors: Tensors) -> np.ndarray:
    weight = np.empty(places.specs[path].shape, np.float32)
    for place in places.of(path):
        names = (place.tensor, *_COPIES) if place.tensor == _SHARED else (place.tensor,)
        there = [name for name in names if name in tensors.shapes]
        place.to_ours(tensors.read(there[0] if there else place.tensor, place.shape), weight)
    return weight
