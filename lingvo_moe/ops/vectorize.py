"""Vectorisation: one function of many sets of arguments at a time, with a leading dimension in place of a loop.

GSPMD section 3.3: pipeline stages are one function vectorised over a dimension of stages, which is then sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf

_UNKNOWN_OPERATOR = "No pfor vectorization defined for "


def vectorize(function: Callable[..., Any], arguments: tuple) -> Any:
    """Applies `function` to each of N sets of arguments at once; only in compiled programs.

    Annotations inside `function` must be those of the vectorised tensors, see `Layout.vectorized`. The graph does not
    grow with N.

    Args:
      function: from tensors to a tree of tensors.
      arguments: trees of tensors `[N, ...]`.

    Returns:
      The tree of results, each `[N, ...]`.

    Raises:
      UserError: an operator inside `function` has no vectorised form.
    """
    _register_converters()
    try:
        return tf.vectorized_map(lambda each: function(*each), arguments, fallback_to_while_loop=False)
    except ValueError as error:
        name = str(error).partition(_UNKNOWN_OPERATOR)[2].partition("\n")[0].strip()
        if not name:
            raise
        raise UserError(
            f"TensorFlow's operator {name} has no vectorised form, so a layer that uses it cannot be a pipeline stage. "
            f"Write the layer without it, or use --set model.pipeline=none."
        ) from error


@functools.cache
def _register_converters():
    """Teaches `tf.vectorized_map` the operators of our layers that it does not know."""
    from tensorflow.python.ops.parallel_for import pfor  # TensorFlow exposes its registry under no public name

    @pfor.RegisterPFor("Bitcast")
    def bitcast(node):
        return pfor.wrap(tf.bitcast(node.stacked_input(0), node.get_attr("type")), True)

    @pfor.RegisterPFor("XlaDot")
    def dot(node):
        left, right = (_stacked(node, index) for index in range(2))
        return pfor.wrap(_batched_dot(left, right, node), True)

    @pfor.RegisterPFor("BatchMatMulV3")
    def product_of_another_type(node):
        node.expanddim_inputs_for_broadcast()
        left, right = node.input(0).t, node.input(1).t
        names = {"adjoint_a": "adj_x", "adjoint_b": "adj_y", "output_type": "Tout"}
        attributes = {argument: node.get_attr(name) for argument, name in names.items()}
        return pfor.wrap(tf.matmul(left, right, **attributes), True)


def _stacked(node, index: int) -> tf.Tensor:
    """Input `index` of an operator, repeated along a new leading dimension if it is the same for all iterations."""
    tensor, is_stacked, _ = node.input(index)
    if is_stacked:
        return tensor
    return tf.broadcast_to(tensor[None], tf.concat([node.pfor.loop_len_vector, tf.shape(tensor)], axis=0))


def _batched_dot(left: tf.Tensor, right: tf.Tensor, node) -> tf.Tensor:
    """XlaDot of stacked operands: its dimension numbers are shifted by one, as the first one is a batch dimension."""
    from tensorflow.compiler.tf2xla.python import xla
    from tensorflow.compiler.xla import xla_data_pb2

    messages: Any = xla_data_pb2  # protobuf makes its classes when it is imported
    of_one = messages.DotDimensionNumbers.FromString(node.get_attr("dimension_numbers"))
    dimensions = messages.DotDimensionNumbers(
        lhs_contracting_dimensions=[d + 1 for d in of_one.lhs_contracting_dimensions],
        rhs_contracting_dimensions=[d + 1 for d in of_one.rhs_contracting_dimensions],
        lhs_batch_dimensions=[0, *(d + 1 for d in of_one.lhs_batch_dimensions)],
        rhs_batch_dimensions=[0, *(d + 1 for d in of_one.rhs_batch_dimensions)],
    )
    precision = messages.PrecisionConfig.FromString(node.get_attr("precision_config"))
    return xla.dot_general(left, right, dimensions, precision)
