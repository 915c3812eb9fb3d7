"""A beam search that reorders its caches: each hypothesis has keys and values of its own.

The flat beam search moves nothing, and attends to the positions of all hypotheses of a sentence instead. Here a
hypothesis is a row of the batch, as in most toolkits, and so are the source's keys and values. Otherwise the search is
the same, except that rows never leave the batch; in the benchmark no search ends before the maximum length.
"""

from __future__ import annotations

from lingvo_moe import tree
from lingvo_moe.decoding.flat_beam_search import BeamSearch, flat_beam_search
from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program, lower
from lingvo_moe.protocols import DecodingModel
from lingvo_moe.steps import Steps


def decode(steps: Steps, source_specs: dict, search: BeamSearch) -> Program:
    """Returns the program of `Steps.decode_prepared` with reordered caches."""
    model = steps.model
    assert isinstance(model, DecodingModel), "a translation model decodes"
    size = search.beam_size
    context = Context(steps.layout, platform=steps.platform, matmul_precision=steps.matmul_precision)

    def function(inputs: dict) -> dict:
        theta, source = inputs["theta"], inputs["source"]
        state = model.start_decoding(theta, source, search.max_length, context)
        state = {
            "caches": tree.map_leaves(lambda cache: tf.repeat(cache, size, axis=1), state["caches"]),
            "source_segments": tf.repeat(state["source_segments"], size, axis=0),
        }

        def step(state, ids, paddings, position, start, mask):
            del start
            rows = _parents(mask, position, size)
            state = dict(state, caches=_moved(state["caches"], rows))
            seen = tf.tile((tf.range(search.max_length) <= position)[None, None], [rows.shape[0], 1, 1])
            ids, paddings = tf.reshape(ids, (-1, 1)), tf.reshape(paddings, (-1, 1))
            logits, state = model.decode_step(theta, state, ids, paddings, position, position, seen, context)
            return tf.reshape(logits, (-1, size, logits.shape[-1])), state

        present = tf.reduce_any(tf.not_equal(source["segment_ids"], 0), axis=1)
        found = flat_beam_search(search, step, state, present, context)
        return {"ids": found.ids, "scores": found.scores, "lengths": found.lengths}

    inputs = {"theta": steps.prepared_specs(), "source": source_specs}
    return lower("decode", function, inputs, {"ids": "BTL", "scores": "BT", "lengths": "BT"}, steps.layout)


def _parents(mask: tf.Tensor, position: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the row `[B * K]` that each hypothesis continues.

    It is the one whose last position its `mask [B, K, T*K]` shows.
    """
    batch = mask.shape[0]
    before = tf.slice(mask, [0, 0, tf.maximum(position - 1, 0) * size], [batch, size, size])
    parents = tf.where(
        position > 0, tf.argmax(tf.cast(before, tf.int32), axis=-1, output_type=tf.int32), tf.range(size)
    )
    return tf.reshape(parents + size * tf.range(batch)[:, None], (-1,))


def _moved(caches: dict, rows: tf.Tensor) -> dict:
    """Reorders the rows of self-attention's keys and values; the source's are equal in all rows of a sentence."""

    def moved(cache: tf.Tensor) -> tf.Tensor:
        # As matrices: XLA copies twice more what it gathers along an inner dimension.
        layers = [tf.gather(tf.reshape(layer, (layer.shape[0], -1)), rows) for layer in tf.unstack(cache)]
        return tf.reshape(tf.stack(layers), cache.shape)

    return tree.unflatten(
        {path: cache if "memory_" in path else moved(cache) for path, cache in tree.flatten(caches).items()}
    )
