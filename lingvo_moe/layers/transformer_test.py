"""Layers are pre-norm and residual, stacks are layers in order, and decoding steps equal the whole sequence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.attention import MultiHeadAttention, causal_mask, segment_mask
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.feed_forward import DenseFeedForward
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.layers.relative_bias import RelativeBias
from lingvo_moe.layers.transformer import Masks, TransformerLayer, TransformerStack
from lingvo_moe.lazy import tf
from lingvo_moe.ops.attention import CACHED_AXES
from lingvo_moe.testing import harness
from lingvo_moe.utils import processor

pytestmark = pytest.mark.slow

BATCH, LENGTH, SOURCE, MODEL = 2, 4, 3, 8
# Elements are about 1; four layers of products over 8 and 16, summed in another order.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING

ATTENTION = MultiHeadAttention(model_dim=MODEL, num_heads=2, head_dim=4)
DENSE = DenseFeedForward(model_dim=MODEL, hidden_dim=16)
EXPERTS = MixtureOfExperts(model_dim=MODEL, hidden_dim=16, num_experts=4, num_groups=2)
LAYER = TransformerLayer(attention=ATTENTION, feed_forward=DENSE, has_cross_attention=True)
STACK = TransformerStack(pattern=(LAYER, dataclasses.replace(LAYER, feed_forward=EXPERTS)), repeats=2)
DENSE_STACK = TransformerStack(pattern=(LAYER,), repeats=2, unroll=True)


def inputs_of(layer) -> dict:
    """Random weights, all of them unlike their initial values, and random sequences."""
    random = np.random.default_rng(0)
    theta = tree.map_leaves(
        lambda weight: (weight.mean + (weight.stddev or 0.3) * random.normal(size=weight.shape)).astype(np.float32),
        layer.weights(),
    )
    return {
        "theta": theta,
        "inputs": random.normal(size=(BATCH, LENGTH, MODEL)).astype(np.float32),
        "memory": random.normal(size=(BATCH, SOURCE, MODEL)).astype(np.float32),
    }


def masks_of(length: int = LENGTH) -> Masks:
    segments, source = tf.ones((BATCH, length), tf.int32), tf.constant([[1, 1, 1], [1, 1, 0]])
    return Masks(causal_mask(segments), tf.equal(segments, 0), segment_mask(segments, source))


def call(layer, inputs: dict, context: Context = Context()) -> tuple[tf.Tensor, dict]:
    return layer(inputs["theta"], inputs["inputs"], inputs["memory"], masks_of(), context)


def test_the_epsilon_is_that_of_every_normalisation():
    """With a huge one, sublayers without biases read and add nothing, and the outputs are the scaled inputs."""
    inputs = inputs_of(STACK)
    inputs["memory"][:] = 0.0  # which is normalised in the encoder
    for path, weight in tree.flatten(inputs["theta"]).items():
        if "norm/" in path:
            weight[:] = path.endswith("scale")
    layers = tuple(dataclasses.replace(layer, norm_epsilon=1e12) for layer in STACK.pattern)
    outputs, _ = call(dataclasses.replace(STACK, pattern=layers), eager(inputs))
    centred = inputs["inputs"] - inputs["inputs"].mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(1e6 * outputs.numpy(), centred, atol=1e-4)


def eager(inputs: dict) -> dict:
    return tree.map_leaves(tf.constant, inputs)


def normalised(theta: dict, inputs: np.ndarray) -> tf.Tensor:
    centred = inputs - inputs.mean(-1, keepdims=True)
    return tf.constant(centred / np.sqrt(inputs.var(-1, keepdims=True) + 1e-6) * theta["scale"] + theta["bias"])


def by_sublayers(
    layer: TransformerLayer, theta: dict, outputs: np.ndarray, memory: tf.Tensor
) -> tuple[np.ndarray, dict]:
    """x + f(norm(x)) for each sublayer in turn."""
    masks, context = masks_of(), Context()
    normed = normalised(theta["self_attention"]["norm"], outputs)
    outputs = outputs + ATTENTION(theta["self_attention"], normed, normed, masks.self_attention, context).numpy()
    normed = normalised(theta["cross_attention"]["norm"], outputs)
    outputs = outputs + ATTENTION(theta["cross_attention"], normed, memory, masks.cross_attention, context).numpy()
    normed = normalised(theta["feed_forward"]["norm"], outputs)
    fed, metrics = layer.feed_forward(theta["feed_forward"], normed, masks.paddings, context)
    return outputs + fed.numpy(), metrics


def test_a_layer_is_post_norm_if_it_says_so():
    """norm(x + f(x)) for each sublayer in turn; a stack of such layers has no normalisation of its own."""
    layer, inputs = dataclasses.replace(LAYER, post_norm=True), eager(inputs_of(LAYER))
    theta, outputs, masks, context = inputs["theta"], inputs["inputs"], masks_of(), Context()
    attended = ATTENTION(theta["self_attention"], outputs, outputs, masks.self_attention, context)
    outputs = normalised(theta["self_attention"]["norm"], (outputs + attended).numpy())
    attended = ATTENTION(theta["cross_attention"], outputs, inputs["memory"], masks.over_memory, context)
    outputs = normalised(theta["cross_attention"]["norm"], (outputs + attended).numpy())
    fed, _ = DENSE(theta["feed_forward"], outputs, masks.paddings, context)
    expected = normalised(theta["feed_forward"]["norm"], (outputs + fed).numpy())
    found, _ = call(layer, inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    stack = dataclasses.replace(DENSE_STACK, pattern=(layer,), repeats=1)
    assert stack.weights().keys() == {"layer_0"} == DENSE_STACK.weights().keys() - {"norm"}
    stacked = {"layer_0": tree.map_leaves(lambda weight: weight[None], theta)}
    of_stack, _ = call(stack, {**inputs, "theta": stacked})
    np.testing.assert_allclose(of_stack, expected, rtol=0, atol=TOLERANCE)


def test_a_layer_is_pre_norm_and_residual():
    inputs = eager(inputs_of(LAYER))
    expected, _ = by_sublayers(LAYER, inputs["theta"], inputs["inputs"].numpy(), inputs["memory"])
    found, metrics = call(LAYER, inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert metrics == {}


def test_an_encoder_layer_has_no_cross_attention():
    encoder = dataclasses.replace(LAYER, has_cross_attention=False)
    assert set(encoder.weights()) == {"self_attention", "feed_forward"}
    assert set(LAYER.weights()) == {"self_attention", "cross_attention", "feed_forward"}


def test_residual_dropout_differs_between_sublayers():
    """Where norms return a constant, so does every sublayer; one common mask would leave two sums, not up to eight."""
    layer = dataclasses.replace(LAYER, residual_dropout=0.5)
    inputs = eager(inputs_of(LAYER))
    np.testing.assert_array_equal(call(layer, inputs)[0], call(LAYER, inputs)[0])
    for block in inputs["theta"].values():
        block["norm"] = {"scale": tf.zeros(MODEL), "bias": tf.ones(MODEL)}
    inputs["memory"] = tf.ones_like(inputs["memory"])
    added = (call(layer, inputs, Context(seed=tf.constant([1, 2])))[0] - inputs["inputs"]).numpy()
    sums = [len(np.unique(np.round(channel, 4))) for channel in added.reshape(-1, MODEL).T]
    assert min(sums) > 2


@pytest.mark.parametrize("way", [{"unroll": True}, {}, {"remat": "full"}, {"remat": "keep_hidden"}])
def test_a_stack_is_its_period_repeated_and_normalised(way):
    """Dense, MoE, dense, MoE, each with its own slice of the stacked weights; metrics are means over MoE layers."""
    inputs = inputs_of(STACK)
    tensors = eager(inputs)
    outputs, halves = inputs["inputs"], []
    for repeat in range(STACK.repeats):
        for index, layer in enumerate(STACK.pattern):
            theta = tree.map_leaves(lambda weight, i=repeat: weight[i], tensors["theta"][f"layer_{index}"])
            outputs, metrics = by_sublayers(layer, theta, outputs, tensors["memory"])
        halves.append(metrics)
    found = harness.run(lambda i: dict(zip(("outputs", "metrics"), call(dataclasses.replace(STACK, **way), i))), inputs)
    expected = normalised(tensors["theta"]["norm"], outputs)
    np.testing.assert_allclose(found.pop("outputs"), expected, rtol=0, atol=TOLERANCE)
    assert set(found) == {f"metrics/{name}" for name in EXPERTS.metric_names}
    for path, value in found.items():
        expected = np.mean([half[path.removeprefix("metrics/")] for half in halves])
        np.testing.assert_allclose(value, expected, rtol=0, atol=TOLERANCE, err_msg=path)


def test_a_pipeline_of_one_microbatch_draws_the_numbers_of_a_stack_without_one():
    """Results depend on the number of microbatches, and on nothing else of a pipeline."""
    layer = dataclasses.replace(LAYER, residual_dropout=0.5)
    stack = dataclasses.replace(DENSE_STACK, pattern=(layer,), unroll=False, remat="full")
    piped = dataclasses.replace(stack, pipeline="gpipe", stages=2)

    def outputs(inputs: dict) -> dict:
        context = Context(seed=tf.constant([1, 2]))
        return {"plain": call(stack, inputs, context)[0], "piped": call(piped, inputs, context)[0]}

    found = harness.run(outputs, inputs_of(stack))
    np.testing.assert_allclose(found["piped"], found["plain"], rtol=0, atol=TOLERANCE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow(DenseFeedForward):
    """A user's layer that drops a channel, or returns `metric`, which it does not declare."""

    metric: str = ""

    metric_names = ("open_gates",)

    def __call__(self, theta, inputs, paddings, context):
        outputs, _ = super().__call__(theta, inputs, paddings, context)
        metrics = {self.metric or "open_gates": tf.constant(0.0)}
        return (outputs if self.metric else outputs[..., 1:]), metrics


