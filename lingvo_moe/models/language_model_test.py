"""A language model sees no later token; packing, padding and the way of repeating layers do not change its loss."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.lazy import tf
from lingvo_moe.models.language_model import LanguageModel
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

VOCABULARY, BATCH, LENGTH = 16, 8, 8
MODEL = LanguageModel(
    target_vocabulary=VOCABULARY,
    num_layers=4,
    model_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_experts=8,
    num_groups=8,
    unroll=True,
)
# As in testing.translation: some 50 float32 products and sums in a row, ordered differently.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING
WAYS = {"scan": {}, **{remat: {"remat": remat} for remat in ("full", "keep_outputs", "keep_hidden")}}


def target(rows: list[list[list[int]]]) -> dict:
    """The target side of a batch: each row holds some texts, packed."""
    fields = {name: np.zeros((len(rows), LENGTH), np.int32) for name in ("ids", "labels", "segment_ids", "positions")}
    for row, texts in enumerate(rows):
        start = 0
        for segment, text in enumerate(texts, start=1):
            span = (row, slice(start, start + len(text)))
            fields["labels"][span], fields["ids"][span] = text, [2, *text[:-1]]
            fields["segment_ids"][span], fields["positions"][span] = segment, np.arange(len(text))
            start += len(text)
    return {"target": fields}


@functools.cache
def batch() -> dict:
    random = np.random.default_rng(0)
    return target([[random.integers(4, VOCABULARY, random.integers(3, LENGTH + 1)).tolist()] for _ in range(BATCH)])


@functools.cache
def theta() -> dict:
    values = {
        path: initial_value(weight, path, tf.constant([0, 1])).numpy()
        for path, weight in tree.flatten(MODEL.weights()).items()
    }
    return tree.unflatten(values)


def evaluate(given: dict, model: LanguageModel = MODEL, context: Context = Context()) -> dict[str, float]:
    """Loss and metrics, computed eagerly."""
    loss, metrics = model.loss(tree.map_leaves(tf.constant, theta()), tree.map_leaves(tf.constant, given), context)
    return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}


def test_packed_texts_have_the_loss_of_separate_ones():
    one, other = evaluate(target([[[4, 5, 6]], [[7, 8, 9, 10]]])), evaluate(target([[[7, 8, 9, 10], [4, 5, 6]]]))
    assert one["tokens"] == other["tokens"] == 7
    np.testing.assert_allclose(one["cross_entropy"], other["cross_entropy"], rtol=TOLERANCE)


def test_tied_embeddings_are_the_softmax_of_the_transposed_table():
    """One table instead of two, and the loss of two with its values."""
    table = tf.constant(theta()["embedding"]["table"])
    stack = tree.map_leaves(tf.constant, theta()["decoder"])
    tied = dataclasses.replace(MODEL, tied_embeddings=True)
    assert set(tied.weights()) == {"embedding", "decoder"}
    given, context = tree.map_leaves(tf.constant, batch()), Context()
    one, _ = tied.loss({"embedding": {"table": table}, "decoder": stack}, given, context)
    both = {"embedding": {"table": table}, "decoder": stack, "softmax": {"projection": tf.transpose(table)}}
    np.testing.assert_allclose(one, MODEL.loss(both, given, context)[0], rtol=TOLERANCE)


def test_ids_under_padding_do_not_change_the_loss():
    changed = {
        "target": {
            name: values if name == "segment_ids" else np.where(batch()["target"]["segment_ids"] == 0, 3, values)
            for name, values in batch()["target"].items()
        }
    }
    assert evaluate(batch()) == evaluate(changed)


@pytest.mark.parametrize("position", [1, 4, 7])
def test_no_token_sees_a_later_one(position):
    """The loss of the first labels alone does not change with the tokens after them."""
    text = [4, 5, 6, 7, 8, 9, 10, 11]
    changed = [*text[:position], *([12] * (LENGTH - position))]

    def loss_of_first(tokens: list[int]) -> float:
        given = target([[tokens]])
        logits, labels = logits_of(given), given["target"]["labels"]
        return float(
            tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels[:, :position], logits[:, :position]))
        )

    assert loss_of_first(text) == loss_of_first(changed)


def logits_of(given: dict) -> tf.Tensor:
    """The model's logits `[B, T, V]`, caught where its loss is computed."""
    caught = []

    class Catching(LanguageModel):
        def _cross_entropy(self, theta, outputs, labels, context):
            caught.append(self._softmax(self.target_vocabulary)(theta, outputs, context))
            return super()._cross_entropy(theta, outputs, labels, context)

    evaluate(given, Catching(**{field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)}))
    return caught[0]


