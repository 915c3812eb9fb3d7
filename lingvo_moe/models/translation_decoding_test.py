"""Decoding equals training: masks, positions and caches agree, whatever rows and columns it leaves out."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf
from lingvo_moe.models.translation import Translation
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps
from lingvo_moe.testing import harness
from lingvo_moe.testing.translation import (
    BATCH,
    BIASED,
    LENGTH,
    MARIAN,
    MODEL,
    T5,
    TIED,
    TOLERANCE,
    TRAINED,
    copying,
    evaluate,
    side,
    theta,
)
from lingvo_moe.utils import processor

pytestmark = pytest.mark.slow


def test_tied_embeddings_decode_as_they_train():
    """Logits of decoding steps are those of the whole sequence."""
    weights = tree.map_leaves(tf.constant, theta(TIED))
    batch = tree.map_leaves(tf.constant, copying(0))
    prepared = TIED.prepare_decoding(weights, Context())
    state = TIED.start_decoding(prepared, batch["source"], LENGTH, Context())
    nll = []
    for position in range(LENGTH):
        mask = tf.broadcast_to(tf.range(LENGTH) <= position, (BATCH, 1, LENGTH))
        ids = batch["target"]["ids"][:, position : position + 1]
        step = tf.constant(position)
        logits, state = TIED.decode_step(
            prepared, state, ids, tf.zeros(ids.shape, tf.bool), step, step, mask, Context()
        )
        labels = batch["target"]["labels"][:, position]
        nll.append(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits[:, 0]))
    present = tf.cast(tf.transpose(batch["target"]["segment_ids"]) != 0, tf.float32)
    expected = tf.reduce_sum(tf.stack(nll) * present) / tf.reduce_sum(present)
    _, metrics = TIED.loss(weights, batch, Context())
    np.testing.assert_allclose(metrics["cross_entropy"], expected, rtol=TOLERANCE)


# Two sentences and their translations.
FORCED = {
    "source": side([[5, 6, 7], [9, 8, 7, 6]], [[1] * 3, [1] * 4], False),
    "target": side([[4, 9, 5, 5, 7], [8, 6, 4, 11, 10]], [[1] * 5] * 2, True),
}


@functools.cache
def teacher_forced(model: Translation) -> np.ndarray:
    """`[B, T]`, the negative log-likelihood of each label: what it adds to the loss of its sentence's beginning."""
    rows, length = FORCED["target"]["labels"].shape
    sums = np.zeros((rows, length + 1))
    for row in range(rows):
        for end in range(1, length + 1):
            one = tree.map_leaves(lambda value, row=row: value[row : row + 1].copy(), FORCED)
            one["target"]["segment_ids"][:] = np.arange(length) < end  # every position a token, until the end
            metrics = evaluate(one, model)
            sums[row, end] = metrics["cross_entropy"] * metrics["tokens"]
    return np.diff(sums, axis=1)


