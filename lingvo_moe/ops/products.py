"""Matmuls on a CPU, where XLA's compiler has kernels of different speeds.

It gives a matmul to a library (YNNPACK) unless the first factor is transposed, as in the gradient of a weight. Such a
matmul takes a slower kernel: half as fast, where the second factor has 1024 columns. So the first factor is transposed
in memory, except one that is wider than the second, for which this gains nothing.

With `matmul_precision=bfloat16`, on a CPU that has instructions for it, operands are rounded to bfloat16 and sums are
float32, as a TPU does by default, in training and in inference. Then a first factor is always transposed in memory, as
the slower kernel gains nothing from bfloat16, and XLA has none for two transposed factors.
"""

from __future__ import annotations

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.gradients import named_gradient
from lingvo_moe.ops.precision import BFLOAT16
from lingvo_moe.ops.tiles import transpose
from lingvo_moe.utils import processor


def multiply(rows: tf.Tensor, weights: tf.Tensor, context: Context, transpose_b: bool = False) -> tf.Tensor:
    """`[..., A, K]` times `[..., K, B]`, or the transpose of `[..., B, K]`: `[..., A, B]`, of the operands' dtype.

    Where operands are rounded, so are those of the gradients.
    """
    if context.platform != "cpu" or rows.dtype != tf.float32:
        return tf.matmul(rows, weights, transpose_b=transpose_b)
    dtype = tf.bfloat16 if rounds_operands_of(rows, context) else tf.float32
    if not context.training:
        return _multiply(tf.cast(rows, dtype), tf.cast(weights, dtype), transpose_b=transpose_b)

    def product(rows, weights):
        rows, weights = tf.cast(rows, dtype), tf.cast(weights, dtype)

        def gradient(upstream):
            upstream = tf.cast(upstream, dtype)
            d_weights = _weight_gradient(rows, upstream, context, transpose_b)
            return _multiply(upstream, weights, transpose_b=not transpose_b), d_weights

        return _multiply(rows, weights, transpose_b=transpose_b), gradient

    return named_gradient(product)(rows, weights)


def rounds_operands_of(rows: tf.Tensor, context: Context) -> bool:
    """Returns whether `multiply` rounds: on a CPU that multiplies bfloat16 faster, where asked to."""
    return rows.dtype == tf.float32 and rounds_float32_operands(context)


def rounds_float32_operands(context: Context) -> bool:
    """Returns whether `multiply` rounds float32 operands."""
    return context.matmul_precision == BFLOAT16 and context.platform == "cpu" and processor.multiplies_bfloat16()


def _weight_gradient(rows: tf.Tensor, upstream: tf.Tensor, context: Context, transpose_b: bool) -> tf.Tensor:
    """The gradient of `[..., K, B]` or `[..., B, K]`, from rows `[..., A, K]` and a gradient `[..., A, B]`."""
    devices = context.layout.mesh.size
    if rows.dtype == tf.bfloat16 or rows.shape[-1] <= upstream.shape[-1]:
        products = _multiply(transpose(rows, devices), upstream)
        return transpose(products, devices) if transpose_b else products
    left, right = (upstream, rows) if transpose_b else (rows, upstream)
    return _multiply(left, right, transpose_a=True)


def _multiply(left: tf.Tensor, right: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False) -> tf.Tensor:
    """The matmul of float32 or bfloat16 tensors, in float32."""
    if left.dtype == tf.float32:
        return tf.matmul(left, right, transpose_a=transpose_a, transpose_b=transpose_b)
    if tf.executing_eagerly():  # TensorFlow's own kernels have no such matmul; those of float32 are as exact
        return _multiply(tf.cast(left, tf.float32), tf.cast(right, tf.float32), transpose_a, transpose_b)
    return tf.matmul(left, right, transpose_a=transpose_a, transpose_b=transpose_b, output_type=tf.float32)
