"""Connectionist temporal classification: labels of a sequence without their times (Graves et al. 2006).

TensorFlow's `tf.nn.ctc_loss` gives an alignment that ends before the last label the probability e^-707 instead of 0.
A row whose labels have less together, as those of a long transcript have while blanks are learnt, then has the loss of
such alignments, and their gradient, which makes blanks more probable still. So the recursions are written out here.
"""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf
from lingvo_moe.ops.gradients import named_gradient

BLANK = 0  # the class of no label: the id of padding, which is no label
_LOG_ZERO = -1e30  # a log-probability far below any other; sums of it are finite


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
      `[B] float32`, in nats; 0 for a row without a frame, infinite for one with too few.
    """
    with tf.name_scope("ctc"):
        present = tf.logical_not(frame_paddings)
        alignments = _Alignments(present, labels, label_paddings)
        nats = alignments.loss(_emissions(tf.nn.log_softmax(logits), labels))
        return context.annotate(tf.where(tf.reduce_any(present, axis=1), nats, 0.0), "B")


def best_path(logits: tf.Tensor, frame_paddings: tf.Tensor) -> tf.Tensor:
    """The most probable class of each frame: `[B, S, V]` and `[B, S] bool` to `[B, S] int32`, `BLANK` for padding.

    `inference.recognizer` makes the labels of it.
    """
    return tf.where(frame_paddings, BLANK, tf.argmax(logits, axis=-1, output_type=tf.int32))


def _emissions(log_probabilities: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """The log-probability of each state's class, `[B, S, 2 T + 1]`, from those of all classes `[B, S, V]`.

    The states are the labels, with a blank before each and after the last: l' of Graves et al., section 4.1.
    """
    # A comparison that XLA fuses into the sum, as the gradient of a gather would be a scatter.
    is_class = tf.equal(labels[:, None, :, None], tf.range(log_probabilities.shape[-1]))
    of_labels = tf.reduce_sum(tf.where(is_class, log_probabilities[:, :, None], 0.0), axis=-1)
    blank = log_probabilities[..., BLANK, None]
    pairs = tf.stack([tf.broadcast_to(blank, of_labels.shape), of_labels], axis=-1)
    return tf.concat([tf.reshape(pairs, (*blank.shape[:2], -1)), blank], axis=-1)


class _Alignments:
    """The alignments of each row's labels with its frames, as paths through its states."""

    def __init__(self, present: tf.Tensor, labels: tf.Tensor, label_paddings: tf.Tensor):
        """Takes which frames there are, `[B, S] bool`, and the labels and their paddings, `[B, T]`."""
        self._present = tf.transpose(present)[..., None]  # [S, B, 1]
        states = tf.range(2 * labels.shape[1] + 1)
        # From a label to the next one without a blank between them, if the two differ.
        differs = tf.not_equal(labels, tf.pad(labels[:, :-1], [[0, 0], [1, 0]], constant_values=BLANK))
        pairs = tf.reshape(tf.stack([tf.zeros_like(differs), differs], axis=-1), (labels.shape[0], -1))
        self._skips = tf.pad(pairs, [[0, 0], [0, 1]])  # [B, 2 T + 1]: whether a state follows that two before it
        count = tf.reduce_sum(tf.cast(tf.logical_not(label_paddings), tf.int32), axis=1, keepdims=True)
        # A path ends in the last label or the blank after it, and begins, before the first frame, in the first blank.
        is_end = tf.logical_or(tf.equal(states, 2 * count), tf.equal(states, 2 * count - 1))
        self._end = tf.where(is_end, 0.0, _LOG_ZERO)
        self._start = tf.where(tf.equal(states, 0), tf.zeros_like(self._end), _LOG_ZERO)

    def loss(self, emissions: tf.Tensor) -> tf.Tensor:
        """The negative logarithm of the sum of all paths' probabilities, `[B]`, from `emissions [B, S, 2 T + 1]`."""
        return named_gradient(self._with_gradient)(emissions)

    def _with_gradient(self, emissions: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        by_frame = tf.einsum("bsu->sbu", emissions)
        forward = self._forward(by_frame)
        total = tf.reduce_logsumexp(forward[-1] + self._end, axis=-1)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # Posterior probability of each state at a frame (Graves et al., section 4.2).
            posteriors = tf.nn.softmax(forward + self._backward(by_frame))
            posteriors = tf.where(self._present, posteriors, 0.0)
            return -tf.einsum("sbu->bsu", posteriors) * upstream[:, None, None]

        return tf.where(total > _LOG_ZERO / 2, -total, float("inf")), gradient

    def _forward(self, emissions: tf.Tensor) -> tf.Tensor:
        """The log-probability of the paths up to each frame that are in each state there, `[S, B, 2 T + 1]`.

        Emissions are `[S, B, 2 T + 1]`. A frame of padding leaves them as they are.
        """

        def step(before: tf.Tensor, frame: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            emission, present = frame
            padded = tf.pad(before, [[0, 0], [2, 0]], constant_values=_LOG_ZERO)
            skipped = tf.where(self._skips, padded[:, :-2], _LOG_ZERO)
            return tf.where(present, _log_of_sum(before, padded[:, 1:-1], skipped) + emission, before)

        return tf.scan(step, (emissions, self._present), self._start)

    def _backward(self, emissions: tf.Tensor) -> tf.Tensor:
        """The log-probability of what follows each frame, from each state there, `[S, B, 2 T + 1]`."""

        def step(after: tf.Tensor, frame: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            emission, present = frame
            emitted = after + emission
            skipping = tf.where(self._skips, emitted, _LOG_ZERO)
            padded, skipping = (
                tf.pad(part, [[0, 0], [0, 2]], constant_values=_LOG_ZERO) for part in (emitted, skipping)
            )
            return tf.where(present, _log_of_sum(emitted, padded[:, 1:-1], skipping[:, 2:]), after)

        # From what follows each frame to what follows the one before; the first has none, but a scan needs a step.
        before = tf.scan(step, (emissions, self._present), self._end, reverse=True)
        return tf.concat([before[1:], self._end[None]], axis=0)


def _log_of_sum(*logarithms: tf.Tensor) -> tf.Tensor:
    """The logarithm of the sum of numbers, elementwise, from their logarithms, which are finite."""
    return tf.reduce_logsumexp(tf.stack(logarithms, axis=-1), axis=-1)
