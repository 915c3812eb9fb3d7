"""Packing and padding do not change the loss, meshes train equally, and the model learns."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.engines import pjrt
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.lazy import tf
from lingvo_moe.models.translation import Translation
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps
from lingvo_moe.testing import harness
from lingvo_moe.testing.translation import (
    MARIAN,
    MODEL,
    PLAIN,
    T5,
    TIED,
    TOLERANCE,
    TRAINED,
    VOCABULARY,
    copying,
    evaluate,
    side,
    theta,
)
from lingvo_moe.utils import processor

pytestmark = pytest.mark.slow

EXPERTS_IN_ENCODER = dataclasses.replace(TRAINED, encoder_layer_pattern=("moe",), layer_pattern=("dense",))
OPTIMIZER = Adafactor(learning_rate=InverseSquareRoot(peak_value=0.05, decay_after=25))

# As TOLERANCE, with 8 bits of mantissa.
BFLOAT16_TOLERANCE = 8 * harness.BFLOAT16_ROUNDING
# Four Adafactor steps amplify a first difference: a small gradient's rounding is divided by its own root mean square.
TRAINED_TOLERANCE = 1e-5


@pytest.mark.parametrize("model", [MODEL, T5], ids=["plain", "t5"])
def test_packed_sentences_have_the_loss_of_separate_ones(model):
    """Two pairs in one row, kept apart by segments, positions and masks, and routed without a capacity.

    Relative positions are the same in a row as in a sentence.
    """
    a, b = [4, 5, 6], [7, 8, 9, 10]
    ones = [[1] * len(a), [1] * len(b)]
    separate = {"source": side([b, a], [ones[1], ones[0]], False), "target": side([a, b], ones, True)}
    packed = {"source": side([b + a], [[1] * 4 + [2] * 3], False), "target": side([a + b], [[1] * 3 + [2] * 4], True)}
    one, other = evaluate(separate, model), evaluate(packed, model)
    assert one["tokens"] == other["tokens"] == 7
    np.testing.assert_allclose(one["cross_entropy"], other["cross_entropy"], rtol=TOLERANCE)


def test_tied_embeddings_are_one_table():
    """The loss is that of separate tables with the same values; the gradient is the sum of theirs."""
    table = tf.constant(theta()["target_embedding"]["table"])
    rest = {name: tree.map_leaves(tf.constant, theta()[name]) for name in ("encoder", "decoder")}
    separate = {
        **{f"{side}_embedding": {"table": tf.Variable(table)} for side in ("source", "target")},
        "softmax": {"projection": tf.Variable(tf.transpose(table))},
    }
    tied, batch = {"embedding": {"table": tf.Variable(table)}}, tree.map_leaves(tf.constant, copying(0))
    assert set(tree.flatten(TIED.weights())) == set(tree.flatten(rest)) | {"embedding/table"}
    losses, gradients = [], []
    for model, tables in ((PLAIN, separate), (TIED, tied)):
        with tf.GradientTape() as tape:
            losses.append(model.loss({**rest, **tables}, batch, Context())[0])
        found = tape.gradient(losses[-1], tree.flatten(tables))
        gradients.append({name: tf.convert_to_tensor(value).numpy() for name, value in found.items()})
    np.testing.assert_allclose(losses[0], losses[1], rtol=TOLERANCE)
    expected = sum(value.T if "softmax" in name else value for name, value in gradients[0].items())
    np.testing.assert_allclose(gradients[1]["embedding/table"], expected, rtol=1e-4, atol=1e-6)


def test_the_softmax_of_tied_embeddings_may_be_its_own():
    """Source and target share a table that is looked up alone: losses are those of three weights with these values."""
    model = dataclasses.replace(TIED, tied_softmax=False)
    assert model.tied_tables == TIED.tied_tables and "softmax/bias" not in tree.flatten(model.weights())
    assert dataclasses.replace(PLAIN, tied_softmax=False).weights() == PLAIN.weights()
    weights = theta(model)
    table, rest = weights["embedding"], {name: weights[name] for name in ("encoder", "decoder", "softmax")}
    separate = {**rest, "source_embedding": table, "target_embedding": table}
    for changes, context in ({}, Context()), ({"sampled_softmax": 8}, Context(seed=tf.constant([1, 2]))):
        losses = [
            float(dataclasses.replace(each, **changes).loss(*eager(values, copying(0)), context)[0])
            for each, values in ((model, weights), (PLAIN, separate))
        ]
        np.testing.assert_allclose(losses[0], losses[1], rtol=TOLERANCE)
    lengths = {"source": 10, "target": 7}
    positions = [model.positions_of(path, lengths) for path in ("embedding/table", "softmax/projection")]
    assert positions == [0, 7] and TIED.positions_of("embedding/table", lengths) == 7


def eager(*trees: dict) -> list[dict]:
    return [tree.map_leaves(tf.constant, values) for values in trees]


@pytest.mark.parametrize("mesh", ["8", "4x2"])
@pytest.mark.parametrize("model", [TIED, MARIAN], ids=["tied", "marian"])
def test_tied_embeddings_have_the_same_loss_and_gradient_on_every_mesh(model, mesh):
    """The table is gathered by row and multiplied as a matrix: both must be sharded alike."""
    weights, batch = model.weights(), copying(0)
    inputs, layout = {"theta": theta(model), "batch": batch}, Layout.of(DeviceMesh.parse(mesh))

    def function(inputs: dict, layout: Layout = layout) -> dict:
        with tf.GradientTape() as tape:
            tape.watch(inputs["theta"])
            loss, _ = model.loss(inputs["theta"], inputs["batch"], Context(layout))
        table = tape.gradient(loss, inputs["theta"]["embedding"]["table"])
        return {"loss": loss, "table": tf.convert_to_tensor(table)}

    axes = {f"theta/{path}": weight.logical_axes for path, weight in tree.flatten(weights).items()}
    axes |= {f"batch/{path}": "BT" for path in tree.flatten(batch)}
    found = harness.run(function, inputs, layout, axes)
    expected = function(tree.map_leaves(tf.constant, inputs), Layout())  # eagerly: nothing is compiled
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=TOLERANCE)
    atol = TOLERANCE * np.abs(expected["table"]).max()
    np.testing.assert_allclose(found["table"], expected["table"], rtol=0, atol=atol)


def t5_gradients(model: Translation = T5, layout: Layout = Layout()):
    """A function to the loss and all gradients."""

    def function(inputs: dict) -> dict:
        leaves = tree.flatten(inputs["theta"])
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            loss, _ = model.loss(inputs["theta"], inputs["batch"], Context(layout))
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, list(leaves.values())))
        return {"loss": loss, "gradients": tree.unflatten(dict(zip(leaves, gradients)))}

    return function


@functools.cache
def expected_of_t5() -> dict[str, np.ndarray]:
    """Eagerly, so that nothing is compiled; each layer is in the graph."""
    (inputs,) = eager({"theta": theta(T5), "batch": copying(0)})
    return harness.arrays(t5_gradients()(inputs))


@pytest.mark.parametrize("mesh, remat", [("1", "full"), ("2", "none"), ("4x2", "keep_hidden"), ("8", "full")])
def test_t5_has_the_same_loss_and_gradients_on_every_mesh(mesh, remat):
    """With scanned layers, whose bias is a constant with a gradient, recomputed or not; heads may be sharded."""
    inputs, layout = {"theta": theta(T5), "batch": copying(0)}, Layout.of(DeviceMesh.parse(mesh))
    weights = {path: weight.logical_axes for path, weight in tree.flatten(T5.weights()).items()}
    axes = {f"{of}/{path}": letters for of in ("theta", "gradients") for path, letters in weights.items()}
    axes |= {f"batch/{path}": "BT" for path in tree.flatten(inputs["batch"])}
    model = dataclasses.replace(T5, unroll=False, remat=remat)
    found, expected = harness.run(t5_gradients(model, layout), inputs, layout, axes), expected_of_t5()
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=TOLERANCE)
    for path in weights:
        gradient = expected[f"gradients/{path}"]
        atol = 4 * TOLERANCE * np.abs(gradient).max()
        np.testing.assert_allclose(found[f"gradients/{path}"], gradient, rtol=0, atol=atol, err_msg=path)
    for stack, used in (("encoder", {0, 1, 2, 3, 5, 6, 7}), ("decoder", {0, 1, 2, 3, 4, 6, 7})):
        # Of the encoder, half is for later keys, which are not at distance 0. Of the decoder, all is for earlier keys,
        # and no distance is in bucket 5, which would be from 4 * 1.5^(1/4) on and below 4 * 1.5^(2/4).
        largest = np.abs(found[f"gradients/{stack}/relative_bias"]).max(axis=1)
        assert set(np.flatnonzero(largest)) == used and largest.max() > 1e-3


def test_a_model_with_relative_positions_has_no_others():
    """Packing aside, positions are not read; without the biases, sentences would be bags of words."""
    batch, moved = copying(0), copying(0)
    for part in moved.values():
        part["positions"] += 3
    assert evaluate(batch, T5) == evaluate(moved, T5)
    assert evaluate(batch, T5) != evaluate(batch, dataclasses.replace(T5, relative_distance=7))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"relative_buckets": 2}, "relative_buckets is 2; expected an even number from 4 on"),
        ({"relative_buckets": 7}, "relative_buckets is 7; expected an even number from 4 on"),
        ({"relative_buckets": 2048}, "relative_buckets is 2048; expected at least 0 and at most 1,024"),
        ({"relative_distance": 4}, "relative_distance is 4; expected more than 4: half of the 8 buckets"),
        ({"relative_distance": 0}, "relative_distance is 0; expected at least 1"),
        ({"position_offset": 2}, "position_offset is 2, but with model.relative_buckets=8 there are no sinusoids"),
        ({"wavelengths": "paper"}, "wavelengths is paper, but with model.relative_buckets=8 there are no sinusoids"),
        (
            {"unroll": False, "remat": "full", "microbatches": 2},
            "model.pipeline=none, model.microbatches=2: model.relative_buckets is 8, .* model.microbatches=1, or --set",
        ),
    ],
)
def test_fields_that_do_not_fit_relative_positions_are_errors(changes, message):
    """Each names the fields and what to do."""
    with pytest.raises(UserError, match=message):
        dataclasses.replace(T5, **changes)


def test_twin_keys_start_equal_to_queries_in_cross_attention_alone():
    """The other weights, and all weights without the setting, stay as they are."""

    def initial(model: Translation) -> dict[str, np.ndarray]:
        flat = tree.flatten(model.weights())
        return {path: initial_value(weight, path, tf.constant([0, 1])).numpy() for path, weight in flat.items()}

    plain, twins = initial(PLAIN), initial(dataclasses.replace(PLAIN, twin_keys=True))
    changed = {path for path in plain if not np.array_equal(plain[path], twins[path])}
    assert changed == {path for path in plain if path.endswith("cross_attention/key")} and changed
    for path in changed:
        np.testing.assert_array_equal(twins[path], twins[path.replace("/key", "/query")])


def test_a_source_with_another_vocabulary_has_a_table_of_its_own():
    """Only the target's embedding is the softmax's; the loss is that of three tables with the same values."""
    tied = dataclasses.replace(TIED, source_vocabulary=VOCABULARY + 4)
    assert tied.tied_tables == {"source": "source_embedding/table", "target": "embedding/table"}
    assert TIED.tied_tables == dict.fromkeys(("source", "target"), "embedding/table") and not PLAIN.tied_tables
    weights, batch = theta(tied), copying(0)
    assert weights["source_embedding"]["table"].shape == (VOCABULARY + 4, tied.model_dim)
    batch["source"]["ids"] += 4 * (batch["source"]["ids"] == VOCABULARY - 1)  # a piece that the target lacks
    table = weights["embedding"]["table"]
    separate = {name: weights[name] for name in ("source_embedding", "encoder", "decoder")}
    separate |= {"target_embedding": {"table": table}, "softmax": {"projection": table.T}}
    losses = [
        float(model.loss(tree.map_leaves(tf.constant, each), tree.map_leaves(tf.constant, batch), Context())[0])
        for model, each in ((tied, weights), (dataclasses.replace(tied, tied_embeddings=False), separate))
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=TOLERANCE)


def test_an_encoder_may_be_deeper_than_the_decoder():
    """Each stack repeats its own pattern, and the products of attention are as counted by hand."""
    pattern = ("dense", "dense", "moe")
    model = dataclasses.replace(MODEL, num_layers=8, num_encoder_layers=6, encoder_layer_pattern=pattern)
    flat = tree.flatten(model.weights())
    assert {path: weight.shape[0] for path, weight in flat.items() if path.endswith("wo")} == {
        "encoder/layer_0/feed_forward/wo": 2,
        "encoder/layer_1/feed_forward/wo": 2,
        "encoder/layer_2/feed_forward/wo": 2,
        "decoder/layer_0/feed_forward/wo": 1,
        "decoder/layer_1/feed_forward/wo": 1,
    }
    pairs = 6 * 10 * 10 + 2 * (7 * 7 + 7 * 10)
    assert model.attention_macs({"source": 10, "target": 7}) == pairs * 2 * model.num_heads * model.head_dim


def test_ids_under_padding_do_not_change_the_loss():
    batch, changed = copying(0), copying(0)
    for part in changed.values():
        for name in set(part) - {"segment_ids"}:
            part[name] = np.where(part["segment_ids"] == 0, 3, part[name])
    for context in (Context(), Context(seed=tf.constant([1, 2]))):
        assert evaluate(batch, context=context) == evaluate(changed, context=context)


def test_amount_of_padding_does_not_change_the_loss():
    batch = copying(0)
    longer = tree.map_leaves(lambda value: np.pad(value, [(0, 2), (0, 3)]), batch)
    one, other = evaluate(batch), evaluate(longer)
    assert one["tokens"] == other["tokens"] == (batch["target"]["segment_ids"] != 0).sum()
    np.testing.assert_allclose(one["cross_entropy"], other["cross_entropy"], rtol=TOLERANCE)


def test_padding_alone_has_no_loss_and_no_gradient():
    """A batch that ran out of sentences must not make 0/0 of the weights."""
    empty, weights = tree.map_leaves(tf.zeros_like, copying(0)), tree.map_leaves(tf.constant, theta())
    with tf.GradientTape() as tape:
        tape.watch(list(tree.flatten(weights).values()))
        loss, _ = MODEL.loss(weights, empty, Context(seed=tf.constant([1, 2])))
    assert loss == 0.0
    gradients = tape.gradient(loss, list(tree.flatten(weights).values()), unconnected_gradients="zero")
    assert not any(tf.convert_to_tensor(gradient).numpy().any() for gradient in gradients)


def routed(model: Translation, values: dict) -> dict:
    """The experts and weights of every token, by layer, computed eagerly."""
    found = model.routing(*(tree.map_leaves(tf.constant, part) for part in (values, copying(0))), Context())
    return {layer: {name: value.numpy() for name, value in of_layer.items()} for layer, of_layer in found.items()}


def test_routing_names_the_expert_that_a_token_goes_to():
    """Experts that change places change their numbers and nothing else, in this layer alone; paddings go to none."""
    model = dataclasses.replace(PLAIN, num_layers=6, num_encoder_layers=4, unroll=False)
    flat = tree.flatten(model.weights())
    values = {path: initial_value(weight, path, tf.constant([0, 1])).numpy() for path, weight in flat.items()}
    before = routed(model, tree.unflatten(values))
    assert list(before) == ["encoder/2", "encoder/4", "decoder/2"]
    places = np.random.RandomState(0).permutation(model.num_experts)
    gate = values["encoder/layer_1/feed_forward/gate"]  # [R, M, E]: repeat 1 is layer 4 of the encoder
    gate[1] = gate[1][:, places]
    for name in ("wi", "wo"):
        weight = values[f"encoder/layer_1/feed_forward/{name}"]
        weight[1] = weight[1][places]
    after = routed(model, tree.unflatten(values))
    present = copying(0)["source"]["segment_ids"] != 0
    np.testing.assert_array_equal(
        places[after["encoder/4"]["experts"]][present], before["encoder/4"]["experts"][present]
    )
    for layer in ("encoder/2", "decoder/2"):
        np.testing.assert_array_equal(after[layer]["experts"], before[layer]["experts"])
    for layer in after.values():
        totals = layer["weights"].sum(axis=-1)
        np.testing.assert_allclose(totals[present], 1, rtol=TOLERANCE)
        assert not totals[~present].any()


def test_loss_is_cross_entropy_plus_k_aux():
    """GShard section 2.2; without smoothing the optimised cross-entropy is the reported one."""
    found = evaluate(copying(0), dataclasses.replace(PLAIN, aux_loss_weight=3.0))
    np.testing.assert_allclose(found["loss"], found["cross_entropy"] + 3.0 * found["aux_loss"], rtol=TOLERANCE)
    assert found["aux_loss"] >= 1 / 8**2 * (1 - TOLERANCE)
    smoothed = evaluate(copying(0))
    assert smoothed["cross_entropy"] == found["cross_entropy"] and smoothed["loss"] != found["loss"]


def test_target_is_predicted_from_earlier_tokens():
    """Changing the last token of every target changes the loss of no earlier one."""
    batch, changed = copying(0), copying(0)
    for part in (batch, changed):
        part["target"]["segment_ids"][:, -1] = 0
    changed["target"]["ids"][:, -1] = 5
    assert evaluate(batch)["cross_entropy"] == evaluate(changed)["cross_entropy"]


def test_bfloat16_is_near_float32():
    bfloat16 = dataclasses.replace(PLAIN, activation_dtype="bfloat16")
    np.testing.assert_allclose(
        evaluate(copying(0), bfloat16)["loss"], evaluate(copying(0), PLAIN)["loss"], rtol=BFLOAT16_TOLERANCE
    )


def test_word_dropout_hides_the_targets_own_words_in_training():
    """At a rate of 1 the decoder sees none of them, whatever they are; outside training all."""
    deaf = dataclasses.replace(PLAIN, word_dropout=1.0)
    batch, changed = copying(0), copying(0)
    changed["target"]["ids"] = np.where(changed["target"]["ids"] > 3, 4, changed["target"]["ids"])
    training = Context(seed=tf.constant([1, 2]))
    assert evaluate(batch, deaf, training) == evaluate(changed, deaf, training)
    assert evaluate(batch, deaf)["loss"] == evaluate(batch, PLAIN)["loss"] != evaluate(changed, deaf)["loss"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_layers": 6}, "must be a multiple of 4"),
        ({"num_layers": 0}, "num_layers is 0; expected at least 1"),
        ({"num_layers": 3, "num_experts": 0}, "must be a multiple of 2"),
        ({"num_encoder_layers": 3}, "is 3 of model.num_layers=4, so the encoder has 3 layers, .* of 2"),
        ({"num_layers": 5, "num_encoder_layers": 2}, "the decoder has 3 layers, .*pattern dense,moe"),
        ({"num_encoder_layers": 4}, "is 4, and model.num_layers, of both stacks, 4; .* fewer than all"),
        ({"num_encoder_layers": -2}, "num_encoder_layers is -2"),
        ({"num_experts": 1}, "at least 2 experts"),
        ({"activation_dtype": "float16"}, "model.activation_dtype is 'float16'; use one of float32, bfloat16"),
        ({"remat": "full"}, "model.unroll is true and model.remat full: rematerialisation needs the loop"),
        ({"remat": "ful"}, "Did you mean full"),
    ],
)
def test_impossible_fields_are_errors_that_name_them(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(MODEL, **changes)


@functools.lru_cache(maxsize=2)  # in the order of the tests below, none is compiled twice; each takes 0.2 GB
def trainer(
    model: Translation, mesh: str, layout: str = "auto", platform: str = "", precision: str = "default"
) -> pjrt.Executable:
    layout = Layout.of(DeviceMesh.parse(mesh), layout)
    specs = tree.map_leaves(lambda value: Spec(value.shape, "int32", "BT"), copying(0))
    return harness.engine(layout).compile(Steps(model, OPTIMIZER, layout, platform, precision).train(specs))


def train(model: Translation, steps: int, *where: str) -> list[dict[str, float]]:
    """The metrics of the first steps, with the `trainer` for that mesh, layout and platform."""
    executable = trainer(model, *where)
    optimizer_state = tree.map_leaves(lambda entry: np.zeros(entry.shape, np.float32), OPTIMIZER.state(model.weights()))
    counts = dict.fromkeys(("step", "skipped", "skipped_in_a_row"), np.int32(0))
    state = {**counts, "seed": np.int32([3, 4]), "theta": theta(model), "optimizer_state": optimizer_state}
    history = []
    for step in range(steps):
        outputs = executable({"state": state, "batch": copying(step)})
        state = outputs["state"]
        history.append({name: float(value) for name, value in outputs["metrics"].items()})
    return history


def test_sixty_steps_teach_copying():
    """Below ln 12, what knowing all words but not the source would give: the decoder reads the encoder."""
    losses = [metrics["cross_entropy"] for metrics in train(TRAINED, 60, "8", "auto", "cpu")]
    assert losses[0] > math.log(12) + 0.2 and np.mean(losses[-5:]) < math.log(12) - 0.2, losses


@pytest.mark.parametrize(
    "model, mesh, layout, platform",
    [
        (TRAINED, "8", "auto", "cpu"),
        (TRAINED, "8", "gshard_sharded_update", ""),
        (EXPERTS_IN_ENCODER, "4x2", "auto", ""),
    ],
)
def test_the_same_seed_has_the_same_losses_on_every_mesh(model, mesh, layout, platform):
    """With dropout, random routing and capacity cuts, on every mesh and platform.

    Each loss is of updated weights, so these are equal, too.
    """
    expected = train(model, 4, "1")
    assert max(metrics["overflow"] for metrics in expected) > 0
    for one, many in zip(expected, train(model, 4, mesh, layout, platform), strict=True):
        for name, value in one.items():
            np.testing.assert_allclose(many[name], value, rtol=TRAINED_TOLERANCE, err_msg=name)


def test_rounded_products_train_alike_unrolled_scanned_and_on_every_mesh(monkeypatch):
    """With a tied table, scans and recomputation: no product is of a form that XLA's CPU compiler lacks."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    unrolled = dataclasses.replace(TRAINED, tied_embeddings=True)
    scanned = dataclasses.replace(unrolled, unroll=False, remat="keep_outputs")
    expected = train(unrolled, 2, "1", "auto", "cpu", "bfloat16")
    for model, mesh in ((unrolled, "8"), (scanned, "4x2")):
        for one, many in zip(expected, train(model, 2, mesh, "auto", "cpu", "bfloat16"), strict=True):
            for name in ("cross_entropy", "gradient_norm"):
                np.testing.assert_allclose(many[name], one[name], rtol=harness.BFLOAT16_ROUNDING, err_msg=name)
