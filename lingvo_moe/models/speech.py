"""Speech recognition: a Conformer from log-mel features to labels, trained by CTC (GSPMD section 5.3).

The paper says of its models that they are a convolutional subsampling layer, a stack of Conformer layers and layers
after it. It does not say what they were trained for; CTC needs the least after the backbone.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe import ranges
from lingvo_moe.errors import UserError
from lingvo_moe.layers.attention import segment_mask
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.conformer import ConformerLayer
from lingvo_moe.layers.convolution import ConvolutionModule, Subsampling
from lingvo_moe.layers.ctc import best_path, ctc_loss
from lingvo_moe.layers.feed_forward import FeedForward
from lingvo_moe.layers.normalization import LAYER
from lingvo_moe.layers.relative_attention import RelativeAttention
from lingvo_moe.layers.summaries import magnitude
from lingvo_moe.layers.transformer import Masks, TransformerLayer
from lingvo_moe.lazy import tf
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.ranges import COUNT
from lingvo_moe.utils.subsampling import SUBSAMPLING


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechRecognition(Transformer):
    """Reads recordings (the source) and predicts transcripts (the target).

    The layers before and after the backbone, which a pipeline divides into stages, are sharded by batch. The layout
    `pipeline_data` shards it over the devices of the stages.

    Attributes:
      target_vocabulary: size V; at least the target tokenizer's. The id of padding is CTC's blank.
      num_bins: F, the mel bins of a frame, of the input.
      subsampling_channels: of the convolutions before the backbone.
      kernel_size: of the depthwise convolutions, in positions of the backbone; Gulati et al. use 32.
    """

    target_vocabulary: int
    num_bins: int = 80
    subsampling_channels: int = 32
    kernel_size: int = 32

    sides = ("source", "target")

    def __post_init__(self):
        super().__post_init__()
        ranges.check("model.", self, dict.fromkeys(("num_bins", "subsampling_channels", "kernel_size"), COUNT))
        for name in ("sampled_softmax", "label_smoothing", "tied_embeddings", "logits_bias", "excluded_ids"):
            if getattr(self, name):
                raise UserError(f"model.{name} is {getattr(self, name)}; a speech model, whose loss is CTC, has none.")
        if self.twin_keys:
            raise UserError("model.twin_keys is true, but a speech model has no cross-attention; leave it out.")
        if self.biases:
            raise UserError("model.biases is true, but a speech model's projections have none; leave it out.")
        if self.post_norm:
            raise UserError("model.post_norm is true, but a Conformer normalises what sublayers read; leave it out.")
        if self.norm != LAYER:
            raise UserError(f"model.norm is {self.norm}, but a Conformer has layer normalisation; leave it out.")
        for name in ("position_offset", "wavelengths"):
            if (value := getattr(self, name)) != getattr(Transformer, name):
                raise UserError(f"model.{name} is {value}, but a speech model has relative positions; leave it out.")

    @property
    def layer_patterns(self) -> dict[str, tuple[str, ...]]:
        """See `Transformer`; by default feed-forward layers with swish."""
        return {"encoder": self.layer_pattern or ("dense:activation=swish",)}

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """The loss of one batch and what to report.

        Args:
          theta: tensors for `weights()`.
          batch: `source`: features `[B, S, F] float32` and segment_ids `[B, S] int32`, S a multiple of 4; `target`:
            labels and segment_ids, `[B, T] int32`. Segment 0 is padding. A row is one recording.
          context: of the call.

        Returns:
          (loss to minimise: CTC + k * l_aux, scalar, in nats per label; metrics: `cross_entropy`, that of CTC, `tokens`
          labels, and those of the layers).
        """
        logits, paddings, metrics = self._classify(theta, batch["source"], context)
        target = batch["target"]
        present = tf.not_equal(target["segment_ids"], 0)
        nats = ctc_loss(logits, paddings, target["labels"], tf.logical_not(present), context)
        tokens = tf.reduce_sum(tf.cast(present, tf.float32))
        per_label = tf.math.divide_no_nan(tf.reduce_sum(nats), tokens)
        return self._with_aux_loss(per_label, metrics), {"cross_entropy": per_label, "tokens": tokens, **metrics}

    def transcribe(self, theta: dict, source: dict, context: Context) -> tf.Tensor:
        """See `protocols.RecognisingModel`: the most probable class of each position, `[B, S / 4] int32`."""
        logits, paddings, _ = self._classify(theta, source, context)
        return best_path(logits, paddings)

    def positions_of(self, path: str, lengths: dict[str, int]) -> float:
        """See `Transformer`; convolutions before the backbone multiply once for each pixel that they put out."""
        outputs = lengths["source"] / SUBSAMPLING
        pixels = {"subsampling/first": self.num_bins, "subsampling/second": self.num_bins / SUBSAMPLING}
        return outputs * pixels.get(path, 1.0)

    def attention_macs(self, lengths: dict[str, int]) -> float:
        """See `Transformer`; logits by distance are a third matmul beside those with keys and values."""
        return self.num_layers * 3 * (lengths["source"] // SUBSAMPLING) ** 2 * self.num_heads * self.head_dim

    def _classify(self, theta: dict, source: dict, context: Context) -> tuple[tf.Tensor, tf.Tensor, dict]:
        """Returns (logits `[B, S / 4, V] float32`, their paddings `[B, S / 4] bool`, metrics of the layers)."""
        context = context.in_dtype(self.activation_dtype)
        silent = tf.equal(source["segment_ids"], 0)
        inputs, paddings = self._subsampling(theta["subsampling"], source["features"], silent, context)
        context.summarize("subsampling", lambda: magnitude(inputs))
        inputs = context.dropout(inputs, self.input_dropout, "subsampling", "BTM")
        segments = tf.cast(tf.logical_not(paddings), tf.int32)
        masks = Masks(segment_mask(segments, segments), paddings)
        outputs, metrics = self._layers["encoder"](theta["encoder"], inputs, None, masks, context.fold("encoder"))
        logits = self._softmax(self.target_vocabulary)(theta["softmax"], outputs, context)
        return logits, paddings, metrics

    def _stacked_layer(self, feed_forward: FeedForward, has_cross_attention: bool) -> TransformerLayer:
        del has_cross_attention  # there is nothing else to attend to
        return ConformerLayer(
            attention=RelativeAttention(
                model_dim=self.model_dim,
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                dropout=self.attention_dropout,
            ),
            feed_forward=feed_forward,
            convolution=ConvolutionModule(
                model_dim=self.model_dim, kernel_size=self.kernel_size, norm_epsilon=self.norm_epsilon
            ),
            residual_dropout=self.residual_dropout,
            norm_epsilon=self.norm_epsilon,
        )

    @property
    def _subsampling(self) -> Subsampling:
        return Subsampling(num_bins=self.num_bins, channels=self.subsampling_channels, model_dim=self.model_dim)

    @property
    def _layers(self) -> dict:
        return {
            "subsampling": self._subsampling,
            "encoder": self._stack("encoder", has_cross_attention=False),
            "softmax": self._softmax(self.target_vocabulary),
        }
