"""What every layer shares: weights by declaration, computation by call, and the context of a call.

A layer is a frozen dataclass whose fields are its hyperparameters. `weights()` declares what it owns as a tree of `Weight`;
`__call__(theta, ..., context)` computes with the tree of tensors it is handed. Nothing is hidden in the object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from lingvo_moe import tree
from lingvo_moe.layers import random_numbers
from lingvo_moe.layers.random_numbers import fold_seed
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import Layout

# Leading dimensions over which a weight holds many independent matrices: repeated layers and experts.
BATCH_AXES = "RE"

# On a CPU: how many rows times an expert's matrix are few (measured: at 32 a third is gained, at 64 nothing), and the side of
# the tiles in which they are transposed.
FEW_ROWS, TILE = 32, 8


@dataclasses.dataclass(frozen=True)
class Weight:
    """The declaration of one weight: shape, letters and initial distribution.

    Attributes:
      shape: sizes, one per letter.
      letters: the dimensions' names, which decide the sharding (see `layout`).
      fan_in: the letters that the layer contracts over. They are the rows of the weight's matrix; the other letters, but for
        the leading `R` and `E`, are its columns. Empty for vectors: scales and biases.
      stddev: of the initial value, which is distributed uniformly about `mean`; 0 means that every element is `mean`.
      mean: of the initial value.
      wide: whether layers compute with it in float32 even where activations are bfloat16, so that its gradient has more digits
        than bfloat16 holds.
    """

    shape: tuple[int, ...]
    logical_axes: str
    fan_in: str = ""
    stddev: float = 0.0
    mean: float = 0.0
    wide: bool = False

    def __post_init__(self):
        if len(self.shape) != len(self.logical_axes):
            raise ValueError(f"weight {self.logical_axes!r} has shape {self.shape}: one size per letter is needed.")

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> tuple[int, ...]:
        """Dimensions of the matrix's rows: those contracted over."""
        return tuple(d for d, letter in enumerate(self.logical_axes) if letter in self.fan_in)

    @property
    def columns(self) -> tuple[int, ...]:
        """Dimensions of the matrix's columns; of a vector, all dimensions but the batch ones."""
        batch = len(self.logical_axes) - len(self.logical_axes.lstrip(BATCH_AXES))
        return tuple(d for d in range(batch, len(self.logical_axes)) if d not in self.rows)

    def repeated(self, times: int) -> Weight:
        """The same weight for `times` stacked layers."""
        return dataclasses.replace(self, shape=(times, *self.shape), logical_axes="R" + self.logical_axes)


