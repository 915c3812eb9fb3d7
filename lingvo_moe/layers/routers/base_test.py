"""A router of a user is checked when it is registered, and each of its results."""

from __future__ import annotations

import dataclasses
import re

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.layers.routers.base import ROUTERS, Router, call_router, make_router, register_router
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.routing import Routing


@pytest.fixture(autouse=True)
def registrations_end_with_the_test():
    with ROUTERS.isolated():
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Router):
    """Two choices for each token, with one of several mistakes."""

    mistake: str = ""

    metric_names = ("overflow",)

    def experts_per_token(self, num_experts: int) -> float:
        return 2.0

    def __call__(self, logits, paddings, capacity, context):
        ones, metrics = tf.ones((*logits.shape[:2], 2), tf.int32), {"overflow": tf.constant(0.0)}
        right = Routing(ones, ones, tf.cast(ones, tf.float32), metrics)
        wide = tf.ones(logits.shape, tf.int32)
        return {
            "": right,
            "expert choice": Routing(None, wide, tf.cast(wide, tf.float32), metrics),
            "tuple": (ones, ones, metrics),
            "flat": Routing(ones[..., 0], ones[..., 0], tf.cast(ones, tf.float32)[..., 0], metrics),
            "int64": dataclasses.replace(right, experts=tf.cast(ones, tf.int64)),
            "positions": dataclasses.replace(right, positions=wide),
            "weights": dataclasses.replace(right, weights=ones),
            "all": dataclasses.replace(right, experts=None),
            "metric": dataclasses.replace(right, metrics={}),
        }[self.mistake]


@pytest.mark.parametrize(
    "mistake, message",
    [
        ("tuple", ": the result of a call is a tuple; expected a Routing."),
        ("flat", ": Routing.experts is an int32 [3, 4]; expected an int32 [3, 4, K]."),
        ("int64", ": Routing.experts is an int64 [3, 4, 2]; expected an int32 [3, 4, 2]."),
        ("positions", ": Routing.positions is an int32 [3, 4, 5]; expected an int32 [3, 4, 2]."),
        ("weights", ": Routing.weights is an int32 [3, 4, 2]; expected a float32 [3, 4, 2]."),
        ("all", ": Routing.positions is an int32 [3, 4, 2]; expected an int32 [3, 4, 5]."),
        ("metric", ": metric_names declares overflow, but a call returned no metric."),
    ],
)
def test_a_malformed_routing_names_the_router(mistake, message):
    """TensorFlow would name an operator of the dispatch."""
    register_router("own")(Own)
    logits, paddings = tf.zeros((3, 4, 5)), tf.zeros((3, 4), tf.bool)
    for right in ("", "expert choice"):
        call_router(Own(mistake=right), logits, paddings, 2, Context())
    with pytest.raises(UserError, match=f"^router 'own'{re.escape(message)}"):
        call_router(make_router(f"own:mistake={mistake}"), logits, paddings, 2, Context())


def test_an_error_in_a_router_ends_with_its_place():
    """The traceback alone would not tell which of the layers it is."""
    context = Context(scope="decoder/layer_1/feed_forward/")
    with pytest.raises(KeyError) as raised:
        call_router(Own(mistake="boom"), tf.zeros((3, 4, 5)), tf.zeros((3, 4), tf.bool), 2, context)
    assert raised.value.__notes__[0].startswith("router 'Own' in decoder/layer_1/feed_forward: KeyError: 'boom' (")


@pytest.mark.parametrize("lacking", ["experts_per_token", "__call__"])
def test_a_router_without_a_method_is_not_registered(lacking):
    """One is called only by `plan`, after training."""
    inherited = {
        name: value for name, value in vars(Own).items() if name in {"experts_per_token", "__call__"} - {lacking}
    }
    cls = dataclasses.dataclass(frozen=True)(type("Half", (Router,), inherited))
    with pytest.raises(UserError, match=f"^router 'half' has no {lacking}, which Router in lingvo_moe/layers/routers/"):
        register_router("half")(cls)
