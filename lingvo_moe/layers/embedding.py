"""Token embedding with positional encoding, and the output projection with its cross-entropy."""

from __future__ import annotations

import dataclasses
import math

from lingvo_moe.layers.base import Context, Layer, Weight, matrix
from lingvo_moe.layers.summaries import magnitude
from lingvo_moe.lazy import tf
from lingvo_moe.ops.attention import MASKED_LOGIT
from lingvo_moe.ops.cross_entropy import label_and_mean_nll
from lingvo_moe.ops.projection import project, project_to_rows

_LONGEST_WAVE = 10000.0  # Vaswani et al. 2017, section 3.5
# How the wavelengths of positions grow: to that of `_LONGEST_WAVE`, as in tensor2tensor and fairseq, or to a little
# less, as in the paper and Marian.
TENSOR2TENSOR, PAPER = "tensor2tensor", "paper"
WAVELENGTHS = (TENSOR2TENSOR, PAPER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding(Layer):
    """A table of one vector per token id, and the encoding of positions.

    Attributes:
      vocabulary: V, the number of ids.
      model_dim: M, the size of a vector.
      position_offset: added to positions; fairseq counts from 2.
      wavelengths: one of `WAVELENGTHS`, see `sinusoids`.
      has_positions: whether `sinusoids` are added; not where attention has relative positions.
    """

    vocabulary: int
    model_dim: int
    position_offset: int = 0
    wavelengths: str = TENSOR2TENSOR
    has_positions: bool = True

    def weights(self) -> dict:
        """See `Layer.weights`."""
        # `fan_in` gives the optimizer its rows and columns; a row is looked up, not contracted, so its scale is that of
        # M.
        table = Weight((self.vocabulary, self.model_dim), "VM", fan_in="V", stddev=1.0 / math.sqrt(self.model_dim))
        return {"table": table}

    def __call__(self, theta: dict, ids: tf.Tensor, positions: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, T] int32` to `[B, T, M]`: the vectors, of unit variance, plus any `sinusoids` of the positions."""
        # Whole rows are read, so a replicated table needs no communication and a sharded one an AllReduce of [B, T, M].
        with tf.name_scope("embedding"):
            vectors = tf.gather(theta["table"], ids) * math.sqrt(self.model_dim)
            if not self.has_positions:
                return context.cast(vectors)
            waves = sinusoids(positions + self.position_offset, self.model_dim, self.wavelengths)
            return context.cast(vectors + waves)


def sinusoids(positions: tf.Tensor, model_dim: int, wavelengths: str = TENSOR2TENSOR) -> tf.Tensor:
    """The sinusoidal positional encoding: sines, then cosines, of geometric wavelengths (Vaswani et al. 2017, 3.5).

    A function of the position alone: packed sequences restart it, and there is no longest length.

    Args:
      positions: `[B, T] int32`.
      model_dim: M.
      wavelengths: `tensor2tensor`, whose last wavelength is 10,000 * 2 pi, or `paper`, with the exponents 2i / M of the
        paper, where it is a little shorter.

    Returns:
      `[B, T, M] float32`.
    """
    half = model_dim // 2
    intervals = {TENSOR2TENSOR: half - 1, PAPER: half}[wavelengths]
    frequencies = tf.exp(tf.range(half, dtype=tf.float32) * (-math.log(_LONGEST_WAVE) / max(intervals, 1)))
    angles = tf.cast(positions, tf.float32)[..., None] * frequencies
    waves = tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)
    return tf.pad(waves, [[0, 0], [0, 0], [0, model_dim - 2 * half]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(Layer):
    """The projection to the vocabulary.

    Attributes:
      vocabulary: V, the number of logits.
      model_dim: M, of the inputs.
      is_tied: whether an embedding's table stands for the projection.
      bias: whether each logit has a bias.
      excluded: the ids with the probability 0.
    """

    vocabulary: int
    model_dim: int
    is_tied: bool = False
    bias: bool = False
    excluded: tuple[int, ...] = ()

    def weights(self) -> dict:
        """See `Layer.weights`; those that no embedding has."""
        projection = {"projection": matrix("MV", fan_in="M", M=self.model_dim, V=self.vocabulary)}
        bias = {"bias": Weight((self.vocabulary,), "V", keep_float32=True)}
        return {**({} if self.is_tied else projection), **(bias if self.bias else {})}

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, T, M]` to logits `[B, T, V] float32`; tied, `theta` has an embedding's `table` and no `projection`.

        The product has the dtype of the inputs: with activations in bfloat16, a logit has eight significant bits.
        """
        with tf.name_scope("softmax"):
            if "table" in theta:
                products = project_to_rows(inputs, theta["table"], context)
            else:
                products = project(inputs, theta["projection"], context)
            logits = tf.cast(products, tf.float32)
            logits = logits + theta["bias"] if "bias" in theta else logits
            context.summarize("softmax", lambda: magnitude(logits))
            return self._without_excluded(logits) if self.excluded else logits

    def _without_excluded(self, logits: tf.Tensor) -> tf.Tensor:
        ids = tf.range(self.vocabulary)[:, None]
        is_excluded = tf.reduce_any(tf.equal(ids, tf.constant(self.excluded)), axis=-1)
        return tf.where(is_excluded, MASKED_LOGIT, logits)


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0) -> tuple[tf.Tensor, tf.Tensor]:
    """The cross-entropy of each label, without and with label smoothing.

    Args:
      logits: `[B, T, V] float32`.
      labels: `[B, T] int32`.
      label_smoothing: the share of the target distribution spread evenly over the vocabulary.

    Returns:
      (reported, optimised), each `[B, T] float32` in nats; equal where nothing is smoothed.
    """
    with tf.name_scope("softmax"):
        nll, mean_nll = label_and_mean_nll(logits, labels)
        if label_smoothing == 0.0:
            return nll, nll
        return nll, (1.0 - label_smoothing) * nll + label_smoothing * mean_nll
