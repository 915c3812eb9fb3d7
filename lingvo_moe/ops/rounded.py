"""Matrix products of operands rounded to bfloat16 with float32 sums, for CPUs that have instructions for them.

A TPU multiplies so by default. XLA's CPU compiler gives such products to a library (YNNPACK), whose form of two factors
of which the first is not transposed takes half the time of float32. With a transposed first factor, as in the gradient
of a weight, it takes as long as float32, and with two transposed factors XLA has no form. So the first factor is
transposed in memory, and a table of embeddings, which the softmax multiplies by its transpose, is not transposed first.
"""

from __future__ import annotations

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.precision import BFLOAT16
from lingvo_moe.ops.tiles import transpose
from lingvo_moe.utils import processor


def is_faster(rows: tf.Tensor, context: Context) -> bool:
    """Returns whether `multiply` is to be used for these rows: in training steps on a CPU that is faster at it."""
    return (
        context.matmul_precision == BFLOAT16
        and context.platform == "cpu"
        and context.training
        and rows.dtype == tf.float32
        and processor.multiplies_bfloat16()
    )


def multiply(rows: tf.Tensor, weights: tf.Tensor, transpose_b: bool = False) -> tf.Tensor:
    """`[..., A, K]` times `[..., K, B]`, or the transpose of `[..., B, K]`: `[..., A, B] float32`.

    Operands of its gradients are rounded, too.
    """
    scope = tf.get_current_name_scope()  # which `analysis.plan` and `tools.benchmarks.profile` tell parts by

    def product(rows, weights):
        narrow_rows, narrow_weights = tf.cast(rows, tf.bfloat16), tf.cast(weights, tf.bfloat16)

        def gradient(upstream):
            with tf.name_scope(f"gradient/{scope}"):
                narrow = tf.cast(upstream, tf.bfloat16)
                left, right = (narrow, narrow_rows) if transpose_b else (narrow_rows, narrow)
                return _multiply(narrow, narrow_weights, not transpose_b), _multiply(transpose(left), right)

        return _multiply(narrow_rows, narrow_weights, transpose_b), gradient

    return tf.custom_gradient(product)(rows, weights)


def _multiply(left: tf.Tensor, right: tf.Tensor, transpose_b: bool = False) -> tf.Tensor:
    """The product of bfloat16 tensors, in float32."""
    if tf.executing_eagerly():  # TensorFlow's own kernels have no such product; those of float32 are as exact
        return tf.matmul(tf.cast(left, tf.float32), tf.cast(right, tf.float32), transpose_b=transpose_b)
    return tf.matmul(left, right, transpose_b=transpose_b, output_type=tf.float32)
