"""Sampled softmax (Jean et al. 2015): the cross-entropy of training, with a part of the vocabulary instead of all.

On a CPU the softmax of a small model can take a third of a training step. Evaluation and decoding use all of it.
"""

from __future__ import annotations

import math

import numpy as np

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.embedding import Softmax
from lingvo_moe.lazy import tf
from lingvo_moe.ops.attention import MASKED_LOGIT


def sampled_cross_entropy(
    theta: dict, inputs: tf.Tensor, labels: tf.Tensor, num_candidates: int, context: Context
) -> tf.Tensor:
    """The cross-entropy of each label against candidates, which the whole batch shares.

    The vocabulary is divided into intervals (`interval_boundaries`), of each of which one id is drawn. It counts as
    often as its interval has ids, so the sum of exponentials of all ids but the label is estimated without bias; its
    logarithm is on average slightly too small.

    Args:
      theta: the weights of `Softmax`, or an embedding's `table`.
      inputs: `[B, T, M]`.
      labels: `[B, T] int32`.
      num_candidates: C, at least 2 and at most V.
      context: of training: candidates are drawn with its seed.

    Returns:
      `[B, T] float32`, in nats.
    """
    ((name, weights),) = theta.items()
    axis = 0 if name == "table" else 1  # of the ids
    boundaries = interval_boundaries(num_candidates, weights.shape[axis])
    widths = np.diff(boundaries).astype(np.float32)
    interval_of_id = np.repeat(np.arange(num_candidates, dtype=np.int32), np.diff(boundaries))
    ids = boundaries[:-1] + tf.cast(context.uniform((num_candidates,), "candidates") * widths, tf.int32)
    candidates = {name: tf.gather(weights, ids, axis=axis)}
    logits = Softmax(vocabulary=num_candidates, model_dim=inputs.shape[-1])(candidates, inputs, context)
    with tf.name_scope("softmax"):
        # Only the candidate of the label's interval can be the label. Comparing all ids with each label gives the same,
        # but XLA then draws the ids again for each label: a twentieth of a step.
        of_interval = tf.gather(interval_of_id, labels)
        excluded = tf.where(tf.equal(tf.gather(ids, of_interval), labels), of_interval, -1)
        is_label = tf.equal(np.arange(num_candidates, dtype=np.int32), excluded[..., None])
        others = tf.where(is_label, MASKED_LOGIT, logits + np.log(widths))
        vectors = tf.gather(weights, labels, axis=axis)
        equation = "btm,btm->bt" if name == "table" else "btm,mbt->bt"
        of_label = tf.einsum(equation, tf.cast(inputs, tf.float32), vectors)
        return tf.nn.softplus(tf.reduce_logsumexp(others, axis=-1) - of_label)


def interval_boundaries(number: int, vocabulary: int) -> np.ndarray:
    """Divides the ids of a vocabulary into intervals whose lengths grow in proportion to the id.

    Tokenizers number pieces by frequency, and the frequency of words falls with the inverse of their rank. So each
    interval has about the same number of a text's tokens, except the first ones, of one id each, which have more.

    Args:
      number: of intervals, at least 2 and at most `vocabulary`.
      vocabulary: V.

    Returns:
      `[number + 1] int32`: where each interval begins, and the end of the last, `vocabulary`.
    """
    # The fewest single ids with which the next interval has at least one id.
    single = next(
        count
        for count in range(1, number + 1)
        if count + math.log(vocabulary / count) / math.log1p(1 / count) >= number
    )
    growing = np.geomspace(single, vocabulary, number - single + 1)
    return np.concatenate([np.arange(single), np.round(growing)]).astype(np.int32)
