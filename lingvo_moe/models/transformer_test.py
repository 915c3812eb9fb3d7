"""What both kinds of models share: routers and dispatch, layer patterns, and layers that a user registers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer, Weight, initial_value
from lingvo_moe.layers.feed_forward import FEED_FORWARDS, register_feed_forward
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.layers.routers.base import make_router
from lingvo_moe.lazy import tf
from lingvo_moe.models.language_model import LanguageModel
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.models.translation import Translation
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

VOCABULARY, BATCH, LENGTH = 16, 8, 8
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
    residual_dropout=0.1,
    label_smoothing=0.1,
    unroll=True,
)
# A loss of about 3 nats, and its gradients, through some 50 float32 products and sums in a row, ordered differently.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING


def inputs_of(model: Transformer) -> dict:
    """Initial weights, and a batch of random sentences of different lengths."""
    weights = tree.flatten(model.weights())
    theta = {path: initial_value(weight, path, tf.constant([0, 1])).numpy() for path, weight in weights.items()}
    random = np.random.default_rng(0)
    segments = (np.arange(LENGTH) < random.integers(LENGTH // 2, LENGTH + 1, (BATCH, 1))).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))

    def words() -> np.ndarray:
        return segments * random.integers(4, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)

    side = {"segment_ids": segments, "positions": positions}
    batch = {"source": side | {"ids": words()}, "target": side | {"ids": words(), "labels": words()}}
    return {"theta": tree.unflatten(theta), "batch": batch, "seed": np.int32([3, 4])}


def loss_of(model: Translation):
    """Loss and metrics, with dropout and random routing."""

    def function(inputs: dict) -> dict:
        loss, metrics = model.loss(inputs["theta"], inputs["batch"], Context(seed=inputs["seed"]))
        return {"loss": loss, "metrics": metrics}

    return function


def training_loss(model: Translation):
    """Loss, metrics and gradients."""
    return harness.with_gradients(loss_of(model))


def test_a_translation_model_trains_equally_with_either_dispatch():
    """Same loss and gradient of every weight, in both stacks."""
    inputs = tree.map_leaves(tf.constant, inputs_of(MODEL))
    einsum, gather = (
        harness.arrays(training_loss(dataclasses.replace(MODEL, dispatch=dispatch))(inputs))
        for dispatch in ("einsum", "gather")
    )
    assert einsum["values/metrics/overflow"] > 0 and einsum["values/metrics/second_expert"] > 0
    for path, expected in einsum.items():
        np.testing.assert_allclose(
            gather[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=path
        )


@pytest.mark.parametrize("router", ["switch", "top_k:k=3"])
def test_model_trains_equally_with_either_dispatch_of_any_router(router):
    """With one choice and with three; the router's metrics are the model's."""
    model = dataclasses.replace(MODEL, router=router, num_layers=4)
    inputs = tree.map_leaves(tf.constant, inputs_of(model))
    einsum, gather = (
        harness.arrays(training_loss(dataclasses.replace(model, dispatch=dispatch))(inputs))
        for dispatch in ("einsum", "gather")
    )
    assert {f"values/metrics/{name}" for name in make_router(router).metric_names} <= einsum.keys()
    for path, expected in einsum.items():
        atol = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(gather[path], expected, rtol=0, atol=atol, err_msg=path)


def test_dispatch_is_each_layers():
    """The model's field reaches the layers with experts."""
    with_experts = dataclasses.replace(MODEL, dispatch="gather").feed_forwards("decoder")[1]
    assert isinstance(with_experts, MixtureOfExperts) and with_experts.dispatch == "gather"


@pytest.mark.parametrize("num_experts", [0, 8])
def test_unknown_dispatch_is_an_error_that_names_it(num_experts):
    """Also where no layer has experts."""
    with pytest.raises(UserError, match="dispatch is 'gater'; use one of auto, einsum, gather. Did you mean gather?"):
        dataclasses.replace(MODEL, num_experts=num_experts, dispatch="gater")