@pytest.mark.parametrize(
    "platform, precision, unroll, tolerance",
    # The log-probabilities are sums of rounded operands, through some ten products in a row.
    [
        ("", "default", False, TOLERANCE),
        ("cpu", "default", True, TOLERANCE),
        ("cpu", "bfloat16", False, 4 * harness.BFLOAT16_ROUNDING),
    ],
)
@pytest.mark.parametrize("model", [MODEL, BIASED, MARIAN, T5], ids=["plain", "biased", "marian", "t5"])
def test_decoding_one_token_at_a_time_equals_teacher_forcing(
    model, platform, precision, tolerance, unroll, monkeypatch
):
    """Every step's log-probability of the label is that of the whole sequence: masks, positions and caches agree."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    weights, expected = theta(model), teacher_forced(model)
    model = dataclasses.replace(model, unroll=unroll)
    length = FORCED["target"]["ids"].shape[1]

    def stepwise(inputs: dict) -> dict:
        context, source = Context(platform=platform, matmul_precision=precision), inputs["source"]
        theta = model.prepare_decoding(inputs["theta"], context)
        state = model.start_decoding(theta, source, length, context)

        def step(t, state, nll):
            ids, labels = inputs["target"]["ids"][:, t, None], inputs["target"]["labels"][:, t]
            mask = tf.tile(tf.range(length)[None, None] <= t, (2, 1, 1))
            logits, state = model.decode_step(theta, state, ids, tf.zeros((2, 1), tf.bool), t, t, mask, context)
            here = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits[:, 0])
            return t + 1, state, tf.where(tf.range(length) == t, here[:, None], nll)

        _, _, nll = tf.while_loop(lambda t, *_: t < length, step, (tf.constant(0), state, tf.zeros((2, length))))
        return {"nll": nll}

    found = harness.run(stepwise, {"theta": weights, **FORCED})["nll"]
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    assert precision == "default" or np.abs(found - expected).max() > TOLERANCE, "nothing was rounded"


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["plain", "tied"])
@pytest.mark.parametrize("large", [10**9, 1])
def test_large_weights_are_transposed_once_for_a_cpu(model, large, monkeypatch):
    """All that a step multiplies by.

    Of each of the decoder's layers 4 and 2 matrices of attention, of every other one two more; and the softmax, unless
    it is tied: the table is its transposed projection.
    """
    monkeypatch.setattr("lingvo_moe.ops.projection.LARGE", large)
    steps, decoder = (
        Steps(dataclasses.replace(model, unroll=False), Adafactor(), Layout(), "cpu"),
        model.num_layers // 2,
    )
    paths = [path for path in tree.flatten(steps.prepared_specs()) if path.endswith("/transposed")]
    assert len(paths) == (decoder * 6 + decoder // 2 * 2 + (not model.tied_embeddings) if large == 1 else 0)


def test_transposed_weights_find_the_same(monkeypatch):
    """Hypotheses and scores, for a stack in a loop, too; with biases and a tied table, which is not transposed."""
    model = dataclasses.replace(TIED, biases=True, unroll=False)
    specs = {field: Spec((BATCH, LENGTH), "int32", "BS") for field in ("ids", "segment_ids", "positions")}
    source, search = copying(0)["source"], BeamSearch(beam_size=3, max_length=6)

    def searched(large: int) -> dict[str, np.ndarray]:
        monkeypatch.setattr("lingvo_moe.ops.projection.LARGE", large)
        decoding = Engine(1, "cpu").decoding(Steps(model, Adafactor(), Layout(), "cpu"), specs, search)
        decoding.load(theta(model))
        return {name: np.asarray(value) for name, value in decoding.decode(source).items()}

    plain, prepared = searched(10**9), searched(1)
    np.testing.assert_array_equal(prepared["ids"], plain["ids"])
    np.testing.assert_allclose(prepared["scores"], plain["scores"], rtol=TOLERANCE)


def test_weights_that_stay_as_they_are_keep_their_memory():
    """Those of the encoder and the embeddings are not there twice while others are prepared."""
    program = Steps(TIED, Adafactor(), Layout(), "cpu").prepare_decoding()
    kept, given = set(program.donated), [each.path for each in program.inputs]
    assert kept >= {path for path in given if path.startswith(("theta/encoder/", "theta/embedding/"))}
    assert not any(path.startswith("theta/decoder/layer_") for path in kept)


@pytest.mark.parametrize(("filled", "is_short"), [(4, True), (5, False)])
def test_decoding_reads_a_quarter_of_the_row_where_that_holds_all_sentences(filled, is_short):
    """The keys of the source's tokens stay the same; those of columns that are not read are zeros."""
    model = dataclasses.replace(MODEL, unroll=False)
    ids = [[5, 6, 7, 8, 9][:filled], [9, 8, 7]]
    prepared = model.prepare_decoding(tree.map_leaves(tf.constant, theta()), Context())

    def memory_of(columns: int) -> dict[str, np.ndarray]:
        source = side(ids, [[1] * len(row) for row in ids], False)
        source = tree.map_leaves(lambda field: np.pad(field, [[0, 0], [0, columns - filled]]), source)
        state = model.start_decoding(prepared, tree.map_leaves(tf.constant, source), 4, Context())
        caches = tree.flatten(state["caches"])
        keys = {path: np.asarray(cache) for path, cache in caches.items() if path.endswith("memory_keys")}
        return keys or pytest.fail("no keys of the source")

    whole, cut = memory_of(16), memory_of(filled)
    for path, keys in whole.items():
        np.testing.assert_allclose(keys[..., 0, :, :, :filled], cut[path][..., 0, :, :, :], atol=1e-6)
        np.testing.assert_allclose(keys[..., 1, :, :, :3], cut[path][..., 1, :, :, :3], atol=1e-6)
        assert (not keys[..., filled:].any()) == is_short


@pytest.mark.parametrize("unroll", [False, True])
def test_selected_rows_continue_as_in_the_whole_batch(unroll):
    """The logits of the third token, for which caches of both attentions are read, in another order of rows."""
    model, rows = dataclasses.replace(MODEL, unroll=unroll), tf.constant([2, 0])
    ids = [[5, 6, 7], [9], [8, 7, 6], [4, 4]]
    source = tree.map_leaves(tf.constant, side(ids, [[1] * len(row) for row in ids], False))
    prepared = model.prepare_decoding(tree.map_leaves(tf.constant, theta()), Context())
    tokens = tf.constant([[4, 9, 5], [7, 7, 8], [6, 10, 11], [5, 4, 12]])

    def logits(state: dict, tokens: tf.Tensor, position: int) -> tuple[tf.Tensor, dict]:
        mask = tf.broadcast_to(tf.range(3) <= position, (tokens.shape[0], 1, 3))
        paddings, step = tf.zeros((tokens.shape[0], 1), tf.bool), tf.constant(position)
        new = tokens[:, position, None]
        return model.decode_step(prepared, state, new, paddings, step, step, mask, Context())

    state = model.start_decoding(prepared, source, 3, Context())
    for position in (0, 1):
        _, state = logits(state, tokens, position)
    whole, _ = logits(state, tokens, 2)
    few, _ = logits(model.select_rows(state, rows), tf.gather(tokens, rows), 2)
    np.testing.assert_allclose(few, tf.gather(whole, rows), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "mesh", "selects"),
    [
        ({}, (1,), True),
        ({}, (2,), False),
        ({"inference_capacity_factor": 2.0}, (1,), False),
        ({"layer_pattern": ("moe:inference_capacity_factor=2",)}, (1,), False),
        ({"router": "expert_choice", "encoder_layer_pattern": ("moe",), "layer_pattern": ("dense",)}, (1,), False),
    ],
)
def test_sentences_that_compete_for_experts_stay_in_the_batch(changes, mesh, selects, monkeypatch):
    """If they left it, a translation would depend on when the searches of other sentences end."""
    selected, select_rows = [], Translation.select_rows
    monkeypatch.setattr(
        Translation, "select_rows", lambda self, *arguments: selected.append(self) or select_rows(self, *arguments)
    )
    model = dataclasses.replace(TRAINED, **changes)
    specs = {field: Spec((BATCH, LENGTH), "int32", "BS") for field in ("ids", "segment_ids", "positions")}
    Steps(model, Adafactor(), Layout.of(DeviceMesh(mesh))).decode(specs, BeamSearch(beam_size=2, max_length=4))
    assert selected == [model] * selects
