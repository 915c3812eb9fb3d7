"""For tests of translation: a tiny model, batches of sentences to copy, and the loss, computed eagerly."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from lingvo_moe import tree
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.lazy import tf
from lingvo_moe.models.translation import Translation
from lingvo_moe.testing import harness

VOCABULARY, BATCH, LENGTH = 16, 16, 8
MODEL = Translation(
    source_vocabulary=VOCABULARY,
    target_vocabulary=VOCABULARY,
    num_layers=4,
    model_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_experts=8,
    num_groups=8,
    input_dropout=0.1,
    residual_dropout=0.1,
    attention_dropout=0.1,
    label_smoothing=0.1,
    unroll=True,
)
# What is trained on several meshes: each kind of layer once, in either stack, which compiles in half the time.
TRAINED = dataclasses.replace(MODEL, num_layers=2, encoder_layer_pattern=("dense",), layer_pattern=("moe",))
PLAIN = dataclasses.replace(MODEL, input_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0, label_smoothing=0.0)
TIED = dataclasses.replace(PLAIN, tied_embeddings=True)
BIASED = dataclasses.replace(MODEL, biases=True, norm_epsilon=1e-3, position_offset=2)  # as fairseq's models
MARIAN = dataclasses.replace(TIED, biases=True, post_norm=True, wavelengths="paper", logits_bias=True)  # as Marian's
# As T5 v1.1, with distances that share a bucket.
T5 = dataclasses.replace(
    TIED,
    tied_softmax=False,
    excluded_ids=(2,),  # bos
    norm="rms",
    num_experts=0,
    layer_pattern=("dense:activation=gelu:gated=true",),
    relative_buckets=8,
    relative_distance=6,
)

# A loss of about 3 nats through some 50 float32 products and sums in a row, ordered differently.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING


def side(sentences: list[list[int]], segments: list[list[int]], with_labels: bool) -> dict:
    """One side of a batch from rows of ids and of segments, shifted right within each segment for a target."""
    shape = (len(sentences), max(map(len, sentences)))
    ids, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(3))
    for row, (tokens, numbers) in enumerate(zip(sentences, segments)):
        ids[row, : len(tokens)], segment_ids[row, : len(numbers)] = tokens, numbers
        positions[row, : len(numbers)] = [numbers[:t].count(number) for t, number in enumerate(numbers)]
    fields = {"ids": ids, "segment_ids": segment_ids, "positions": positions}
    if not with_labels:
        return fields
    shifted = np.where(positions == 0, 2, np.roll(ids, 1, axis=1))
    return fields | {"ids": np.where(segment_ids == 0, 0, shifted), "labels": ids}


def copying(step: int) -> dict:
    """Random sentences of different lengths, to be copied."""
    random = np.random.default_rng(step)
    lengths = [LENGTH, *random.integers(LENGTH // 2, LENGTH + 1, BATCH - 1)]
    sentences = [list(random.integers(4, VOCABULARY, length)) for length in lengths]
    ones = [[1] * len(sentence) for sentence in sentences]
    return {"source": side(sentences, ones, False), "target": side(sentences, ones, True)}


@functools.cache
def theta(model: Translation = MODEL) -> dict:
    """Initial weights, as numpy arrays; of biases, which are zeros then, random ones."""
    flat, random = tree.flatten(model.weights()), np.random.default_rng(2)
    values = {path: initial_value(weight, path, tf.constant([0, 1])).numpy() for path, weight in flat.items()}
    biases = (path for path in values if path.endswith(("_bias", "softmax/bias")))
    values |= {path: random.normal(size=values[path].shape).astype(np.float32) for path in biases}
    return tree.unflatten(values)


def evaluate(batch: dict, model: Translation = MODEL, context: Context = Context()) -> dict[str, float]:
    """Loss and metrics, computed eagerly."""
    loss, metrics = model.loss(tree.map_leaves(tf.constant, theta(model)), tree.map_leaves(tf.constant, batch), context)
    return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}
