"""The precision of matmuls of float32 operands.

Matrix units multiply bfloat16 (TPU) or TF32 (GPU). By default XLA rounds float32 operands to these, and what is sent to
be multiplied, such as an AllToAll of tokens, may already be rounded. CPUs multiply float32 by default and with
`highest`. With `bfloat16`, a CPU that multiplies bfloat16 faster (AMX, or AMD's AVX512-BF16) rounds the operands of
projections and experts; sums are float32 (`ops.products`). Operands in bfloat16 are not affected, and the routers'
matmuls are always exact (`ops.projection.project_in_float32`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.lazy import tf

DEFAULT, HIGHEST, BFLOAT16 = "default", "highest", "bfloat16"
# `default`: one matmul of operands that matrix units round. `highest`: as exact as float32, in six matmuls on a TPU.
# `bfloat16`: operands may be rounded to bfloat16 on any platform; TPUs and GPUs do what they do by default.
MATMUL_PRECISIONS = (DEFAULT, HIGHEST, BFLOAT16)


def check(precision: str):
    """Raises UserError if `precision` is none of MATMUL_PRECISIONS."""
    if precision not in MATMUL_PRECISIONS:
        raise UserError(
            f"matmul_precision is {precision!r}; use one of {', '.join(MATMUL_PRECISIONS)}."
            f"{did_you_mean(precision, MATMUL_PRECISIONS)}"
        )


def set_matmul_precision(precision: str):
    """Sets the precision of what TensorFlow compiles for XLA from now on, in this process."""
    # TensorFlow's name for it is that of GPUs; its compiler for XLA reads it for every platform.
    tf.config.experimental.enable_tensor_float_32_execution(precision != HIGHEST)


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Sets the precision of what TensorFlow compiles for XLA within the block."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    set_matmul_precision(precision)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
