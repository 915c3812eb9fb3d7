"""Test harness: lowers a small function, partitions it and runs it on virtual CPU devices."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lingvo_moe import tree
from lingvo_moe.engines import pjrt
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program, lower
from lingvo_moe.sharding.layout import Layout, Spec

# Half the distance from 1.0 to the next float32: the relative error of one rounding.
FLOAT32_ROUNDING = 2.0**-24
BFLOAT16_ROUNDING = 2.0**-8

_COLLECTIVES = re.compile(r" (all-to-all|all-reduce|all-gather|collective-permute|reduce-scatter)(?:-start)?\(")
# Logical axes that every layout replicates, for tensors whose sharding does not matter.
_REPLICATED = "gsecmhbtlndvrp"


def lower_for(
    function: Callable[[dict], dict],
    inputs: Mapping[str, Any],
    layout: Layout = Layout(),
    logical_axes: Mapping[str, str] | None = None,
    donated: tuple[str, ...] = (),
) -> Program:
    """Lowers `function` for inputs with the shapes of the arrays `inputs`.

    Args:
      function: from a tree of tensors to a tree of tensors.
      inputs: a tree of arrays.
      layout: maps logical axes to mesh axes.
      logical_axes: of inputs and outputs, by path; an array without them is replicated.
      donated: as in `program.lower`.
    """
    logical_axes = dict(logical_axes or {})
    specs = {
        path: Spec(np.shape(value), np.asarray(value).dtype.name, logical_axes.get(path, _replicated(np.ndim(value))))
        for path, value in tree.flatten(inputs).items()
    }

    def recorded(tensors: dict) -> dict:
        outputs = function(tensors)
        for path, tensor in tree.flatten(outputs).items():
            logical_axes.setdefault(path, _replicated(tensor.shape.rank))
        return outputs

    return lower("test", recorded, tree.unflatten(specs), logical_axes, layout, donated)


def compile_for(
    function: Callable[[dict], dict],
    inputs: Mapping[str, Any],
    layout: Layout = Layout(),
    logical_axes: Mapping[str, str] | None = None,
) -> pjrt.Executable:
    """Compiles what `lower_for` lowers, for the first virtual CPU devices."""
    return engine(layout).compile(lower_for(function, inputs, layout, logical_axes))


def run(
    function: Callable[[dict], dict],
    inputs: Mapping[str, Any],
    layout: Layout = Layout(),
    logical_axes: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Calls once what `compile_for` compiles; returns NumPy arrays by path."""
    return arrays(compile_for(function, inputs, layout, logical_axes)(inputs))


def engine(layout: Layout) -> pjrt.Engine:
    """Returns an engine with the first virtual CPU devices, as many as the layout's mesh has."""
    return pjrt.Engine(layout.mesh.size, platform="cpu")


def arrays(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the leaves of a program's outputs, or of a tree of eager tensors, as NumPy arrays by path."""
    return {path: np.asarray(value) for path, value in tree.flatten(outputs).items()}


def with_gradients(function: Callable[[dict], dict]) -> Callable[[dict], dict]:
    """Returns a function that computes `{values, gradients}` of a function from a tree of tensors to another one.

    The gradients are of a sum over all outputs, in which each element has a different cosine as its weight, so that a
    permutation of elements changes the gradients; they have the paths of the floating-point inputs.
    """

    def differentiated(inputs: dict) -> dict:
        leaves = {path: tensor for path, tensor in tree.flatten(inputs).items() if tensor.dtype.is_floating}
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            outputs = function(inputs)
            total = tf.add_n([_weighted_sum(tensor) for tensor in tree.flatten(outputs).values()])
        gradients = tape.gradient(total, list(leaves.values()), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # The gradient of a lookup is sparse; programs return dense tensors.
        return {"values": outputs, "gradients": tree.unflatten(dict(zip(leaves, map(tf.convert_to_tensor, gradients))))}

    return differentiated


def collectives(executable: pjrt.Executable) -> dict[str, int]:
    """Counts the instructions of each kind of collective in the compiled module."""
    return dict(collections.Counter(_COLLECTIVES.findall(executable.hlo())))


def _weighted_sum(tensor: tf.Tensor) -> tf.Tensor:
    weights = np.cos(np.arange(max(1, tensor.shape.num_elements()))).reshape(tensor.shape.as_list())
    return tf.reduce_sum(tf.cast(tensor, tf.float32) * tf.constant(weights, tf.float32))


def _replicated(rank: int) -> str:
    return _REPLICATED[:rank]
