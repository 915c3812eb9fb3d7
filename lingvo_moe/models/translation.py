"""The encoder-decoder translation Transformer with experts in every other layer (GShard sections 2 and 4.3)."""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError
from lingvo_moe.layers.attention import MultiHeadAttention, causal_mask, segment_mask
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.layers.embedding import Embedding, Softmax, cross_entropy
from lingvo_moe.layers.feed_forward import FeedForward
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.layers.transformer import Masks, TransformerLayer, TransformerStack
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation(Layer):
    """A Transformer from one vocabulary to another.

    Attributes:
      source_vocabulary, target_vocabulary: sizes V; at least the tokenizers'.
      num_layers: L, encoder and decoder together, half each (GShard table 1).
      model_dim, hidden_dim: M, and H of the dense feed-forward layers and of each expert.
      num_heads, head_dim: of attention.
      num_experts: E of every other feed-forward layer; 0 makes all of them dense.
      num_groups: G, of each side's tokens; a multiple of the devices along the batch (GShard: twice their number).
      capacity_factor, inference_capacity_factor: see `MixtureOfExperts`.
      aux_loss_weight: k in loss = cross-entropy + k * l_aux (GShard section 2.2).
      input_dropout, residual_dropout, attention_dropout: rates (GShard appendix A.2).
      word_dropout: the share of the decoder's input tokens that become `unknown_id` in training, so that it must read the
        source (Bowman et al. 2016, section 3.1); for corpora of few different target sentences.
      label_smoothing: of the optimised loss; the reported one is without.
      activation_dtype: `float32` or `bfloat16`; weights are float32.
      unroll, remat: how repeated layers are computed, see `layers.repeat`.
    """

    source_vocabulary: int
    target_vocabulary: int
    num_layers: int
    model_dim: int
    hidden_dim: int
    num_heads: int
    head_dim: int
    num_experts: int = 0
    num_groups: int = 1
    capacity_factor: float = 2.0
    inference_capacity_factor: float | None = None
    aux_loss_weight: float = 0.01
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    word_dropout: float = 0.0
    unknown_id: int = 3
    label_smoothing: float = 0.0
    activation_dtype: str = "float32"
    unroll: bool = False
    remat: bool = False

    def __post_init__(self):
        per_repeat = 4 if self.num_experts else 2
        if self.num_layers < per_repeat or self.num_layers % per_repeat:
            raise UserError(f"num_layers is {self.num_layers}; half of the layers are the encoder's and every other one has "
                            f"experts (num_experts={self.num_experts}), so it must be a multiple of {per_repeat}.")
        if self.num_experts == 1:
            raise UserError("num_experts is 1; top-2 gating needs at least 2 experts, 0 makes a dense model.")
        if self.activation_dtype not in ("float32", "bfloat16"):
            raise UserError(f"activation_dtype is {self.activation_dtype!r}; use float32 or bfloat16.")
        if self.unroll and self.remat:
            raise UserError("unroll and remat exclude each other: rematerialisation needs the loop. Set one of them to false.")

    def weights(self) -> dict:
        return {name: layer.weights() for name, layer in self._layers.items()}

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """The loss of one batch and what to report.

        Args:
          theta: tensors for `weights()`.
          batch: `source`: ids, segment_ids, positions `[B, S] int32`; `target`: the same and labels, `[B, T] int32`.
            Segment 0 is padding; several sentences may share a row under different segment ids.
          context: of the call.

        Returns:
          (loss to minimise: cross-entropy + k * l_aux, scalar; metrics: `cross_entropy` in nats per target token, `tokens`
          predicted, and the experts' averaged over both stacks).
        """
        context = dataclasses.replace(context, dtype=self.activation_dtype)
        source, target = batch["source"], batch["target"]
        memory, encoder_metrics = self._encode(theta, source, context)
        masks = Masks(causal_mask(target["segment_ids"]), tf.equal(target["segment_ids"], 0),
                      segment_mask(target["segment_ids"], source["segment_ids"]))
        inputs = self._embed("target_embedding", theta, dict(target, ids=self._drop_words(target["ids"], context)), context)
        outputs, decoder_metrics = self._layers["decoder"](theta["decoder"], inputs, memory, masks, context.fold("decoder"))
        logits = self._layers["softmax"](theta["softmax"], outputs, context)
        return self._total(logits, target, encoder_metrics, decoder_metrics)

    def start_decoding(self, theta: dict, source: dict, cache_length: int, context: Context) -> dict:
        """Encodes `source` (ids, segment_ids, positions `[B, S]`, one sentence a row); returns the state for `decode_step`.

        `cache_length`: how many target positions, of all hypotheses together, the cache has room for.
        """
        context = dataclasses.replace(context, dtype=self.activation_dtype)
        memory, _ = self._encode(theta, source, context)
        caches = self._layers["decoder"].start(theta["decoder"], memory, cache_length, context)
        return {"caches": caches, "source_segments": source["segment_ids"]}

    def decode_step(self, theta: dict, state: dict, ids: tf.Tensor, position: tf.Tensor, start: tf.Tensor, mask: tf.Tensor,
                    context: Context) -> tuple[tf.Tensor, dict]:
        """One target token for each of K hypotheses.

        Args:
          state: of `start_decoding`, or the one returned by the step before.
          ids: `[B, K] int32`.
          position: scalar, the tokens' position in their sentences.
          start: scalar; keys and values are written to cache positions start .. start + K - 1, and never moved.
          mask: `[B, K, cache_length] bool`, which cache positions a hypothesis sees, its own new one included.

        Returns:
          (logits `[B, K, V] float32`, the new state).
        """
        context = dataclasses.replace(context, dtype=self.activation_dtype)
        no_paddings = tf.zeros(ids.shape, tf.bool)
        sees_source = tf.not_equal(state["source_segments"], 0)[:, None, :]
        masks = Masks(mask, no_paddings, tf.repeat(sees_source, ids.shape[1], axis=1))
        embedding = self._layers["target_embedding"]
        inputs = embedding(theta["target_embedding"], ids, tf.fill(ids.shape, position), context)
        outputs, caches = self._layers["decoder"].step(theta["decoder"], inputs, state["caches"], start, masks, context)
        return self._layers["softmax"](theta["softmax"], outputs, context), dict(state, caches=caches)

    def _encode(self, theta: dict, source: dict, context: Context) -> tuple[tf.Tensor, dict]:
        segments = source["segment_ids"]
        masks = Masks(segment_mask(segments, segments), tf.equal(segments, 0))
        inputs = self._embed("source_embedding", theta, source, context)
        return self._layers["encoder"](theta["encoder"], inputs, None, masks, context.fold("encoder"))

    def _embed(self, name: str, theta: dict, side: dict, context: Context) -> tf.Tensor:
        embedded = self._layers[name](theta[name], side["ids"], side["positions"], context)
        return context.dropout(embedded, self.input_dropout, name, "BTM")

    def _drop_words(self, ids: tf.Tensor, context: Context) -> tf.Tensor:
        if not context.training or self.word_dropout == 0.0:
            return ids
        draw = context.annotate(context.uniform(tuple(ids.shape), "word_dropout"), "BT")
        return tf.where(draw < self.word_dropout, self.unknown_id, ids)

    def _total(self, logits: tf.Tensor, target: dict, *stack_metrics: dict) -> tuple[tf.Tensor, dict]:
        nll, smoothed = cross_entropy(logits, target["labels"], self.label_smoothing)
        present = tf.cast(tf.not_equal(target["segment_ids"], 0), tf.float32)
        tokens = tf.reduce_sum(present)
        metrics = {"cross_entropy": tf.math.divide_no_nan(tf.reduce_sum(nll * present), tokens), "tokens": tokens}
        for name in stack_metrics[0]:
            metrics[name] = tf.add_n([of_stack[name] for of_stack in stack_metrics]) / len(stack_metrics)
        loss = tf.math.divide_no_nan(tf.reduce_sum(smoothed * present), tokens)
        return loss + self.aux_loss_weight * metrics.get("aux_loss", 0.0), metrics

    @property
    def _layers(self) -> dict:
        return {
            "source_embedding": Embedding(vocabulary=self.source_vocabulary, model_dim=self.model_dim),
            "target_embedding": Embedding(vocabulary=self.target_vocabulary, model_dim=self.model_dim),
            "encoder": self._stack(has_cross_attention=False),
            "decoder": self._stack(has_cross_attention=True),
            "softmax": Softmax(vocabulary=self.target_vocabulary, model_dim=self.model_dim),
        }

    def _stack(self, has_cross_attention: bool) -> TransformerStack:
        attention = MultiHeadAttention(model_dim=self.model_dim, num_heads=self.num_heads, head_dim=self.head_dim,
                                       dropout=self.attention_dropout)
        feed_forwards = [FeedForward(model_dim=self.model_dim, hidden_dim=self.hidden_dim)]
        if self.num_experts:
            feed_forwards.append(MixtureOfExperts(
                model_dim=self.model_dim, hidden_dim=self.hidden_dim, num_experts=self.num_experts,
                num_groups=self.num_groups, capacity_factor=self.capacity_factor,
                inference_capacity_factor=self.inference_capacity_factor))
        period = tuple(TransformerLayer(attention=attention, feed_forward=feed_forward, residual_dropout=self.residual_dropout,
                                        has_cross_attention=has_cross_attention) for feed_forward in feed_forwards)
        return TransformerStack(period=period, repeats=self.num_layers // 2 // len(period), unroll=self.unroll,
                                remat=self.remat)
