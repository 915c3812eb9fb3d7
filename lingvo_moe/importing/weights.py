"""The weights of models in Hugging Face's format, as those of `models.translation.Translation`.

A linear layer of PyTorch has `[outputs, inputs]` where ours has `[inputs, outputs]`, and each layer has tensors of its
own where ours are stacked. `Places` says which tensor holds what, for `read` and for `export`, which writes them.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import DTypeLike

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.importing.model_directory import CONFIG, Tensors
from lingvo_moe.models.translation import Translation
from lingvo_moe.steps import weight_specs
from lingvo_moe.utils import progress
from lingvo_moe.utils.counts import counted

_NO_TOKEN = -30.0  # the bias of the logit of an id that their model lacks: one that is never likely
# A model with more than this many times the weights of the files is refused before memory is allocated for it.
_MOST_TIMES = 8


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor of the files, and the part of one of our weights that has the same values.

    Attributes:
      tensor: its name.
      shape: its shape.
      index: of the part: that of the repeat, and that of the expert, where the weight is of several.
      scale: what multiplies the tensor's values to make ours.
      rows: of a table of embeddings, or of the values for all tokens: for each of ours, the row there, or -1 for none,
        where ours are `_NO_TOKEN` (a bias of logits; models without one have `excluded_ids`). None for what is not by
        token.
      is_transposed: whether it is a matrix `[outputs, inputs]`, of a linear layer, and ours `[inputs, outputs]`.
    """

    tensor: str
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()
    scale: float = 1.0
    rows: np.ndarray | None = None
    is_transposed: bool = True

    def to_ours(self, tensor: np.ndarray, weight: np.ndarray):
        """Copies a tensor of `shape` to its part of our weight."""
        part = weight[self.index]
        if self.rows is None:
            part[:] = (tensor.T if self.is_transposed else tensor).reshape(part.shape)
        else:
            rows = part.T if self.is_transposed else part
            # Without a copy of the table; -1 is its last row, until the next line.
            np.take(tensor.reshape(-1, *rows.shape[1:]), self.rows, axis=0, out=rows, mode="wrap")
            rows[self.rows < 0] = _NO_TOKEN
        if self.scale != 1.0:
            part *= np.float32(self.scale)

    def from_ours(self, weight: np.ndarray, dtype: DTypeLike) -> np.ndarray:
        """Returns the tensor of `shape` of our weight, a copy."""
        part = weight[self.index]
        if self.scale != 1.0:
            part = part / np.float32(self.scale)
        if self.rows is None:
            values = part.reshape(self.shape[::-1]).T if self.is_transposed else part.reshape(self.shape)
            return np.array(values, dtype, order="C")
        rows, there = part.T if self.is_transposed else part, self.rows >= 0
        tensor = np.empty(self.shape, dtype).reshape(-1, *rows.shape[1:])
        tensor[self.rows[there]] = rows[there]  # of two rows for one, as of Marian's padding and our bos, the later one
        return tensor.reshape(self.shape)


class Places(abc.ABC):
    """Where the files have the weights of a model.

    Attributes:
      model: whose weights they are.
      rows: of the table of embeddings there, in the order of our ids.
      specs: those of our weights, by path.
      copies: other names by which files may have a tensor, alone or besides its own.
      ignored: names of tensors that are not read, as they can be computed.
    """

    copies: Mapping[str, tuple[str, ...]] = {}
    ignored: tuple[str, ...] = ()

    def __init__(self, model: Translation, rows: np.ndarray):
        """Takes the attributes."""
        self.model, self.rows = model, rows
        self.specs = tree.flatten(weight_specs(model.weights()))

    @abc.abstractmethod
    def of(self, path: str) -> Iterator[Place]:
        """Yields the places of the parts of a weight, in their order; all together are the whole weight."""

    @property
    def vocabulary(self) -> int:
        """The number of rows of their table."""
        return int(self.rows.max()) + 1

    def layers_of(self, stack: str, layer: str) -> range:
        """Returns the numbers, within a stack, of the layer `layer_0`, for instance, of each repeat."""
        pattern_length, first = len(self.model.layer_patterns[stack]), int(layer.removeprefix("layer_"))
        return range(first, self.model.stack_layers[stack], pattern_length)


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
    known |= {copy for copies in places.copies.values() for copy in copies}
    if unknown := sorted(tensors.shapes.keys() - known - set(places.ignored)):
        raise UserError(
            f"{name}: a model with this {CONFIG} has no tensor {unknown[0]!r}, and the files have "
            f"{counted(len(unknown), 'such tensor')}; expected one of the types of models that can "
            f"be imported, as Hugging Face's library writes it."
        )
    return theta


def _read_weight(places: Places, path: str, tensors: Tensors) -> np.ndarray:
    weight = np.empty(places.specs[path].shape, np.float32)
    for place in places.of(path):
        names = (place.tensor, *places.copies.get(place.tensor, ()))
        there = [name for name in names if name in tensors.shapes]
        place.to_ours(tensors.read(there[0] if there else place.tensor, place.shape), weight)
    return weight
