"""Cross-entropy with a gradient of one pass over the logits."""

from __future__ import annotations

from lingvo_moe.lazy import tf
from lingvo_moe.ops.gradients import named_gradient


def label_and_mean_nll(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The negative log-likelihood of each label, and its mean over the vocabulary (for label smoothing).

    The gradient is written out: it is one pass over the logits, where TensorFlow's makes five. The label is selected by
    a comparison that XLA fuses into the sum, not by a gather: the vocabulary may be sharded, and a gather's gradient is
    a scatter.

    Args:
      logits: `[B, T, V] float32`.
      labels: `[B, T] int32`.

    Returns:
      Two tensors `[B, T] float32`, in nats.
    """
    return named_gradient(_with_gradient)(logits, tf.equal(tf.range(logits.shape[-1]), labels[..., None]))


def _with_gradient(logits: tf.Tensor, is_label: tf.Tensor):
    log_normaliser = tf.reduce_logsumexp(logits, axis=-1)

    def gradient(d_label: tf.Tensor, d_mean: tf.Tensor) -> tuple[tf.Tensor, None]:
        likelihoods = tf.exp(logits - log_normaliser[..., None])
        share = d_mean[..., None] / logits.shape[-1]
        of_label = tf.where(is_label, d_label[..., None] + share, share)
        return likelihoods * (d_label + d_mean)[..., None] - of_label, None

    log_likelihood = tf.reduce_sum(tf.where(is_label, logits, 0.0), axis=-1)
    return (log_normaliser - log_likelihood, log_normaliser - tf.reduce_mean(logits, axis=-1)), gradient
