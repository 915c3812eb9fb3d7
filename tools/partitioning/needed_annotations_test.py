"""Protects the search for needed annotations: who makes one, what leaving it out does, and the halving."""

from __future__ import annotations

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.feed_forward import DenseFeedForward
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from tools.partitioning.needed_annotations import Cost, Elimination, Sites

_HIDDEN = "layers/feed_forward.py DenseFeedForward._activated BTH"
_OUTPUT = "layers/feed_forward.py DenseFeedForward.__call__ BTM"


def _graph(sites: Sites) -> str:
    """The graph of a feed-forward layer on a mesh of 2, as text."""
    layer, context = DenseFeedForward(model_dim=4, hidden_dim=8), Context(Layout(DeviceMesh((2,))))

    @tf.function(autograph=False)
    def function(inputs):
        theta = {name: tf.ones(weight.shape) for name, weight in layer.weights().items()}
        return layer(theta, inputs, tf.zeros((2, 3), tf.bool), context)[0]

    with sites.intercepted():
        return str(function.get_concrete_function(tf.TensorSpec((2, 3, 4))).graph.as_graph_def())


def test_a_site_is_the_layer_that_annotates_and_can_be_left_out():
    """Not the shared helpers in between; the others are annotated as before."""
    sites = Sites()
    complete = _graph(sites).count('op: "XlaSharding"')
    assert list(sites.seen) == [_HIDDEN, _OUTPUT] and complete == 2
    sites.left_out = frozenset([_HIDDEN])
    assert _graph(sites).count('op: "XlaSharding"') == 1
    assert _graph(Sites()).count('op: "XlaSharding"') == complete


def test_halves_are_tried_until_the_needed_sites_are_left():
    """Three of eight sites are needed, one of them for cycles; of two that say the same, the later one."""

    def cost(left_out) -> Cost:
        gathers = ("c" in left_out) + ({"e", "f"} <= set(left_out))
        return Cost(bytes=100 + 50 * gathers, cycles=1000 + 10 * ("h" in left_out))

    elimination = Elimination(cost, Cost(100, 1000))
    assert elimination.of("abcdefgh") == [
        ("c", "50.0% more bytes in collectives"),
        ("f", "50.0% more bytes in collectives"),
        ("h", "1.0% more cycles"),
    ]
    assert elimination.left_out == set("abdeg") and elimination.current == Cost(100, 1000)


def test_a_difference_of_the_scheduler_is_no_cost():
    assert Cost(100, 1001).above(Cost(100, 1000)) == "" == Cost(90, 900).above(Cost(100, 1000))
