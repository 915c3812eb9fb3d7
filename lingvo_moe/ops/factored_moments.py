"""The root-mean-square of an update that is scaled by factored second moments (Adafactor, algorithm 4)."""

from __future__ import annotations

import math

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context


def mean_of_quotients(
    squared: tf.Tensor,
    row: tf.Tensor,
    column: tf.Tensor,
    logical_axes: str,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
) -> tf.Tensor:
    """The mean over each matrix of `squared / (row * column)`, as a product with a vector for each matrix.

    No quotient is written to memory to be summed up.

    Args:
      squared: squares of a gradient, with the dimensions `logical_axes`.
      row: factors by row, with size 1 along the columns.
      column: factors by column, without the dimensions of the rows.
      logical_axes: of `squared`.
      rows: the dimensions of the rows of each matrix.
      columns: the dimensions of its columns.

    Returns:
      Means with the rank of `squared`, of size 1 along rows and columns.
    """
    row_axes, column_axes = (
        "".join(axis for d, axis in enumerate(logical_axes) if d not in without) for without in (columns, rows)
    )
    sums = tf.einsum(f"{logical_axes},{column_axes}->{row_axes}", squared, 1.0 / column)
    for dimension in columns:
        sums = tf.expand_dims(sums, dimension)
    num_columns = math.prod(squared.shape[d] for d in columns)
    return tf.reduce_mean(sums / row, axis=rows, keepdims=True) / num_columns


def prefers_mean_of_quotients(
    logical_axes: str, rows: tuple[int, ...], columns: tuple[int, ...], context: Context
) -> bool:
    """Whether `mean_of_quotients` is faster than the update's mean square: on a CPU, where no matrix is sharded."""
    return context.platform == "cpu" and all(
        context.layout.num_shards(logical_axes, logical_axes[d]) == 1 for d in (*rows, *columns)
    )
