"""The context of a call: what ops and layers know beside their inputs and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lingvo_moe import definitions
from lingvo_moe.lazy import tf
from lingvo_moe.ops import random_numbers
from lingvo_moe.ops.precision import DEFAULT
from lingvo_moe.ops.random_numbers import Rows, fold_seed
from lingvo_moe.sharding.layout import Layout

_SEED = definitions.form_of("int32", (2,))


@dataclasses.dataclass(frozen=True)
class Context:
    """What a call knows beside its inputs.

    Attributes:
      layout: how tensors are sharded.
      seed: `[2] int32`, the key of this call's random numbers; None where nothing is random (evaluation, decoding).
      dtype: of activations (`float32` or `bfloat16`). Weights are stored in float32 and cast where they are used.
      checkpoint_policy: called by `checkpoint_name`, or None outside rematerialised layers; see `layers.repeat`. `ops`
        also reads whether there is one.
      scope: the path of this call in the model, as in the paths of the weights: `decoder/layer_0/`.
      add_summary: called by `summarize`, or None where summaries are off; see `layers.summaries`.
      record_routing: called by layers with experts with (scope, the router's `ops.routing.Routing`), or None. Only
        programs that unroll their layers have one.
      microbatches: into how many parts the batch is divided, of which this call sees one; see `layers.pipeline`.
      rows: those of the microbatch that this call sees; None where it sees all. See `layers.weight_gradients`.
      platform: the platform to be fast on, `cpu`, `gpu` or `tpu`; empty for none in particular. Only `ops` reads it.
        Results are equal up to rounding.
      matmul_precision: of float32 operands of matmuls, see `ops.precision`. Only `ops` reads it.
    """

    layout: Layout = Layout()
    seed: tf.Tensor | None = None
    dtype: str = "float32"
    checkpoint_policy: Callable[[tf.Tensor, str, str], tf.Tensor] | None = None
    scope: str = ""
    add_summary: Callable[[str, tf.Tensor], None] | None = None
    record_routing: Callable[[str, Any], None] | None = None
    microbatches: int = 1
    rows: Rows | None = None
    platform: str = ""
    matmul_precision: str = DEFAULT

    def __post_init__(self):
        if self.seed is not None:
            definitions.check_form("the seed of a context", self.seed, _SEED)

    @property
    def training(self) -> bool:
        """Whether random numbers (dropout, routing) are drawn."""
        return self.seed is not None

    @property
    def is_one_cpu(self) -> bool:
        """Whether the program is optimised for one CPU device."""
        return self.platform == "cpu" and self.layout.is_one_device

    def in_dtype(self, dtype: str) -> Context:
        """Returns the context of a call whose activations have this dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def annotate(self, tensor: tf.Tensor, logical_axes: str) -> tf.Tensor:
        """Adds a sharding constraint; see `Layout.annotate`."""
        return self.layout.annotate(tensor, logical_axes)

    def cast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Casts to the dtype of activations."""
        return tf.cast(tensor, self.dtype)

    def checkpoint_name(self, tensor: tf.Tensor, name: str, logical_axes: str) -> tf.Tensor:
        """Annotates `tensor` and names it for the checkpoint policy of rematerialised layers.

        Args:
          tensor: a tensor that the rest of the layer is a function of.
          name: `output` for the output of a sublayer and for tensors that crossed devices, `hidden` for wider tensors.
          logical_axes: of its dimensions.

        Returns:
          `tensor`, or in the backward pass the value saved by the forward pass.
        """
        tensor = self.annotate(tensor, logical_axes)
        return self.checkpoint_policy(tensor, name, logical_axes) if self.checkpoint_policy else tensor

    def summarize(self, name: str, compute: Callable[[], dict[str, tf.Tensor]]):
        """Adds the scalars returned by `compute` to the summaries; does not call it where summaries are off.

        Args:
          name: of the summarised tensor, within this call's scope; empty for the scope itself.
          compute: takes nothing and returns scalars by name, for instance `summaries.magnitude` of an activation.
        """
        if self.add_summary:
            for quantity, value in compute().items():
                self.add_summary("/".join(filter(None, (self.scope.rstrip("/"), name, quantity))), value)

    def named(self, name: str) -> Context:
        """Returns the context with `name` appended to the scope."""
        return dataclasses.replace(self, scope=f"{self.scope}{name}/")

    def fold(self, key: str | int | tf.Tensor) -> Context:
        """Returns a context for one layer or one use, with random numbers of its own.

        A string is also appended to the scope.
        """
        part = self.named(key) if isinstance(key, str) else self
        return part if self.seed is None else dataclasses.replace(part, seed=fold_seed(self.seed, key))

    def uniform(self, shape: tuple[int, ...], key: str) -> tf.Tensor:
        """Returns random float32 numbers in [0, 1), a function of the seed and `key` alone: equal on any mesh.

        Where the call sees some of the rows, the first dimension is theirs.

        Raises:
          ValueError: a context without a seed, as all but those of training are.
        """
        if self.seed is None:
            raise ValueError(f"{self.scope}{key}: random numbers need a seed; only contexts of training have one.")
        return random_numbers.uniform(fold_seed(self.seed, key), shape, self.rows)

    def dropout(self, tensor: tf.Tensor, rate: float, key: str, logical_axes: str) -> tf.Tensor:
        """Zeroes elements with probability `rate` and scales the others by 1/(1 - rate), in training only.

        Computes in float32: in bfloat16, 1 - 0.1 is 0.898. With the cast at the end, XLA's program for a TPU is faster.
        """
        if not self.training or rate == 0.0:
            return tensor
        mask = self.annotate(self.uniform(tuple(tensor.shape), key), logical_axes) >= rate
        return tf.cast(tf.where(mask, tf.cast(tensor, tf.float32) / (1.0 - rate), 0.0), tensor.dtype)
