"""What tests share: a tiny function, lowered, partitioned and run on some of the virtual CPU devices."""

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

# Half the distance from 1.0 to the next float32: what one rounding may change, relative to the value.
FLOAT32_ROUNDING = 2.0**-24
BFLOAT16_ROUNDING = 2.0**-8

_COLLECTIVES = re.compile(r" (all-to-all|all-reduce|all-gather|collective-permute|reduce-scatter)(?:-start)?\(")
# Letters of which no layout cuts any, for tensors whose place does not matter.
_WHOLE = "gsecmhbtlndvr"


def lower_for(
    function: Callable[[dict], dict],
    inputs: Mapping[str, Any],
    layout: Layout = Layout(),
    logical_axes: Mapping[str, str] | None = None,
    donated: tuple[str, ...] = (),
) -> Program:
    """Lowers `function` for inputs shaped like the tree of arrays `inputs`; paths without `letters` are replicated."""
    logical_axes = dict(logical_axes or {})
    specs = {
        path: Spec(np.shape(value), np.asarray(value).dtype.name, logical_axes.get(path, _whole(np.ndim(value))))
        for path, value in tree.flatten(inputs).items()
    }

    def recorded(tensors: dict) -> dict:
        outputs = function(tensors)
        for path, tensor in tree.flatten(outputs).items():
            logical_axes.setdefault(path, _whole(tensor.shape.rank))
        return outputs

    return lower("test", recorded, tree.unflatten(specs), logical_axes, layout, donated)


def compile_for(
    function: Callable[[dict], dict],
    inputs: Mapping[str, Any],
    layout: Layout = Layout(),
    logical_axes: Mapping[str, str] | None = None,
) -> pjrt.Executable:
    """`lower_for`, compiled for as many of the test run's virtual devices as the layout has."""
    return engine(layout).load(lower_for(function, inputs, layout, logical_axes))


def run(
    function: Callable[[dict], dict],
    inputs: Mapping[str, Any],
    layout: Layout = Layout(),
    logical_axes: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """`compile_for`, called once; returns numpy arrays by path."""
    return arrays(compile_for(function, inputs, layout, logical_axes)(inputs))


def engine(layout: Layout) -> pjrt.Engine:
    """An engine over the first of the virtual CPU devices."""
    return pjrt.Engine(layout.mesh.size, platform="cpu")


def arrays(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The leaves of a program's outputs (or of a tree of eager tensors), as numpy arrays by path."""
    return {path: np.asarray(value) for path, value in tree.flatten(outputs).items()}


def with_gradients(function: Callable[[dict], dict]) -> Callable[[dict], dict]:
    """Returns `{values, gradients}` of a function from a tree of tensors to another one.

    The gradients are those of all outputs, each element weighted by a different cosine, so that no permutation or
    exchange of elements goes unseen; they have the paths of the floating-point inputs.
    """

    def differentiated(inputs: dict) -> dict:
        leaves = {path: tensor for path, tensor in tree.flatten(inputs).items() if tensor.dtype.is_floating}
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            outputs = function(inputs)
            total = tf.add_n([_weighted_sum(tensor) for tensor in tree.flatten(outputs).values()])
        found = tape.gradient(total, list(leaves.values()), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # A lookup's gradient is sparse; programs return dense tensors.
        return {"values": outputs, "gradients": tree.unflatten(dict(zip(leaves, map(tf.convert_to_tensor, found))))}

    return differentiated


def collectives(executable: pjrt.Executable) -> dict[str, int]:
    """How often each kind of communication stands in the compiled module."""
    return dict(collections.Counter(_COLLECTIVES.findall(executable.hlo())))


def _weighted_sum(tensor: tf.Tensor) -> tf.Tensor:
    weights = np.cos(np.arange(max(1, tensor.shape.num_elements()))).reshape(tensor.shape)
    return tf.reduce_sum(tf.cast(tensor, tf.float32) * tf.constant(weights, tf.float32))


def _whole(rank: int) -> str:
    return _WHOLE[:rank]
