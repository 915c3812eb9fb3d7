"""Connectionist temporal classification: labels of a sequence without their times (Graves et al. 2006)."""

from __future__ import annotations

from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf

BLANK = 0  # the class of no label: the id of padding, which is no label


def ctc_loss(
    logits: tf.Tensor, frame_paddings: tf.Tensor, labels: tf.Tensor, label_paddings: tf.Tensor, context: Context
) -> tf.Tensor:
    """The negative log-probability of all alignments of the labels with the frames together.

    Args:
      logits: `[B, S, V] float32`.
      frame_paddings: `[B, S] bool`, true after the last frame of a row.
      labels: `[B, T] int32`, none of them `BLANK`; a row needs as many frames as labels, and one more between two equal
        ones.
      label_paddings: `[B, T] bool`, true after the last label of a row.
      context: of the call.

    Returns:
      `[B] float32`, in nats; 0 for a row without a frame.
    """
    with tf.name_scope("ctc"):
        frames, count = (_lengths(paddings) for paddings in (frame_paddings, label_paddings))
        # The recursion begins with a first frame, which a row without frames borrows.
        at_least_one = tf.maximum(frames, 1)
        nats = tf.nn.ctc_loss(labels, logits, count, at_least_one, logits_time_major=False, blank_index=BLANK)
        return context.annotate(tf.where(frames > 0, nats, 0.0), "B")


def best_path(logits: tf.Tensor, frame_paddings: tf.Tensor) -> tf.Tensor:
    """The most probable class of each frame: `[B, S, V]` and `[B, S] bool` to `[B, S] int32`, `BLANK` for padding.

    `inference.recognizer` makes the labels of it.
    """
    return tf.where(frame_paddings, BLANK, tf.argmax(logits, axis=-1, output_type=tf.int32))


def _lengths(paddings: tf.Tensor) -> tf.Tensor:
    """`[B, T] bool` to the number of positions before the padding, `[B] int32`."""
    return tf.reduce_sum(tf.cast(tf.logical_not(paddings), tf.int32), axis=1)