def test_loss_is_cross_entropy_plus_k_aux():
    for k in (0.0, 0.01, 2.0):
        found = evaluate(batch(), dataclasses.replace(MODEL, aux_loss_weight=k))
        np.testing.assert_allclose(found["loss"], found["cross_entropy"] + k * found["aux_loss"], rtol=TOLERANCE)


def with_gradients(model: LanguageModel, layout: Layout, platform: str = ""):
    """Loss and gradients of all weights."""

    def function(inputs: dict) -> dict:
        with tf.GradientTape() as tape:
            leaves = tree.flatten(inputs["theta"])
            tape.watch(list(leaves.values()))
            loss, _ = model.loss(inputs["theta"], inputs["batch"], Context(layout, platform=platform))
        found = tape.gradient(loss, list(leaves.values()))
        return {"loss": loss, "gradients": tree.unflatten(dict(zip(leaves, map(tf.convert_to_tensor, found))))}

    return function


def run(model: LanguageModel, layout: Layout = Layout(), platform: str = "") -> dict[str, np.ndarray]:
    logical_axes = {f"theta/{path}": weight.logical_axes for path, weight in tree.flatten(model.weights()).items()}
    logical_axes |= {f"gradients/{path.removeprefix('theta/')}": name for path, name in logical_axes.items()}
    logical_axes |= {f"batch/target/{name}": "BT" for name in batch()["target"]}
    inputs = {"theta": theta(), "batch": batch()}
    return harness.run(with_gradients(model, layout, platform), inputs, layout, logical_axes)


@functools.cache
def unrolled() -> dict[str, np.ndarray]:
    return run(MODEL)


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]):
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=TOLERANCE)
    for path, value in expected.items():
        np.testing.assert_allclose(
            found[path], value, rtol=0, atol=TOLERANCE * max(np.abs(value).max(), 1e-3), err_msg=path
        )


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_repeating_layers_has_the_same_loss_and_gradients(way):
    assert_equal(run(dataclasses.replace(MODEL, unroll=False, **WAYS[way])), unrolled())


@pytest.mark.parametrize("way", [{"unroll": True}, {"unroll": False}, {"unroll": False, "remat": "keep_hidden"}])
def test_gradients_for_a_gpu_are_the_same(way):
    """Those of attention and ReLU are written out for it, and a checkpoint policy keeps another tensor."""
    assert_equal(run(dataclasses.replace(MODEL, **way), Layout.of(DeviceMesh((4, 2))), "gpu"), unrolled())


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_partitioned_equals_unpartitioned(mesh):
    assert_equal(
        run(dataclasses.replace(MODEL, unroll=False, remat="keep_hidden"), Layout.of(DeviceMesh.parse(mesh))),
        unrolled(),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_layers": 3},
            "num_layers is 3; each stack repeats the layer pattern dense,moe, .* must be a multiple of 2",
        ),
        ({"num_experts": 1}, "num_experts is 1"),
        ({"activation_dtype": "float16"}, "use one of float32, bfloat16"),
    ],
)
def test_impossible_fields_are_errors_that_name_them(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(MODEL, **changes)


def test_a_dense_model_may_have_any_number_of_layers():
    assert dataclasses.replace(MODEL, num_experts=0, num_layers=3).num_weights() > 0
