"""Matmuls of activations and weights, in the fastest form for the platform.

The plain form is one einsum: a TPU lays out dimensions as it likes, and a reshape costs it. For a CPU each one is
a matmul of two matrices or a batch of them, and so is the gradient with respect to the weight. The gradient of the
einsum contracts over all leading dimensions of the inputs, for which XLA's CPU compiler transposes both factors in
memory and takes a kernel half as fast.

XLA's CPU kernel rearranges the second factor of a matmul before it multiplies. With few rows, as in a step of
decoding, that of a large weight takes as long as the matmul. So a search transposes such weights once
(`prepare_weight`), and multiplies them by transposed rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.gradients import named_gradient
from lingvo_moe.ops.precision import HIGHEST
from lingvo_moe.ops.products import multiply, rounds_float32_operands, rounds_operands_of
from lingvo_moe.ops.tiles import transpose

# On a CPU: up to this many rows per expert, gradients transpose the rows and not the weights (measured: a third faster
# at 32 rows, nothing gained at 64).
FEW_ROWS = 32
# On a CPU: the least dimension of a matrix that is worth transposing for few rows. Measured: half the CPU time for
# 1024 x 1024 and 32 rows. For 256 x 8000 and 256 rows, whose outputs are transposed back, translation takes a tenth
# more.
LARGE = 1024


def prepare_weight(weights: tf.Tensor, context: Context, contracted: int = 1) -> tf.Tensor | dict:
    """Weights of R layers `[R, *K, *O]`, for many calls of `project` with few rows, as in steps of decoding.

    On one CPU, in float32, of large weights: `{"transposed": [R, *O, *K]}`. Otherwise `weights` itself: of small ones,
    on several devices, and where operands are rounded, for which XLA has another kernel.
    """
    fan_in, outputs = math.prod(weights.shape[1 : 1 + contracted]), math.prod(weights.shape[1 + contracted :])
    if not is_transposed((fan_in, outputs), context):
        return weights
    rank = weights.shape.rank
    order = (0, *range(1 + contracted, rank), *range(1, 1 + contracted))
    return {"transposed": tf.transpose(weights, order)}


def prefers_unstacked_weights(context: Context) -> bool:
    """Whether stacked weights of layers are divided before a loop of decoding, which would copy them in every step."""
    return context.is_one_cpu


def is_transposed(shape: Sequence[int], context: Context) -> bool:
    """Whether `prepare_weight` transposes a matrix of this shape."""
    in_float32 = context.dtype == "float32" and not rounds_float32_operands(context)
    return context.is_one_cpu and in_float32 and not context.training and min(shape) >= LARGE


def project(
    inputs: tf.Tensor, weight: tf.Tensor | dict, context: Context, contracted: int = 1, bias: tf.Tensor | None = None
) -> tf.Tensor:
    """Multiplies activations by a weight, and adds a bias if there is one.

    Args:
      inputs: `[..., *K]`.
      weight: `[*K, *O]`, or one layer's of `prepare_weight`.
      context: of the call.
      contracted: the number of dimensions K.
      bias: `[*O]`.

    Returns:
      `[..., *O]`, of the activations' dtype.
    """
    if isinstance(weight, dict):
        products = _multiply_transposed(inputs, weight["transposed"], contracted)
    else:
        products = _multiply(inputs, context.cast(weight), context, contracted)
    return products if bias is None else products + context.cast(bias)


def _multiply_transposed(inputs: tf.Tensor, weight: tf.Tensor, contracted: int) -> tf.Tensor:
    """The matmul of `project` with a weight `[*O, *K]`."""
    outputs = weight.shape[: weight.shape.rank - contracted]
    rows = tf.reshape(inputs, (-1, math.prod(weight.shape[weight.shape.rank - contracted :])))
    products = transpose(tf.matmul(tf.reshape(weight, (-1, rows.shape[-1])), rows, transpose_b=True))
    return tf.reshape(products, (*inputs.shape[: inputs.shape.rank - contracted], *outputs))


def _multiply(inputs: tf.Tensor, weight: tf.Tensor, context: Context, contracted: int) -> tf.Tensor:
    """The matmul of `project`."""
    leading = inputs.shape.rank - contracted
    if context.platform != "cpu":
        batch, fan_in, outputs = "ABC"[:leading], "KL"[:contracted], "OP"[: weight.shape.rank - contracted]
        return tf.einsum(f"{batch}{fan_in},{fan_in}{outputs}->{batch}{outputs}", inputs, weight)
    rows = tf.reshape(inputs, (-1, math.prod(weight.shape[:contracted])))
    products = multiply(rows, tf.reshape(weight, (rows.shape[-1], -1)), context)
    return tf.reshape(products, (*inputs.shape[:leading], *weight.shape[contracted:]))


def project_by_layer(
    inputs: tf.Tensor, weights: tf.Tensor, context: Context, biases: tf.Tensor | None = None
) -> tf.Tensor:
    """`project` for each of R layers: `[B, L, M]`, weights `[R, M, N, D]`, biases `[R, N, D]` to `[R, B, L, N, D]`."""
    if context.platform == "cpu":
        products = tf.stack([project(inputs, weight, context) for weight in tf.unstack(weights)])
    else:
        products = tf.einsum("BLM,RMND->RBLND", inputs, context.cast(weights))
    return products if biases is None else products + context.cast(biases)[:, None, None]


def project_to_rows(inputs: tf.Tensor, table: tf.Tensor, context: Context) -> tf.Tensor:
    """`[..., K]` times the transpose of a table `[V, K]`: `[..., V]`, of the activations' dtype."""
    if context.platform != "cpu":
        return project(inputs, tf.transpose(table), context)
    rows = tf.reshape(inputs, (-1, inputs.shape[-1]))
    products = multiply(rows, context.cast(table), context, transpose_b=True)
    return tf.reshape(products, (*inputs.shape[:-1], table.shape[0]))


