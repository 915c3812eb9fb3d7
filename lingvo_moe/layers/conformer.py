"""The Conformer layer (Gulati et al. 2020, section 2.4; GSPMD section 5.3): a Transformer layer with convolution."""

from __future__ import annotations

import dataclasses

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.convolution import ConvolutionModule
from lingvo_moe.layers.feed_forward import feed_forward_weights
from lingvo_moe.layers.summaries import magnitude
from lingvo_moe.layers.transformer import Masks, TransformerLayer
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConformerLayer(TransformerLayer):
    """Half a step of feed-forward, self-attention, convolution, half a step of feed-forward, normalisation.

    Each sublayer f is `x + dropout(f(norm(x)))`, the half steps `x + dropout(f(norm(x))) / 2`. It fits into a
    `TransformerStack`, and with it into a pipeline. As in GShard's models, no product has a bias, and no dropout
    follows the activation of a feed-forward layer, as one does in figure 4 of Gulati et al.

    Attributes:
      convolution: the convolution module.
    """

    convolution: ConvolutionModule

    def weights(self) -> dict:
        """See `Layer.weights`."""
        norm, feed_forward = self.norm.weights(), feed_forward_weights(self.feed_forward)
        return {
            "feed_forward_before": {"norm": norm, **feed_forward},
            "self_attention": {"norm": norm, **self.attention.weights()},
            "convolution": {"norm": norm, **self.convolution.weights()},
            "feed_forward_after": {"norm": norm, **feed_forward},
            "norm": norm,
        }

    def __call__(
        self, theta: dict, inputs: tf.Tensor, memory: tf.Tensor | None, masks: Masks, context: Context
    ) -> tuple[tf.Tensor, dict]:
        """`[B, T, M]` to (`[B, T, M]`, metrics: means of both feed-forward layers); there is no `memory` to read."""
        outputs, before = self._feed_forward(theta, inputs, masks, context, "feed_forward_before", weight=0.5)
        outputs = self._attend("self_attention", theta, outputs, None, masks.self_attention, context)
        outputs = self._convolve(theta["convolution"], outputs, masks, context)
        outputs, after = self._feed_forward(theta, outputs, masks, context, "feed_forward_after", weight=0.5)
        normed = context.annotate(self.norm(theta["norm"], outputs, context), "BTM")
        context.summarize("norm", lambda: magnitude(normed))
        return normed, {name: (before[name] + after[name]) / 2 for name in before}

    def _convolve(self, theta: dict, inputs: tf.Tensor, masks: Masks, context: Context) -> tf.Tensor:
        with tf.name_scope("convolution"):
            normed = self.norm(theta["norm"], inputs, context)
            convolved = self.convolution(theta, normed, masks.paddings, context.fold("convolution"))
            return self._add(inputs, convolved, "convolution", context)