@pytest.mark.parametrize("tied", [False, True])
def test_sampled_softmax_is_for_training_alone(tied):
    """Evaluation has the loss of the whole vocabulary; with all but one id as candidates training nearly has it."""
    whole = dataclasses.replace(MODEL, label_smoothing=0.0, residual_dropout=0.0, tied_embeddings=tied)
    sampled = dataclasses.replace(whole, sampled_softmax=VOCABULARY - 1)
    inputs = tree.map_leaves(tf.constant, inputs_of(whole))
    assert sampled.weights() == whole.weights()
    evaluated = [model.loss(inputs["theta"], inputs["batch"], Context())[0] for model in (whole, sampled)]
    assert evaluated[0] == evaluated[1]
    trained = [loss_of(model)(inputs)["metrics"]["cross_entropy"] for model in (whole, sampled)]
    assert trained[0] != trained[1] and abs(trained[0] - trained[1]) < 0.2


def test_names_of_choices_and_a_bias_for_each_logit_are_checked():
    """An unknown choice is named; the candidates of a sampled softmax have no biases."""
    with pytest.raises(UserError, match="wavelengths is 'papers'; use one of tensor2tensor, paper. Did you mean pape"):
        dataclasses.replace(MODEL, wavelengths="papers")
    with pytest.raises(UserError, match="model.norm is 'rmsnorm'; use one of layer, rms. Did you mean rms"):
        dataclasses.replace(MODEL, norm="rmsnorm")
    with pytest.raises(UserError, match="model.logits_bias needs the whole vocabulary; set model.sampled_softmax=0"):
        dataclasses.replace(MODEL, label_smoothing=0.0, sampled_softmax=8, logits_bias=True)
    with pytest.raises(UserError, match="model.excluded_ids needs the whole vocabulary; set model.sampled_softmax=0"):
        dataclasses.replace(MODEL, label_smoothing=0.0, sampled_softmax=8, excluded_ids=(2,))
    with pytest.raises(UserError, match="label_smoothing is 0.1 and model.excluded_ids .2,.: smoothing would give"):
        dataclasses.replace(MODEL, label_smoothing=0.1, excluded_ids=(2,))
    with pytest.raises(UserError, match="model.excluded_ids has 1000000; expected ids from 0 to"):
        dataclasses.replace(MODEL, label_smoothing=0.0, excluded_ids=(2, 10**6))


def test_one_candidate_is_an_error():
    with pytest.raises(UserError, match="model.sampled_softmax is 1; expected at least 2 candidates, or 0"):
        dataclasses.replace(MODEL, label_smoothing=0.0, sampled_softmax=1)


def test_sampled_softmax_excludes_label_smoothing():
    """Unless the vocabulary has no more ids than candidates: then it is not sampled."""
    with pytest.raises(UserError, match="sampled_softmax is 8 and model.label_smoothing is 0.1: .* Set one of them"):
        dataclasses.replace(MODEL, sampled_softmax=8)
    whole = dataclasses.replace(MODEL, sampled_softmax=VOCABULARY)
    inputs = tree.map_leaves(tf.constant, inputs_of(MODEL))
    assert loss_of(whole)(inputs)["loss"] == loss_of(MODEL)(inputs)["loss"]


def kinds_of(model: Translation, stack: str) -> list[str]:
    """The type of each feed-forward layer of one repeat."""
    return [type(layer).__name__ for layer in model.feed_forwards(stack)]


