"""What every layer shares: weights by declaration and computation by call.

A layer is a frozen dataclass whose fields are its hyperparameters. `weights()` declares its weights as a tree of
`Weight`; `__call__(theta, ..., context)` computes with the tree of tensors that it is given. The object holds no state.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import cast

from lingvo_moe import definitions, tree
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops import random_numbers
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.random_numbers import fold_seed
from lingvo_moe.sharding.layout import check_logical_axes

# `Context` is here too, so that the file of a layer imports all that layers share from one module.
__all__ = ["Context", "Layer", "Weight", "check_weights", "initial_value", "matrix"]

# Leading dimensions over which a weight holds many independent matrices: repeated layers and experts.
BATCH_AXES = "RrE"


@dataclasses.dataclass(frozen=True)
class Weight:
    """The declaration of one weight: shape, logical axes and initial distribution.

    Attributes:
      shape: sizes, one per logical axis.
      logical_axes: the names of the dimensions, one letter each, which decide the sharding (see `sharding.layout`).
      fan_in: the axes that the layer contracts over, of an embedding's table V. They are the rows of the weight's
        matrix; the other axes, except the leading `R` and `E`, are its columns. Empty for vectors: scales and biases.
      stddev: of the initial value, which is distributed uniformly about `mean`; 0 means that every element is `mean`.
      mean: of the initial value.
      twin: the name of a weight of the same layer and shape that has the same initial value; empty for none.
      keep_float32: whether layers compute with it in float32 even where activations are bfloat16, so that its gradient
        has float32 precision.
    """

    shape: tuple[int, ...]
    logical_axes: str
    fan_in: str = ""
    stddev: float = 0.0
    mean: float = 0.0
    twin: str = ""
    keep_float32: bool = False

    def __post_init__(self):
        if len(self.shape) != len(self.logical_axes):
            raise ValueError(
                f"weight {self.logical_axes!r} has shape {self.shape}: one size per logical axis is needed."
            )

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> tuple[int, ...]:
        """The dimensions of the matrix's rows: those contracted over."""
        return tuple(d for d, axis in enumerate(self.logical_axes) if axis in self.fan_in)

    @property
    def columns(self) -> tuple[int, ...]:
        """The dimensions of the matrix's columns; of a vector, all dimensions except the batch ones."""
        batch = len(self.logical_axes) - len(self.logical_axes.lstrip(BATCH_AXES))
        return tuple(d for d in range(batch, len(self.logical_axes)) if d not in self.rows)

    def repeated(self, times: int, axis: str = "R") -> Weight:
        """The same weight for `times` stacked layers, with the logical axis R, or r if they are never sharded."""
        return dataclasses.replace(self, shape=(times, *self.shape), logical_axes=axis + self.logical_axes)

    def zeros(self, without: tuple[int, ...] = ()) -> Weight:
        """State of an optimizer that starts at zero: of this shape and these logical axes, `without` some dimensions.

        So the layout shards it as it shards the weight.
        """
        dims = [d for d in range(len(self.shape)) if d not in without]
        return Weight(tuple(self.shape[d] for d in dims), "".join(self.logical_axes[d] for d in dims))

    @property
    def is_repeated(self) -> bool:
        """Whether the weight is that of stacked layers."""
        return self.logical_axes[:1] in ("R", "r")


def matrix(logical_axes: str, fan_in: str, gain: float = 1.0, **sizes: int) -> Weight:
    """A matrix whose outputs have variance `gain^2` for unit inputs: `matrix("MH", fan_in="M", M=512, H=2048)`."""
    contracted = math.prod(sizes[axis.upper()] for axis in fan_in)
    shape = tuple(sizes[axis.upper()] for axis in logical_axes)
    return Weight(shape, logical_axes, fan_in, stddev=gain / math.sqrt(contracted))


def check_weights(what: str, weights: object):
    """Raises UserError, which begins with `what`, unless `weights` is a tree of `Weight`s with known logical axes."""
    definitions.check_type(f"{what}: the tree of weights", weights, dict)
    for path, weight in tree.flatten(cast(dict, weights)).items():
        definitions.check_type(f"{what}: weight {path}", weight, Weight)
        try:
            check_logical_axes(weight.logical_axes)
        except ValueError as error:
            raise UserError(f"{what}: weight {path}: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Base of all layers; see the module's docstring."""

    @abc.abstractmethod
    def weights(self) -> dict:
        """The weights of this layer: a tree with `Weight` leaves."""
        raise NotImplementedError

    def num_weights(self) -> int:
        """The number of elements that `weights()` declares."""
        return sum(weight.size for weight in tree.flatten(self.weights()).values())

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The scalar metrics that a call returns by name; see `layers.feed_forward`."""
        return ()

    @property
    def is_causal(self) -> bool:
        """Whether the output at a position depends on no later position. Decoders need causal feed-forward layers."""
        return True

    @property
    def independent_rows(self) -> bool:
        """Whether each row of a batch is computed by itself, and the first dimension of random numbers is the rows.

        A pipeline's devices may then differentiate their rows separately, see `layers.weight_gradients`.
        """
        return False

    @property
    def independent_in_inference(self) -> bool:
        """Whether, outside of training, a token's output depends on no other token of the batch but for rounding.

        A search then need not compute the sentences that it has finished.
        """
        return False

    @property
    def experts_per_token(self) -> float:
        """How many of the experts, of weights with the axis E, compute a token; to count operations."""
        return 1.0

    @property
    def registered_classes(self) -> tuple[type, ...]:
        """The classes that the layer's fields name: its programs depend on their source."""
        return ()

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """Returns weights, stacked for R layers, in the form that decoding steps take.

        What each step would slice or transpose is sliced or transposed once.
        """
        del context
        return theta


def initial_value(weight: Weight, path: str, seed: tf.Tensor) -> tf.Tensor:
    """The initial float32 tensor of `weight`: a function of (seed, path), independent of the other weights.

    A weight with a twin has the value of the twin's path.
    """
    if weight.twin:
        path = f"{path.rpartition('/')[0]}/{weight.twin}"
    if weight.stddev == 0.0:
        return tf.fill(weight.shape, tf.constant(weight.mean, tf.float32))
    draw = random_numbers.uniform(fold_seed(seed, path), weight.shape) - 0.5
    return weight.mean + draw * (weight.stddev * math.sqrt(12))
