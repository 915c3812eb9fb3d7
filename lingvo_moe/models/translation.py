"""The encoder-decoder translation Transformer with experts in every other layer (GShard sections 2 and 4.3)."""

from __future__ import annotations

import dataclasses

from lingvo_moe import ranges
from lingvo_moe.errors import UserError
from lingvo_moe.layers.attention import causal_mask, segment_mask
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.relative_bias import RelativeBias
from lingvo_moe.layers.transformer import Masks, TransformerStack
from lingvo_moe.lazy import tf
from lingvo_moe.models import transformer_checks
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.ranges import COUNT_OR_0, SHARE, Range

_RELATIVE_POSITIONS = {
    "relative_buckets": Range(maximum=2**10, whole=True),
    "relative_distance": Range(1, 2**20, whole=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation(Transformer):
    """A Transformer from one vocabulary to another; by default half of the layers are the encoder's (GShard table 1).

    Attributes:
      source_vocabulary, target_vocabulary: sizes V; at least the tokenizers'.
      num_encoder_layers: how many of `num_layers` are the encoder's; 0: half of them. A deep encoder costs less than a
        deep decoder, most of all in decoding, as it reads a sentence once (Kasai et al. 2021).
      encoder_layer_pattern: the encoder's, where it is not `layer_pattern`; for layers and routers that are not causal.
      word_dropout: the share of the decoder's input tokens that become `unknown_id` in training, so that it must read
        the source (Bowman et al. 2016, section 3.1); for corpora of few different target sentences.
      unknown_id: the target tokenizer's id for what it does not know.
      relative_buckets: of the distances by which each stack's self-attention knows positions, as T5's, instead of
        sinusoids in the embeddings, see `layers.relative_bias`; 0 for sinusoids. Not in a pipeline or microbatches.
      relative_distance: at and beyond it, all distances share the last bucket; without `relative_buckets`, it has no
        effect.
    """

    source_vocabulary: int
    target_vocabulary: int
    num_encoder_layers: int = 0
    encoder_layer_pattern: tuple[str, ...] = ()
    word_dropout: float = 0.0
    unknown_id: int = 3
    relative_buckets: int = 0
    relative_distance: int = 128

    sides = ("source", "target")

    def __post_init__(self):
        super().__post_init__()
        unknown = Range(0, self.target_vocabulary - 1)
        ranges.check("model.", self, {"num_encoder_layers": COUNT_OR_0, "word_dropout": SHARE, "unknown_id": unknown})
        ranges.check("model.", self, _RELATIVE_POSITIONS)
        transformer_checks.check_relative_positions(self)

    @property
    def layer_patterns(self) -> dict[str, tuple[str, ...]]:
        """See `Transformer`."""
        return {"encoder": self.encoder_layer_pattern or self._pattern, "decoder": self._pattern}

    @property
    def stack_layers(self) -> dict[str, int]:
        """See `Transformer`."""
        if not self.num_encoder_layers:
            return super().stack_layers
        return {"encoder": self.num_encoder_layers, "decoder": self.num_layers - self.num_encoder_layers}

    def attention_macs(self, lengths: dict[str, int]) -> float:
        """See `Transformer`; the decoder attends to both sides."""
        source, target, layers = lengths["source"], lengths["target"], self.stack_layers
        pairs = layers["encoder"] * source**2 + layers["decoder"] * target * (target + source)
        return pairs * 2 * self.num_heads * self.head_dim

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """The loss of one batch and what to report.

        Args:
          theta: tensors for `weights()`.
          batch: `source`: ids, segment_ids, positions `[B, S] int32`; `target`: the same and labels, `[B, T] int32`.
            Segment 0 is padding; several sentences may share a row under different segment ids.
          context: of the call.

        Returns:
          (loss to minimise: cross-entropy + k * l_aux, scalar; metrics: `cross_entropy` in nats per target token,
          `tokens` predicted, and the experts' averaged over both stacks).
        """
        context = context.in_dtype(self.activation_dtype)
        source, target = batch["source"], batch["target"]
        memory, encoder_metrics = self.encode(theta, source, context)
        masks = Masks(
            causal_mask(target["segment_ids"]),
            tf.equal(target["segment_ids"], 0),
            segment_mask(target["segment_ids"], source["segment_ids"]),
        )
        inputs = self._embed(
            "target_embedding", theta, dict(target, ids=self._drop_words(target["ids"], context)), context
        )
        outputs, decoder_metrics = self._layers["decoder"](
            theta["decoder"], inputs, memory, masks, context.fold("decoder")
        )
        return self._total(theta, outputs, target, context, encoder_metrics, decoder_metrics)

    def encode(self, theta: dict, source: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """The encoder alone.

        Args:
          theta: at least the weights of the source's embedding and of the encoder.
          source: ids, segment_ids, positions `[B, S] int32`.
          context: of the call.

        Returns:
          (outputs `[B, S, M]`, the experts' metrics).
        """
        context = context.in_dtype(self.activation_dtype)
        segments = source["segment_ids"]
        masks = Masks(segment_mask(segments, segments), tf.equal(segments, 0))
        inputs = self._embed("source_embedding", theta, source, context)
        return self._layers["encoder"](theta["encoder"], inputs, None, masks, context.fold("encoder"))

    def start_decoding(self, theta: dict, source: dict, cache_length: int, context: Context) -> dict:
        """Encodes the source; returns the state for `decode_step`.

        Args:
          theta: of `prepare_decoding`.
          source: ids, segment_ids, positions `[B, S] int32`, one sentence a row.
          cache_length: the cache's capacity in target positions, of all hypotheses together.
          context: of the call.
        """
        context = context.in_dtype(self.activation_dtype)
        memory = self._encode_sentences(theta, source, context)
        batch = memory.shape[0]
        caches = self._layers["decoder"].start(theta["decoder"], batch, cache_length, context, memory)
        return {"caches": caches, "source_segments": source["segment_ids"]}

    def decode_step(
        self,
        theta: dict,
        state: dict,
        ids: tf.Tensor,
        paddings: tf.Tensor,
        position: tf.Tensor,
        start: tf.Tensor,
        mask: tf.Tensor,
        context: Context,
    ) -> tuple[tf.Tensor, dict]:
        """One target token for each of K hypotheses.

        Args:
          theta: of `prepare_decoding`.
          state: of `start_decoding`, or the one returned by the step before.
          ids: `[B, K] int32`.
          paddings: `[B, K] bool`, true for hypotheses whose logits do not matter: experts do not compute them.
          position: scalar, the tokens' position in their sentences.
          start: scalar; keys and values are written to cache positions start .. start + K - 1, and never moved.
          mask: `[B, K, cache_length] bool`, which cache positions a hypothesis sees, its own new one included.
          context: of the call.

        Returns:
          (logits `[B, K, V] float32`, the new state).
        """
        context = context.in_dtype(self.activation_dtype)
        sees_source = tf.not_equal(state["source_segments"], 0)[:, None, :]
        masks = Masks(mask, paddings, tf.repeat(sees_source, ids.shape[1], axis=1))
        inputs = self._look_up("target_embedding", theta, ids, tf.fill(ids.shape, position), context)
        outputs, caches = self._layers["decoder"].step(theta["decoder"], inputs, state["caches"], start, masks, context)
        logits = self.decoding_logits(theta, outputs, context)
        return logits, dict(state, caches=caches)

    def select_rows(self, state: dict, rows: tf.Tensor) -> dict:
        """See `protocols.RowSelectingModel`; a subclass with more in its state extends it."""
        return {
            "caches": self._layers["decoder"].select_rows(state["caches"], rows),
            "source_segments": tf.gather(state["source_segments"], rows),
        }

    def _encode_sentences(self, theta: dict, source: dict, context: Context) -> tf.Tensor:
        """The encoder's outputs `[B, S, M]` for one sentence a row; zeros of columns that no sentence needs."""
        segments = source["segment_ids"]
        columns = segments.shape[1]

        def encode(first: int) -> tf.Tensor:
            memory, _ = self.encode(theta, {field: ids[:, :first] for field, ids in source.items()}, context)
            return memory if first == columns else tf.pad(memory, [[0, 0], [0, columns - first], [0, 0]])

        def is_short(first: int) -> tf.Tensor:
            return tf.reduce_all(tf.equal(segments[:, first:], 0))

        return self._for_short_rows(columns, is_short, encode, context)

    def _drop_words(self, ids: tf.Tensor, context: Context) -> tf.Tensor:
        if not context.training or self.word_dropout == 0.0:
            return ids
        draw = context.uniform(tuple(ids.shape), "word_dropout")
        return tf.where(draw < self.word_dropout, self.unknown_id, ids)

    def _check_layers(self):
        if not self.num_encoder_layers:
            super()._check_layers()
            return
        if not 0 < self.num_encoder_layers < self.num_layers:
            raise UserError(
                f"model.num_encoder_layers is {self.num_encoder_layers}, and model.num_layers, of both stacks, "
                f"{self.num_layers}; the encoder needs fewer than all, and 0 stands for half of them."
            )
        for stack, count in self.stack_layers.items():
            pattern = self.layer_patterns[stack]
            if count < len(pattern) or count % len(pattern):
                raise UserError(
                    f"model.num_encoder_layers is {self.num_encoder_layers} of model.num_layers={self.num_layers}, so "
                    f"the {stack} has {count} layers, but it repeats the layer pattern {','.join(pattern)}: change one "
                    f"of the two so that it has a multiple of {len(pattern)}."
                )

    def _embedding(self, vocabulary: int) -> Embedding:
        return dataclasses.replace(super()._embedding(vocabulary), has_positions=not self.relative_buckets)

    def _stack(self, name: str, has_cross_attention: bool) -> TransformerStack:
        stack = super()._stack(name, has_cross_attention)
        if not self.relative_buckets:
            return stack
        bias = RelativeBias(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            buckets=self.relative_buckets,
            distance=self.relative_distance,
            bidirectional=name == "encoder",
        )
        return dataclasses.replace(stack, relative_bias=bias)

    @property
    def _layers(self) -> dict:
        stacks = {
            "encoder": self._stack("encoder", has_cross_attention=False),
            "decoder": self._stack("decoder", has_cross_attention=True),
        }
        tables = {
            self._table("source_embedding"): self._embedding(self.source_vocabulary),
            self._table("target_embedding"): self._embedding(self.target_vocabulary),
        }
        return {**tables, **stacks, **self._softmax_layers}

    def _table(self, name: str) -> str:
        has_own = name == "source_embedding" and self.source_vocabulary != self.target_vocabulary
        return name if has_own else super()._table(name)