def test_layer_pattern_is_repeated():
    """By default experts are in every other layer, as in the papers; any other pattern is a choice."""
    assert kinds_of(MODEL, "encoder") == ["DenseFeedForward", "MixtureOfExperts"]
    assert kinds_of(dataclasses.replace(MODEL, num_experts=0), "decoder") == ["DenseFeedForward"]
    model = dataclasses.replace(MODEL, layer_pattern=("dense", "dense", "moe"), num_layers=12)
    assert kinds_of(model, "decoder") == ["DenseFeedForward", "DenseFeedForward", "MixtureOfExperts"]
    weights = model.weights()["decoder"]
    assert weights.keys() == {"layer_0", "layer_1", "layer_2", "norm"}
    assert weights["layer_2"]["feed_forward"]["wi"].shape == (2, 8, 16, 32), "two repeats"
    other = dataclasses.replace(model, layer_pattern=("dense", "dense", "moe:dispatch=einsum"))
    assert other.weights() == model.weights()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": ("dense", "mo")}, "feed-forward layer 'mo' is unknown. Did you mean moe"),
        ({"router": "swich"}, "router 'swich' is unknown. Did you mean switch"),
        ({"router": "switch", "num_experts": 1}, "num_experts is 1; router switch needs at least 2 experts"),
        ({"layer_pattern": ("moe",), "num_experts": 0}, "num_experts is 0; router top2 needs at least 2"),
        (
            {"layer_pattern": ("dense",)},
            "model.num_experts is 8, but no layer of the pattern dense has experts; .*model.layer_pattern=dense,moe",
        ),
        ({"layer_pattern": ("dense:hidden=3",)}, "no field 'hidden'. Did you mean hidden_dim"),
        (
            {"layer_pattern": ("dense", "moe:model_dim=8")},
            "model_dim of layer moe:model_dim=8 is 8, and model.model_dim",
        ),
        ({"stages": 2}, "stages is 2, but model.pipeline is none, .* set model.pipeline to gpipe or circular"),
        ({"num_layers": 2**31}, "num_layers is 2147483648; expected at least 1 and at most 2,147,483,647"),
        (
            {"layer_pattern": ("dense", "dense", "moe")},
            "num_layers is 4; half of the layers are the encoder's.*dense,dense,moe, so it must be a multiple of 6",
        ),
    ],
)
def test_impossible_pattern_is_an_error_that_names_it(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(MODEL, **changes)


def language_model(**fields) -> LanguageModel:
    sizes = {"num_layers": 2, "model_dim": 8, "hidden_dim": 8, "num_heads": 1, "head_dim": 8}
    return LanguageModel(target_vocabulary=16, **sizes | fields)


@pytest.mark.parametrize(
    ("pattern", "fields", "message"),
    [
        ("moe:num_experts=4:num_groups=3", {}, "num_groups of layer moe:.*=3 is 3, which model.micro"),
        ("moe:num_experts=4:inference_num_groups=3", {"num_groups": 2}, "inference_num_groups of layer .* is 3, which"),
        (
            "moe:num_experts=4:dispatch=gather",
            {"num_groups": 2, "pipeline": "gpipe", "stages": 2},
            "dispatch of layer moe:num_experts=4:dispatch=gather is gather, manual partitioning",
        ),
    ],
)
def test_what_a_pattern_sets_is_checked_as_the_models_own(pattern, fields, message):
    """A microbatch would get a group by rounding down, and a stage a dispatch that it cannot partition."""
    with pytest.raises(UserError, match=message):
        language_model(layer_pattern=(pattern,), microbatches=2, remat="full", **fields)


def test_groups_that_no_layer_has_are_not_checked():
    assert language_model(num_groups=3, microbatches=2, remat="full").num_groups == 3


def test_a_language_model_has_no_twin_keys():
    """They are those of cross-attention."""
    with pytest.raises(UserError, match="model.twin_keys is true, but a language model has no cross-attention"):
        language_model(twin_keys=True)


def test_routing_is_that_of_the_loss_of_each_microbatch():
    """Every fourth row is in one microbatch, whose groups have no token of another's; both drop the same tokens."""
    experts = {"num_experts": 4, "num_groups": 4, "router": "switch", "inference_capacity_factor": 1.0}
    model = language_model(layer_pattern=("moe",), remat="full", microbatches=4, **experts)
    inputs = inputs_of(model)
    inputs["batch"]["target"]["segment_ids"][:] = 1  # so that all microbatches have as many tokens
    theta, batch = (tree.map_leaves(tf.constant, inputs[part]) for part in ("theta", "batch"))

    def weights(model: LanguageModel, batch: dict) -> np.ndarray:
        layers = model.routing(theta, batch, Context())
        return np.stack([layers[name]["weights"].numpy() for name in ("decoder/1", "decoder/2")])

    _, metrics = model.loss(theta, batch, Context())
    found, whole = weights(model, batch), dataclasses.replace(model, microbatches=1)
    assert found.shape == (2, BATCH, LENGTH, 1) and np.mean(found == 0.0) == pytest.approx(float(metrics["overflow"]))
    assert (found != weights(whole, batch)).any(), "groups of consecutive rows"
    one_group, second = dataclasses.replace(whole, num_groups=1), tree.map_leaves(lambda ids: ids[1::4], batch)
    np.testing.assert_allclose(found[:, 1::4], weights(one_group, second), rtol=TOLERANCE)
    with pytest.raises(ValueError, match="is that of inference; the context has a seed"):
        model.routing(theta, batch, Context(seed=tf.constant([1, 2])))


def test_expert_choice_is_for_encoders():
    """It is not causal: decoders and language models refuse it, an encoder with an ordinary decoder trains with it."""
    with pytest.raises(
        UserError,
        match="layer 'moe' of the decoder is not causal .model.router is 'expert_choice'.*encoder_layer_pattern",
    ):
        dataclasses.replace(MODEL, router="expert_choice")
    with pytest.raises(UserError, match="not causal"):
        language_model(num_experts=2, layer_pattern=("moe:router=expert_choice",))
    model = dataclasses.replace(MODEL, encoder_layer_pattern=("dense", "moe:router=expert_choice"))
    found = harness.arrays(training_loss(model)(tree.map_leaves(tf.constant, inputs_of(model))))
    assert np.isfinite(found["values/loss"]) and found["gradients/theta/encoder/layer_1/feed_forward/gate"].any()
    assert found["values/metrics/aux_loss"] > 0, "that of the decoder alone"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale(Layer):
    """A user's layer: multiplies by a vector, whose mean square is an auxiliary loss and whose maximum is a metric."""

    model_dim: int
    start: float = 0.5

    metric_names = ("aux_loss", "largest_scale")

    def weights(self) -> dict:
        return {"scale": Weight((self.model_dim,), "M", mean=self.start)}

    def __call__(self, theta, inputs, paddings, context):
        scale = theta["scale"]
        metrics = {"aux_loss": tf.reduce_mean(scale**2), "largest_scale": tf.reduce_max(scale)}
        return inputs * context.cast(scale), metrics


@pytest.mark.parametrize(
    "way", [{"num_layers": 6, "unroll": True}, {"num_layers": 12, "remat": "full", "unroll": False}]
)
def test_users_layer_declares_its_metrics_and_auxiliary_loss(way):
    """Each metric is the mean over the layers that declare it, and the auxiliary loss is part of the loss.

    Gradients are computed where layers are rematerialised: nothing is without them. Dropout would compile longer.
    """
    with FEED_FORWARDS.isolated():
        register_feed_forward("scale")(Scale)
        pattern = ("scale:start=1", "dense", "scale:start=2")
        fields = {"layer_pattern": pattern, "num_experts": 0, "label_smoothing": 0.0, "residual_dropout": 0.0}
        model = dataclasses.replace(MODEL, **fields, **way)
        assert model.registered_classes[0] is Scale
        function = training_loss(model) if "remat" in way else lambda inputs: {"values": loss_of(model)(inputs)}
        found = harness.run(function, inputs_of(model))
    assert found["values/metrics/aux_loss"] == pytest.approx((1 + 4) / 2)
    assert found["values/metrics/largest_scale"] == pytest.approx(1.5)
    difference = found["values/loss"] - 0.01 * found["values/metrics/aux_loss"] - found["values/metrics/cross_entropy"]
    assert abs(difference) < TOLERANCE * found["values/loss"]
