"""The mean square of an update that is scaled by factored second moments (Adafactor, algorithm 4)."""

from __future__ import annotations

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context


def mean_by_rows(
    gradient: tf.Tensor, row: tf.Tensor, by_column: tf.Tensor, rows: tuple[int, ...], columns: tuple[int, ...]
) -> tf.Tensor:
    """The mean over each matrix of `(gradient * by_column)^2 / row`, from the mean of each row.

    Each element is multiplied by one factor instead of two. The row's moment divides, as the square of its inverse root
    may overflow.

    Args:
      gradient: of a weight.
      row: second moments by row, with size 1 along the columns.
      by_column: factors, with size 1 along the rows.
      rows: the dimensions of the rows of each matrix.
      columns: the dimensions of its columns.

    Returns:
      Means with the rank of `gradient`, of size 1 along rows and columns.
    """
    means = tf.reduce_mean(tf.square(gradient * by_column), axis=columns, keepdims=True)
    return tf.reduce_mean(means / row, axis=rows, keepdims=True)


def prefers_mean_by_rows(logical_axes: str, rows: tuple[int, ...], columns: tuple[int, ...], context: Context) -> bool:
    """Whether `mean_by_rows` is faster than the mean of all elements: on a CPU, where no matrix is sharded."""
    return context.platform == "cpu" and all(
        context.layout.num_shards(logical_axes, logical_axes[d]) == 1 for d in (*rows, *columns)
    )