@pytest.mark.parametrize(
    "way", [{"unroll": True}, {"remat": "full"}, {"remat": "full", "pipeline": "gpipe", "stages": 2, "microbatches": 2}]
)
def test_what_a_malformed_layer_returns_is_named(way):
    """In a loop and in a pipeline, too, whose tracing hides where an addition fails."""
    for metric, message in (
        ("open", "but a call returned open"),
        ("", r"float32 \[.*, 7\]; expected a float32 \[.*, 8\]"),
    ):
        layer = dataclasses.replace(LAYER, feed_forward=Narrow(model_dim=MODEL, hidden_dim=16, metric=metric))
        stack = TransformerStack(pattern=(layer,), repeats=2, **way)
        with pytest.raises(UserError, match=f"^feed-forward layer 'Narrow': .*{message}"):
            harness.lower_for(lambda inputs, stack=stack: {"outputs": call(stack, inputs)[0]}, inputs_of(stack))


def test_a_dense_stack_has_no_metrics():
    assert DENSE_STACK.metric_names == ()
    assert call(DENSE_STACK, eager(inputs_of(DENSE_STACK)))[1] == {}


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_the_encoders_outputs_are_projected_as_in_training(platform, monkeypatch):
    """Keys and values of every layer, also where the operands of projections are rounded."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    context = Context(platform=platform, matmul_precision="bfloat16")
    inputs = eager(inputs_of(DENSE_STACK))
    stack = dataclasses.replace(DENSE_STACK, unroll=False)
    caches = stack.start(stack.prepare_decoding(inputs["theta"], context), BATCH, LENGTH, context, inputs["memory"])
    names = ("memory_keys", "memory_values")
    found = {name: tf.concat([part["layer_0"][name] for part in caches.values()], axis=0) for name in names}
    for repeat in range(stack.repeats):
        theta = tree.map_leaves(lambda w, i=repeat: w[i], inputs["theta"]["layer_0"]["cross_attention"])
        keys, values = ATTENTION.keys_values(theta, inputs["memory"], context)
        of_layer = (found[name][repeat].numpy() for name in names)
        for cached, logical_axes, projected in zip(of_layer, CACHED_AXES, (keys, values)):
            expected = tf.einsum(f"BLND->{logical_axes}", projected)
            np.testing.assert_allclose(cached, expected, rtol=0, atol=TOLERANCE, err_msg=logical_axes)


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_hypotheses_attend_to_the_distances_of_their_own_positions(platform):
    """Of two that share a cache, each has the outputs of a sequence of its own: slot s has the position s // 2.

    A cache is read before the new positions are written, or a part of it after that.
    """
    size, context = 2, Context(platform=platform)
    bias = RelativeBias(model_dim=MODEL, num_heads=2, buckets=4, distance=3, bidirectional=False)
    stack = dataclasses.replace(DENSE_STACK, relative_bias=bias, unroll=False)
    inputs = inputs_of(stack)
    sequences = np.random.default_rng(1).normal(size=(BATCH, size, LENGTH, MODEL)).astype(np.float32)

    def stepwise(inputs: dict) -> dict:
        theta, slots = stack.prepare_decoding(inputs["theta"], context), tf.range(LENGTH * size)
        caches = stack.start(theta, BATCH, LENGTH * size, context, inputs["memory"])
        outputs, paddings = [], tf.zeros((BATCH, size), tf.bool)
        for t in range(LENGTH):
            own = (slots % size == tf.range(size)[:, None]) & (slots // size <= t)
            of_memory = tf.repeat(masks_of(1).over_memory, size, axis=1)
            masks = Masks(tf.tile(own[None], (BATCH, 1, 1)), paddings, of_memory)
            column, caches = stack.step(theta, inputs["inputs"][:, :, t], caches, tf.constant(t * size), masks, context)
            outputs.append(column)
        return {"outputs": tf.stack(outputs, axis=2)}

    found = harness.run(stepwise, {**inputs, "inputs": sequences})["outputs"]
    for k in range(size):
        whole, _ = call(stack, eager({**inputs, "inputs": sequences[:, k]}))
        np.testing.assert_allclose(found[:, k], whole, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("platform", ["", "cpu"])
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("columns", [(1,) * LENGTH, (3, 1, LENGTH - 4)], ids=str)
def test_steps_over_a_cache_equal_the_whole_sequence(unroll, platform, columns):
    """One position at a time as decoding does, or several as prompts are read, against causal attention over all.

    A cache is read before the new positions are written, or after that.
    """
    stack, context = dataclasses.replace(DENSE_STACK, unroll=unroll), Context(platform=platform)

    def stepwise(inputs: dict) -> dict:
        theta = stack.prepare_decoding(inputs["theta"], context)
        caches = stack.start(theta, BATCH, LENGTH, context, inputs["memory"])
        outputs, t = [], 0
        for count in columns:
            many = count > 1 and not t  # the first of several; a single one is read by an ordinary step
            sees = tf.range(count if many else LENGTH)[None] <= tf.range(t, t + count)[:, None]
            column, caches = stack.step(
                theta,
                inputs["inputs"][:, t : t + count],
                caches,
                None if many else tf.constant(t),
                dataclasses.replace(masks_of(count), self_attention=tf.tile(sees[None], (BATCH, 1, 1))),
                context,
            )
            outputs.append(column)
            t += count
        return {"outputs": tf.concat(outputs, axis=1)}

    inputs = inputs_of(DENSE_STACK)
    whole = call(DENSE_STACK, eager(inputs))[0]
    np.testing.assert_allclose(harness.run(stepwise, inputs)["outputs"], whole, rtol=0, atol=TOLERANCE)