def project_in_float32(inputs: tf.Tensor, weight: tf.Tensor, context: Context) -> tf.Tensor:
    """`[G, S, K]` times `[K, O]`: `[G, S, O]`, in float32 on every platform, and so are its gradients.

    A TPU otherwise multiplies float32 in one pass of bfloat16, which rounds the logits of a router to three digits.
    """
    exact = dataclasses.replace(context, dtype="float32", matmul_precision=HIGHEST)
    # Outside of XLA, TensorFlow's own matmuls are float32 already, and it has no matmul of a stated precision.
    if context.platform == "cpu" or tf.executing_eagerly():
        return project(inputs, weight, exact)

    def product(inputs, weight):
        def gradient(upstream):
            return _dot(upstream, weight, (2,), (1,)), _dot(inputs, upstream, (0, 1), (0, 1))

        return _dot(inputs, weight, (2,), (0,)), gradient

    return named_gradient(product)(inputs, weight)


def _dot(left: tf.Tensor, right: tf.Tensor, contracted: tuple[int, ...], by: tuple[int, ...]) -> tf.Tensor:
    """The matmul over these dimensions of each, with the precision of float32; only in compiled programs."""
    from tensorflow.compiler.tf2xla.python import xla
    from tensorflow.compiler.xla import xla_data_pb2

    messages: Any = xla_data_pb2  # protobuf makes its classes when it is imported
    dimensions = messages.DotDimensionNumbers(lhs_contracting_dimensions=contracted, rhs_contracting_dimensions=by)
    highest = messages.PrecisionConfig(operand_precision=[messages.PrecisionConfig.HIGHEST] * 2)
    return xla.dot_general(left, right, dimensions, highest)


def project_by_expert(
    inputs: tf.Tensor, weights: tf.Tensor, context: Context, biases: tf.Tensor | None = None
) -> tf.Tensor:
    """`project` for each expert: `[E, G, C, K]`, weights `[E, K, O]`, biases `[E, O]` to `[E, G, C, O]`."""
    products = _multiply_by_expert(inputs, context.cast(weights), context)
    return products if biases is None else products + context.cast(biases)[:, None, None]


def _multiply_by_expert(inputs: tf.Tensor, weights: tf.Tensor, context: Context) -> tf.Tensor:
    """The matmuls of `project_by_expert`."""
    if context.platform != "cpu":
        return tf.einsum("EGCK,EKO->EGCO", inputs, weights)
    experts, groups, capacity, fan_in = inputs.shape
    rows = tf.reshape(inputs, (experts, groups * capacity, fan_in))
    # Rounded, few rows are multiplied as many are. Measured for experts of 256 x 1024: half the CPU time in inference;
    # in training a fifth more for 4 rows, and the same for 16.
    few = groups * capacity <= FEW_ROWS and not rounds_operands_of(rows, context)
    products = _multiply_few_rows(rows, weights, context) if few else multiply(rows, weights, context)
    return tf.reshape(products, (experts, groups, capacity, weights.shape[-1]))


def _multiply_few_rows(rows: tf.Tensor, weights: tf.Tensor, context: Context) -> tf.Tensor:
    """`tf.matmul` of `[E, C, K]` and `[E, K, O]` for C <= FEW_ROWS, whose gradients transpose the rows.

    By default XLA's CPU compiler multiplies the gradient of few rows by transposed weights, which takes twice as long.
    """
    devices = context.layout.mesh.size

    def product(rows, weights):
        def gradient(upstream):
            by_rows = transpose(tf.matmul(weights, transpose(upstream, devices)), devices)
            return by_rows, tf.matmul(transpose(rows, devices), upstream)

        return tf.matmul(rows, weights), gradient

    return named_gradient(product)(rows, weights)