def matrix(logical_axes: str, fan_in: str, gain: float = 1.0, wide: bool = False, **sizes: int) -> Weight:
    """A matrix whose outputs have variance `gain^2` for unit inputs: `matrix("MND", fan_in="M", M=512, N=8, D=64)`."""
    contracted = math.prod(sizes[letter.upper()] for letter in fan_in)
    shape = tuple(sizes[letter.upper()] for letter in logical_axes)
    return Weight(shape, logical_axes, fan_in, stddev=gain / math.sqrt(contracted), wide=wide)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a call knows beside its inputs.

    Attributes:
      layout: where tensors live.
      seed: `[2] int32`, the key of this call's random numbers; None where nothing is random (evaluation, decoding).
      dtype: of activations (`float32` or `bfloat16`). Weights are kept in float32 and cast where they are used.
      keeper: what `keep` calls, or None; see `layers.repeat`.
      place: of this call in the model, as the weights' paths have it: `decoder/layer_0/`.
      meter: what `measure` calls, or None; see `layers.measures`.
      platform: what to be fast on, `cpu`, `gpu` or `tpu`; empty for none in particular. Numbers are equal but for rounding.
    """

    layout: Layout = Layout()
    seed: tf.Tensor | None = None
    dtype: str = "float32"
    checkpoint_policy: Callable[[tf.Tensor, str, str], tf.Tensor] | None = None
    scope: str = ""
    add_summary: Callable[[str, tf.Tensor], None] | None = None
    platform: str = ""

    @property
    def training(self) -> bool:
        """Whether random numbers (dropout, routing) are drawn."""
        return self.seed is not None

    def annotate(self, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """See `Layout.annotate`."""
        return self.layout.annotate(tensor, logical_axes)

    def cast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Casts to the dtype of activations."""
        return tf.cast(tensor, self.dtype)

    def checkpoint_name(self, tensor: tf.Tensor, kind: str, logical_axes: str) -> tf.Tensor:
        """Annotates `tensor`, and marks it as worth its room where layers are rematerialised.

        Args:
          tensor: of which the rest of the layer is a function.
          kind: `output` for what a block returns and what crossed between devices, `hidden` for wider ones.
          letters: of its dimensions.
        """
        tensor = self.annotate(tensor, logical_axes)
        return self.checkpoint_policy(tensor, kind, logical_axes) if self.checkpoint_policy else tensor

    def summarize(self, name: str, compute: Callable[[], dict[str, tf.Tensor]]):
        """Tells the meter, if there is one, the scalars that `compute` returns by name; otherwise it is not called.

        Args:
          name: of what they are measured, within this call's place; empty for the place itself.
          compute: takes nothing; `measures.magnitude` of an activation, for instance.
        """
        if self.add_summary:
            for quantity, value in compute().items():
                self.add_summary("/".join(filter(None, (self.scope.rstrip("/"), name, quantity))), value)

    def named(self, name: str) -> Context:
        """The context of a part of this one, for what is measured there."""
        return dataclasses.replace(self, scope=f"{self.scope}{name}/")

    def fold(self, key: str | int | tf.Tensor) -> Context:
        """A context whose random numbers are independent of this one's, one per layer, one per use; `named` where `key` is."""
        part = self.named(key) if isinstance(key, str) else self
        return dataclasses.replace(part, seed=fold_seed(self.seed, key)) if self.training else part

    def uniform(self, shape: tuple[int, ...], key: str) -> tf.Tensor:
        """Random float32 numbers in [0, 1), a function of the seed and `key` alone: equal on any number of devices."""
        return random_numbers.uniform(fold_seed(self.seed, key), shape)

    def dropout(self, tensor: tf.Tensor, rate: float, key: str, logical_axes: str) -> tf.Tensor:
        """Zeroes elements with probability `rate` and scales the others by 1/(1 - rate), in training only."""
        if not self.training or rate == 0.0:
            return tensor
        keep = self.annotate(self.uniform(tuple(tensor.shape), key), logical_axes) >= rate
        return tf.where(keep, tensor / tf.cast(1.0 - rate, tensor.dtype), tf.zeros((), tensor.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Base of all layers; see the module's docstring."""

    def weights(self) -> dict:
        """The weights this layer owns: a tree with `Weight` leaves."""
        raise NotImplementedError

    def num_weights(self) -> int:
        """How many numbers `weights()` declares."""
        return sum(weight.size for weight in tree.flatten(self.weights()).values())


def project(inputs: tf.Tensor, weight: tf.Tensor, context: Context, contracted: int = 1) -> tf.Tensor:
    """`[..., *K]` times a weight `[*K, *O]`, over as many dimensions K as are contracted: `[..., *O]`, in activations' dtype.

    A TPU lays dimensions out as it likes, and reshaping costs it. For a CPU it is one product of two matrices, and so is its
    gradient by the weight: that of the einsum contracts over all leading dimensions of the inputs, for which XLA transposes both
    factors in memory and takes a kernel half as fast.
    """
    weight = context.cast(weight)
    batch, fan_in, outputs = (
        logical_axes[:count]
        for logical_axes, count in zip(
            ("ABC", "KL", "OP"), (inputs.shape.rank - contracted, contracted, weight.shape.rank - contracted)
        )
    )
    if context.platform != "cpu":
        return tf.einsum(f"{batch}{fan_in},{fan_in}{outputs}->{batch}{outputs}", inputs, weight)
    rows = tf.reshape(inputs, (-1, math.prod(weight.shape[:contracted])))
    products = tf.matmul(rows, tf.reshape(weight, (rows.shape[-1], -1)))
    return tf.reshape(products, (*inputs.shape[: len(batch)], *weight.shape[contracted:]))


def project_by_expert(inputs: tf.Tensor, weights: tf.Tensor, context: Context) -> tf.Tensor:
    """`[E, G, C, K]` times each expert's own matrix of `[E, K, O]`: `[E, G, C, O]`; otherwise as `project`."""
    weights = context.cast(weights)
    if context.platform != "cpu":
        return tf.einsum("EGCK,EKO->EGCO", inputs, weights)
    experts, groups, capacity, fan_in = inputs.shape
    multiply = _multiply_few if groups * capacity <= FEW_ROWS else tf.matmul
    products = multiply(tf.reshape(inputs, (experts, groups * capacity, fan_in)), weights)
    return tf.reshape(products, (experts, groups, capacity, weights.shape[-1]))


def _multiply_few(rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """`tf.matmul` of `[E, C, K]` and `[E, K, O]` for C <= FEW_ROWS, whose gradients transpose the rows and not the weights.

    Left to itself, XLA's CPU compiler multiplies the gradient of few rows by transposed weights, which takes twice as long.
    """

    def multiply(rows, weights):
        def gradient(upstream):
            with tf.name_scope("experts"):  # `tools.benchmarks.profile` finds it by this name
                return _transposed(tf.matmul(weights, _transposed(upstream))), tf.matmul(_transposed(rows), upstream)

        return tf.matmul(rows, weights), gradient

    return tf.custom_gradient(multiply)(rows, weights)


def _transposed(tensor: tf.Tensor) -> tf.Tensor:
    """`[E, A, B]` as `[E, B, A]`, tile by tile: a plain transposition XLA would make a part of the product after it."""
    experts, height, width = tensor.shape
    a, b = math.gcd(height, TILE), math.gcd(width, TILE)
    tiles = tf.transpose(tf.reshape(tensor, (experts, height // a, a, width // b, b)), (0, 3, 4, 1, 2))
    return tf.reshape(tiles, (experts, width, height))


def initial_value(weight: Weight, path: str, seed: tf.Tensor) -> tf.Tensor:
    """The float32 tensor that `weight` starts from: a function of (seed, path), whatever the other weights are."""
    if weight.stddev == 0.0:
        return tf.fill(weight.shape, tf.constant(weight.mean, tf.float32))
    draw = random_numbers.uniform(fold_seed(seed, path), weight.shape) - 0.5
    return weight.mean + draw * (weight.stddev * math.sqrt(12))
