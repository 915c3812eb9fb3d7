"""What the encoder-decoder and the decoder-only Transformer share: dimensions, stacks of layers, and the loss."""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.layers.attention import MultiHeadAttention
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.layers.dispatch import AUTO, check_dispatch
from lingvo_moe.layers.embedding import Embedding, Softmax, cross_entropy
from lingvo_moe.layers.feed_forward import FeedForward
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.layers.repeat import REMAT
from lingvo_moe.layers.summaries import magnitude
from lingvo_moe.layers.transformer import TransformerLayer, TransformerStack
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer(Layer):
    """The fields of both kinds of models.

    Attributes:
      num_layers: L, of all stacks together.
      model_dim, hidden_dim: M, and H of the dense feed-forward layers and of each expert.
      num_heads, head_dim: of attention.
      num_experts: E of every other feed-forward layer; 0 makes all of them dense.
      num_groups: G, of each side's tokens; a multiple of the devices along the batch (GShard: twice their number).
      capacity_factor, inference_capacity_factor, dispatch: see `MixtureOfExperts`.
      aux_loss_weight: k in loss = cross-entropy + k * l_aux (GShard section 2.2).
      input_dropout, residual_dropout, attention_dropout: rates (GShard appendix A.2).
      label_smoothing: of the optimised loss; the reported one is without.
      activation_dtype: `float32` or `bfloat16`; weights are float32.
      unroll, remat: how repeated layers are computed, see `layers.repeat`.
    """

    num_layers: int
    model_dim: int
    hidden_dim: int
    num_heads: int
    head_dim: int
    num_experts: int = 0
    num_groups: int = 1
    capacity_factor: float = 2.0
    inference_capacity_factor: float | None = None
    dispatch: str = AUTO
    aux_loss_weight: float = 0.01
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    label_smoothing: float = 0.0
    activation_dtype: str = "float32"
    unroll: bool = False
    remat: str = "none"

    # Which sides of the corpus the model reads; each has a stack of its own, with as many layers.
    sides = ()

    def __post_init__(self):
        if self.num_layers < self.layers_per_repeat or self.num_layers % self.layers_per_repeat:
            halves = "half of the layers are the encoder's, " if len(self.sides) == 2 else ""
            raise UserError(
                f"num_layers is {self.num_layers}; {halves}every other one has experts (num_experts="
                f"{self.num_experts}), so it must be a multiple of {self.layers_per_repeat}."
            )
        if self.num_experts == 1:
            raise UserError("num_experts is 1; top-2 gating needs at least 2 experts, 0 makes a dense model.")
        if self.activation_dtype not in ("float32", "bfloat16"):
            raise UserError(f"activation_dtype is {self.activation_dtype!r}; use float32 or bfloat16.")
        check_dispatch(self.dispatch)
        if self.remat not in REMAT:
            raise UserError(f"remat is {self.remat!r}; use one of {', '.join(REMAT)}.{did_you_mean(self.remat, REMAT)}")
        if self.unroll and self.remat != "none":
            raise UserError(
                "unroll and remat exclude each other: rematerialisation needs the loop. Set remat=none or unroll=false."
            )

    @property
    def layers_per_repeat(self) -> int:
        """The layers that are repeated, of all stacks: a dense one and, with experts, one that has them, for each side."""
        return len(self.sides) * (2 if self.num_experts else 1)

    def weights(self) -> dict:
        return {name: layer.weights() for name, layer in self._layers.items()}

    @property
    def _layers(self) -> dict:
        """The layers by name."""
        raise NotImplementedError

    def _embed(self, name: str, theta: dict, side: dict, context: Context) -> tf.Tensor:
        embedded = self._layers[name](theta[name], side["ids"], side["positions"], context)
        context.summarize(name, lambda: magnitude(embedded))
        return context.dropout(embedded, self.input_dropout, name, "BTM")

    def _total(self, logits: tf.Tensor, target: dict, *stack_metrics: dict) -> tuple[tf.Tensor, dict]:
        """(cross-entropy + k * l_aux, metrics) of `logits [B, T, V]`; the experts' metrics are averaged over stacks."""
        nll, smoothed = cross_entropy(logits, target["labels"], self.label_smoothing)
        present = tf.cast(tf.not_equal(target["segment_ids"], 0), tf.float32)
        tokens = tf.reduce_sum(present)
        metrics = {"cross_entropy": tf.math.divide_no_nan(tf.reduce_sum(nll * present), tokens), "tokens": tokens}
        for name in stack_metrics[0]:
            metrics[name] = tf.add_n([of_stack[name] for of_stack in stack_metrics]) / len(stack_metrics)
        loss = tf.math.divide_no_nan(tf.reduce_sum(smoothed * present), tokens)
        return loss + self.aux_loss_weight * metrics.get("aux_loss", 0.0), metrics

    def _embedding(self, vocabulary: int) -> Embedding:
        return Embedding(vocabulary=vocabulary, model_dim=self.model_dim)

    def _softmax(self, vocabulary: int) -> Softmax:
        return Softmax(vocabulary=vocabulary, model_dim=self.model_dim)

    def _stack(self, has_cross_attention: bool) -> TransformerStack:
        attention = MultiHeadAttention(
            model_dim=self.model_dim, num_heads=self.num_heads, head_dim=self.head_dim, dropout=self.attention_dropout
        )
        feed_forwards = [FeedForward(model_dim=self.model_dim, hidden_dim=self.hidden_dim)]
        if self.num_experts:
            feed_forwards.append(
                MixtureOfExperts(
                    model_dim=self.model_dim,
                    hidden_dim=self.hidden_dim,
                    num_experts=self.num_experts,
                    num_groups=self.num_groups,
                    capacity_factor=self.capacity_factor,
                    inference_capacity_factor=self.inference_capacity_factor,
                    dispatch=self.dispatch,
                )
            )
        period = tuple(
            TransformerLayer(
                attention=attention,
                feed_forward=feed_forward,
                residual_dropout=self.residual_dropout,
                has_cross_attention=has_cross_attention,
            )
            for feed_forward in feed_forwards
        )
        return TransformerStack(
            period=period,
            repeats=self.num_layers // len(self.sides) // len(period),
            unroll=self.unroll,
            remat=self.remat,
        )
