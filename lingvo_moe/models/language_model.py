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
        context = dataclasses.replace(context, dtype=self.activation_dtype)
        target = batch["target"]
        masks = Masks(causal_mask(target["segment_ids"]), tf.equal(target["segment_ids"], 0))
        inputs = self._embed("embedding", theta, target, context)
        outputs, metrics = self._layers["decoder"](theta["decoder"], inputs, None, masks, context.fold("decoder"))
        return self._total(theta, outputs, target, context, metrics)

    @property
    def _layers(self) -> dict:
        layers = {
            "embedding": self._embedding(self.target_vocabulary),
            "decoder": self._stack("decoder", has_cross_attention=False),
        }
        return layers if self.tied_embeddings else layers | {"softmax": self._softmax(self.target_vocabulary)}
