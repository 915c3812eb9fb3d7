"""XLA completes shardings from few annotations as GSPMD section 3.5 says: merging, priorities and open dimensions."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe.engines import compilation
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

# Mesh axis 0 is the figures' x, of 4 devices, and 1 their y, of 2. Letters are their dimensions.
GRID = np.arange(8).reshape(4, 2)
SIZES = {"A": 16, "B": 16, "C": 32, "D": 32, "F": 16}
RANDOM = np.random.default_rng(0)


def inputs_of(**dimensions: str) -> dict[str, np.ndarray]:
    """Random tensors by name, with these dimensions."""
    return {
        name: RANDOM.normal(size=[SIZES[letter] for letter in letters]).astype(np.float32)
        for name, letters in dimensions.items()
    }


def annotate(tensor: tf.Tensor, sharding: str, open_dims: tuple[int, ...] = ()) -> tf.Tensor:
    """Annotates in the figures' notation: `BxD` is B sharded along x."""
    mapping = [{"": -1, "x": 0, "y": 1}[axis] for axis in re.findall("[A-Z]([xy]?)", sharding)]
    return spmd.mesh_split(tensor, GRID, mapping, unspecified_dims=open_dims)


def compiled(function: Callable[[dict], tf.Tensor], inputs: dict) -> jax.stages.Compiled:
    """The program with replicated inputs, whose output has the sharding that XLA chooses."""
    layout = Layout.of(DeviceMesh((4, 2)))
    program = harness.lower_for(lambda tensors: {"y": function(tensors)}, inputs, layout)
    replicated = NamedSharding(Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("x", "y")), PartitionSpec())
    return (
        jax.jit(compilation.exported(program).call, in_shardings=replicated)
        .lower(*(inputs[a.path] for a in program.inputs))
        .compile()
    )


def shards(function: Callable[[dict], tf.Tensor], inputs: dict) -> tuple[int, ...]:
    """The number of shards of each dimension of the output."""
    executable = compiled(function, inputs)
    (sharding,), (output,) = map(jax.tree.leaves, (executable.output_shardings, executable.out_info))
    shape = output.shape
    return tuple(size // part for size, part in zip(shape, sharding.shard_shape(shape)))


def collectives(function: Callable[[dict], tf.Tensor], inputs: dict) -> list[str]:
    """The kind and result of each collective."""
    text = compiled(function, inputs).as_text()
    return sorted(re.findall(r"= (\S+?)\{\S* (all-\w+|collective-\w+|reduce-scatter)\(", text))


@pytest.mark.parametrize("left, right, merged", [("AyB", "BCx", (2, 4)), ("AyB", "BC", (2, 1)), ("AB", "BCx", (1, 4))])
def test_compatible_shardings_are_merged(left, right, merged):
    """Figure 3: of a product, each factor gives the sharding of its dimension; nothing is communicated."""
    inputs = inputs_of(left="AB", right="BC")

    def function(tensors: dict) -> tf.Tensor:
        return tf.matmul(annotate(tensors["left"], left), annotate(tensors["right"], right))

    assert shards(function, inputs) == merged
    assert collectives(function, inputs) == []


def test_shardings_pass_through_operators_that_keep_dimensions():
    """Section 3.5, preserved dimensions: of elementwise operators, transpositions, broadcasts and reductions."""
    inputs = inputs_of(x="BD", bias="D")

    def function(tensors: dict) -> tf.Tensor:
        normed = tf.nn.softmax(annotate(tensors["x"], "BxDy") + tensors["bias"])
        return tf.reduce_max(tf.transpose(normed)[None], axis=0)

    assert shards(function, inputs) == (2, 4)


def figure_4(everywhere: bool) -> Callable[[dict], tf.Tensor]:
    """Dot, Add of a broadcast, max; of the `BD` tensors the last is annotated, or each."""

    def mark(tensor: tf.Tensor) -> tf.Tensor:
        return annotate(tensor, "BxDy") if everywhere else tensor

    def function(tensors: dict) -> tf.Tensor:
        product = mark(tf.matmul(annotate(tensors["left"], "BxFy"), annotate(tensors["right"], "FyDx")))
        added = mark(product + mark(tf.broadcast_to(tensors["bias"], product.shape)))
        return annotate(tf.maximum(added, mark(tf.zeros(product.shape))), "BxDy")

    return function


def test_elementwise_operators_have_priority_over_products():
    """Figure 4: the product alone could be `BDx` or `BxD`; all tensors around the Add get `BxDy`, as the result has.

    The collectives are those of the program that annotates every tensor.
    """
    inputs = inputs_of(left="BF", right="FD", bias="D")
    assert shards(figure_4(everywhere=False), inputs) == (4, 2)
    assert collectives(figure_4(everywhere=False), inputs) == collectives(figure_4(everywhere=True), inputs) != []


def test_an_annotation_is_not_refined_unless_dimensions_are_open():
    """Section 3.5, partial specification: a closed dimension stays replicated, an open one is completed."""
    inputs = inputs_of(x="BD")

    def function(open_dims: tuple[int, ...]) -> Callable[[dict], tf.Tensor]:
        return lambda tensors: annotate(tf.nn.relu(annotate(tensors["x"], "BxDy")), "BxD", open_dims)

    assert shards(function(()), inputs) == (4, 1)
    assert shards(function((1,)), inputs) == (4, 2)
    assert collectives(function((1,)), inputs) == [] != collectives(function(()), inputs)


def test_a_sharding_flows_backwards_into_operands():
    """Section 3.5: from outputs to inputs, too; the annotation of a result shards what it is computed from."""
    inputs = inputs_of(x="BD")

    def function(tensors: dict) -> tf.Tensor:
        return annotate(tf.exp(tf.tanh(tensors["x"])), "BxDy")

    text = compiled(function, inputs).as_text()
    assert re.search(r"f32\[4,16\]\S* tanh\(", text) and not re.search(r"f32\[16,32\]\S* tanh\(", text)
