"""The decoder-only language model, dense or with experts (GSPMD section 5; GShard, ICLR version, appendix A.4)."""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError
from lingvo_moe.layers.attention import causal_mask
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.transformer import Masks
from lingvo_moe.lazy import tf
from lingvo_moe.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(Transformer):
    """A Transformer that predicts each token from those before it; it reads the target side of a corpus.

    Attributes:
      target_vocabulary: size V; at least the target tokenizer's.
    """

    target_vocabulary: int

    sides = ("target",)

    def __post_init__(self):
        super().__post_init__()
        if self.twin_keys:
            raise UserError("model.twin_keys is true, but a language model has no cross-attention; leave it out.")

    @property
    def layer_patterns(self) -> dict[str, tuple[str, ...]]:
        """See `Transformer`."""
        return {"decoder": self._pattern}

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """The loss of one batch and what to report.

        Args:
          theta: tensors for `weights()`.
          batch: `target`: ids, labels, segment_ids, positions, `[B, T] int32`. Segment 0 is padding; several texts may
            share a row under different segment ids.
          context: of the call.

        Returns:
          (loss to minimise: cross-entropy + k * l_aux, scalar; metrics: `cross_entropy` in nats per token, `tokens`
          predicted, and the experts').
        """
        context = context.in_dtype(self.activation_dtype)
        target = batch["target"]
        masks = Masks(causal_mask(target["segment_ids"]), tf.equal(target["segment_ids"], 0))
        inputs = self._embed("embedding", theta, target, context)
        outputs, metrics = self._layers["decoder"](theta["decoder"], inputs, None, masks, context.fold("decoder"))
        return self._total(theta, outputs, target, context, metrics)

    def start_decoding(self, theta: dict, source: dict, cache_length: int, context: Context) -> dict:
        """Reads the prompts in one pass; returns the state for `decode_step`.

        The cache begins with the keys and values of the prompts, of which the last token is left for the first step.

        Args:
          theta: of `prepare_decoding`.
          source: the prompts: ids, segment_ids, positions `[B, S] int32`, one a row; bos and, if any, more tokens.
          cache_length: the cache's capacity in positions that follow the prompts, of all hypotheses together.
          context: of the call.
        """
        context = context.in_dtype(self.activation_dtype)
        ids = source["ids"]
        batch, length = ids.shape
        is_token = tf.not_equal(source["segment_ids"], 0)
        last = tf.reduce_sum(tf.cast(is_token, tf.int32), axis=1) - 1
        is_read = tf.logical_and(is_token, tf.range(length) < last[:, None])
        empty = self._layers["decoder"].start(theta["decoder"], batch, length + cache_length, context)

        def read(columns: int) -> dict:
            of_columns = is_read[:, :columns]
            inputs = self._look_up("embedding", theta, ids[:, :columns], source["positions"][:, :columns], context)
            masks = Masks(causal_mask(tf.cast(of_columns, tf.int32)), tf.logical_not(of_columns))
            return self._layers["decoder"].step(theta["decoder"], inputs, empty, None, masks, context)[1]

        def is_short(columns: int) -> tf.Tensor:
            return tf.logical_not(tf.reduce_any(is_read[:, columns:]))

        caches = self._for_short_rows(length, is_short, read, context)
        last_ids = tf.gather(ids, tf.maximum(last, 0), batch_dims=1)
        return {"caches": caches, "is_read": is_read, "last": last, "last_ids": last_ids}

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
        """One token for each of K hypotheses; the first one reads the last token of the prompt instead of bos.

        Args and returns: see `protocols.DecodingModel`.
        """
        context = context.in_dtype(self.activation_dtype)
        is_read = state["is_read"]
        batch, length = is_read.shape
        ids = tf.where(tf.equal(position, 0), state["last_ids"][:, None], ids)
        positions = tf.repeat(state["last"][:, None] + position, ids.shape[1], axis=1)
        of_prompt = tf.repeat(is_read[:, None], ids.shape[1], axis=1)
        seen = tf.concat([of_prompt, tf.broadcast_to(mask, (batch, *mask.shape[1:]))], axis=2)
        inputs = self._look_up("embedding", theta, ids, positions, context)
        masks = Masks(seen, paddings)
        outputs, caches = self._layers["decoder"].step(
            theta["decoder"], inputs, state["caches"], length + start, masks, context
        )
        logits = self.decoding_logits(theta, outputs, context)
        return logits, dict(state, caches=caches)

    def select_rows(self, state: dict, rows: tf.Tensor) -> dict:
        """See `protocols.RowSelectingModel`."""
        caches = self._layers["decoder"].select_rows(state["caches"], rows)
        return {name: tf.gather(value, rows) for name, value in state.items() if name != "caches"} | {"caches": caches}

    @property
    def _layers(self) -> dict:
        return {
            "embedding": self._embedding(self.target_vocabulary),
            "decoder": self._stack("decoder", has_cross_attention=False),
            **self._softmax_layers,
        }
