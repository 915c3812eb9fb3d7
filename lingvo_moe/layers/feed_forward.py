"""The interface of feed-forward layers, their registry, and the dense position-wise layer.

A layer of your own in the place of the feed-forward layer is one file, loaded with `--import=my_layer.py` and chosen
with `--set model.layer_pattern=dense,NAME`:

    @register_feed_forward("mine")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class MyLayer(Layer):
        model_dim: int        # fields with the name of a model's field have its value
        scale: float = 1.0    # `NAME:scale=2` sets the others
        ...
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lingvo_moe import definitions, ranges
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.extensions import Registry
from lingvo_moe.layers.base import Context, Layer, Weight, check_weights, matrix
from lingvo_moe.lazy import tf
from lingvo_moe.ops.activation import relu
from lingvo_moe.ops.projection import prepare_weight, project
from lingvo_moe.ranges import COUNT
from lingvo_moe.utils import extension_choice


class FeedForward(Protocol):
    """What a Transformer layer needs of its feed-forward layer; `Layer` has defaults for all but two methods.

    Metrics are scalars by name. Those of a stack are means over the layers that declare them. The metric `aux_loss` is
    an auxiliary loss: the model adds its mean, times `aux_loss_weight`, to its loss. Summaries need no declaration: see
    `Context.summarize`.
    """

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics that a call returns."""
        ...

    @property
    def is_causal(self) -> bool:
        """Whether the output at a position depends on no later position.

        Decoders refuse other layers, for they compute one position at a time.
        """
        ...

    @property
    def independent_rows(self) -> bool:
        """See `Layer.independent_rows`."""
        ...

    @property
    def independent_in_inference(self) -> bool:
        """See `Layer.independent_in_inference`."""
        ...

    @property
    def experts_per_token(self) -> float:
        """See `Layer.experts_per_token`."""
        ...

    @property
    def registered_classes(self) -> tuple[type, ...]:
        """See `Layer.registered_classes`."""
        ...

    def weights(self) -> dict:
        """The tree of `Weight`s; `norm` is the enclosing layer's."""
        ...

    def __call__(
        self, theta: dict, inputs: tf.Tensor, paddings: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Computes the layer.

        Args:
          theta: tensors for `weights()`.
          inputs: `[B, T, M]`, normalised; the enclosing layer adds the residual connection.
          paddings: `[B, T] bool`, true where there is no token.
          context: of the call.

        Returns:
          (`[B, T, M]`, metrics: scalar float32 tensors).
        """
        ...

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """See `Layer.prepare_decoding`."""
        ...


_ACTIVATIONS = ("relu", "swish", "gelu")
FEED_FORWARDS: Registry[type[FeedForward]] = Registry(
    "feed-forward layer", check=lambda what, cls: definitions.check_dataclass(what, cls, FeedForward)
)


def register_feed_forward(name: str) -> Callable[[type], type]:
    """Class decorator: registers a frozen dataclass that implements `FeedForward` under `name`.

    Raises:
      UserError: the name is missing, malformed or taken; or the class is no frozen dataclass, lacks something of
        `FeedForward`, or has a method that cannot be called as `FeedForward` says.
    """
    return FEED_FORWARDS.decorator("register_feed_forward", name)


def make_feed_forward(choice: str, fields: Mapping[str, Any]) -> FeedForward:
    """Makes a layer from `NAME` or `NAME:field=value:...`.

    Args:
      choice: of a registered layer.
      fields: of the model, by name; the layer takes those that it declares.

    Raises:
      UserError: an unknown name or field, or a value that the layer refuses.
    """
    return extension_choice.make(FEED_FORWARDS, choice, fields)


def call_feed_forward(
    layer: FeedForward, theta: dict, inputs: tf.Tensor, paddings: tf.Tensor, context: Context
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Calls a layer, see `FeedForward.__call__`.

    Raises:
      UserError: it did not return a pair, the metrics are not those of `metric_names`, or the outputs do not have the
        shape and dtype of the inputs.
    """
    label = FEED_FORWARDS.label(type(layer))
    with definitions.named(lambda: f"{label} in {context.scope.rstrip('/')}", layer):
        result = layer(theta, inputs, paddings, context)
        definitions.check_pair(label, result, "outputs, metrics")
        outputs, metrics = result
        extension_choice.check_metrics(FEED_FORWARDS, layer, metrics)
        is_like_inputs = tf.is_tensor(outputs) and outputs.shape.is_compatible_with(inputs.shape)
        if not is_like_inputs or outputs.dtype != inputs.dtype:
            expected = definitions.form(inputs)
            definitions.check_form(f"{label}: the output of a call, [B, T, M] as its input,", outputs, expected)
        return outputs, metrics


def feed_forward_weights(layer: FeedForward) -> dict:
    """Returns the tree of `Weight`s of a layer.

    Raises:
      UserError: `weights()` returns no tree of `Weight`s, a weight has an unknown logical axis, or is named as the
        enclosing layer's `norm`.
    """
    label = FEED_FORWARDS.label(type(layer))
    with definitions.named(lambda: label, layer):
        weights = layer.weights()
        check_weights(label, weights)
        if "norm" in weights:
            raise UserError(f"{label}: the enclosing layer has a weight named norm; choose another name.")
        return weights


@register_feed_forward("dense")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseFeedForward(Layer):
    """`wo . relu(wi . x)` (GShard section 2.2, equation 2's FFN_e for a single expert).

    Gated, it is `wo . (activation(wi . x) * (wi_linear . x))`, of which Shazeer 2020 calls that with gelu GEGLU. The
    third matrix is as large as the others, so that Shazeer's layers have two thirds of the hidden dimension.

    Attributes:
      model_dim: M.
      hidden_dim: H.
      activation: `relu`; `swish`, x sigmoid(x), as in the Conformer; or `gelu` in the approximation by tanh (Hendrycks
        and Gimpel 2016), as in T5 v1.1.
      gated: whether the activations are multiplied by a linear projection of the inputs.
      biases: whether the projections have a bias.
    """

    model_dim: int
    hidden_dim: int
    activation: str = "relu"
    gated: bool = False
    biases: bool = False

    def __post_init__(self):
        ranges.check("layer dense: ", self, {"model_dim": COUNT, "hidden_dim": COUNT})
        if self.activation not in _ACTIVATIONS:
            raise UserError(
                f"layer dense: activation is {self.activation!r}; use one of {', '.join(_ACTIVATIONS)}."
                f"{did_you_mean(self.activation, _ACTIVATIONS)}"
            )

    @property
    def independent_rows(self) -> bool:
        """See `Layer.independent_rows`."""
        return True

    @property
    def independent_in_inference(self) -> bool:
        """See `Layer.independent_in_inference`."""
        return True

    def weights(self) -> dict:
        """See `Layer.weights`."""
        sizes = {"M": self.model_dim, "H": self.hidden_dim}
        inputs = dict.fromkeys(self._input_names, matrix("MH", fan_in="M", **sizes))
        matrices = {**inputs, "wo": matrix("HM", fan_in="H", **sizes)}
        biases = {f"{name}_bias": Weight((self.hidden_dim,), "H") for name in inputs}
        biases["wo_bias"] = Weight((self.model_dim,), "M")
        return {**matrices, **biases} if self.biases else matrices

    def __call__(
        self, theta: dict, inputs: tf.Tensor, paddings: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """`[B, T, M]` to (`[B, T, M]`, no metrics); see `FeedForward`."""
        del paddings  # each position is computed by itself
        hidden = self._activated(project(inputs, theta["wi"], context, bias=theta.get("wi_bias")), context)
        if self.gated:
            linear = project(inputs, theta["wi_linear"], context, bias=theta.get("wi_linear_bias"))
            hidden *= context.checkpoint_name(linear, "hidden", "BTH")
        outputs = project(hidden, theta["wo"], context, bias=theta.get("wo_bias"))
        return context.checkpoint_name(outputs, "output", "BTM"), {}

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """See `Layer.prepare_decoding`."""
        return {**theta, **{name: prepare_weight(theta[name], context) for name in (*self._input_names, "wo")}}

    @property
    def _input_names(self) -> tuple[str, ...]:
        """The matrices that multiply the inputs."""
        return ("wi", "wi_linear") if self.gated else ("wi",)

    def _activated(self, hidden: tf.Tensor, context: Context) -> tf.Tensor:
        """The activations of `[B, T, H]`, which are named for the checkpoint policy."""
        if self.activation == "relu":
            return relu(hidden, "BTH", context)
        hidden = context.checkpoint_name(hidden, "hidden", "BTH")
        return hidden * (tf.sigmoid(hidden) if self.activation == "swish" else _gelu_gate(hidden))


def _gelu_gate(inputs: tf.Tensor) -> tf.Tensor:
    """What GELU multiplies an input by: about the probability that a normal variable is smaller."""
    return 0.5 * (1.0 + tf.tanh(math.sqrt(2.0 / math.pi) * inputs * (1.0 + 0.044715 * tf.square(inputs))))
