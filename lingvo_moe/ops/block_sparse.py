"""Block-sparse experts, for inference on one processor: buffer positions without a token are not computed.

Where experts have capacity for every token (C = S), most of the [E, C] buffer positions are empty. Here the rows of
each expert are contiguous and padded to whole blocks, and a loop computes the blocks that are used (as MegaBlocks does:
Gale et al. 2022, arXiv 2211.15841). Their number is known only at run time, so the loop has no gradient and cannot be
sharded over experts.
"""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.dispatch import choices_of
from lingvo_moe.ops.projection import project
from lingvo_moe.ops.routing import NONE, Routing, sum_of_choices
from lingvo_moe.ops.slices import dynamic_update_slice

_SMALLEST, _LARGEST = 8, 64  # rows of a block
# Up to this many experts, each has a loop of its own; of more, the weights of each block are looked up and copied.
FEW_EXPERTS = 16


def prefers_block_sparse(context: Context) -> bool:
    """Whether `BlockSparse` is faster than buffers with capacity for every token.

    It is in inference, on a CPU that has all experts to itself. Pipeline stages cannot vectorise it.
    """
    return not context.training and context.platform == "cpu" and context.layout.is_one_device


class BlockSparse:
    """The rows of all choices, sorted by expert, in blocks.

    Choice K * n + k is the k-th of token n, all groups counted through; block b has the rows b * size and following.

    Attributes:
      size: rows of a block, about half of an expert's average number of rows.
      number: of blocks, at most; the number in use is known only at run time.
    """

    def __init__(self, routing: Routing, num_experts: int):
        experts, weights = (tf.reshape(part, (-1,)) for part in (routing.expert_indices(), routing.weights))
        num_choices = experts.shape[0]
        self.size = block_size(num_choices, num_experts)
        self.number = -(-num_choices // self.size) + num_experts
        present = tf.not_equal(weights, 0.0)
        chosen = tf.cast(tf.logical_and(tf.equal(experts[:, None], tf.range(num_experts)), present[:, None]), tf.int32)
        blocks_of_expert = -(-tf.reduce_sum(chosen, axis=0) // self.size)
        self._ends = tf.cumsum(blocks_of_expert)  # [E]: the first block after the expert's
        starts = (self._ends - blocks_of_expert) * self.size
        rows = tf.reduce_sum(chosen * (starts + tf.cumsum(chosen, axis=0, exclusive=True)), axis=-1)
        self._row_of_choice, self._weights = tf.where(present, rows, NONE), routing.weights

    def dispatch(self, tokens: tf.Tensor) -> tf.Tensor:
        """Tokens `[G, S, M]` to rows `[number * size, M]`, zeros in unused ones."""
        choices = choices_of(self._row_of_choice[None], self.number * self.size)[0]
        tokens = tf.reshape(tokens, (-1, tokens.shape[-1]))
        rows = tf.gather(tokens, tf.maximum(choices, 0) // self._weights.shape[-1])
        return tf.where(tf.equal(choices, NONE)[:, None], tf.zeros((), rows.dtype), rows)

    def apply(self, theta: dict, rows: tf.Tensor, context: Context) -> tf.Tensor:
        """Computes the experts' networks: rows to rows, zeros in unused ones.

        Args:
          theta: `wi [E, M, H]` and `wo [E, H, M]`, or each as returned by `unstack_experts`.
          rows: `[number * size, M]`.
          context: of the call.
        """
        outputs = tf.zeros_like(rows)
        if self._ends.shape[0] > FEW_EXPERTS:
            block_is_after = tf.range(self.number)[:, None] >= self._ends
            expert_of = tf.reduce_sum(tf.cast(block_is_after, tf.int32), axis=-1)
            return self._loop(
                tf.constant(0),
                self._ends[-1],
                rows,
                outputs,
                context,
                lambda block: (theta["wi"][expert_of[block]], theta["wo"][expert_of[block]]),
            )
        start = tf.constant(0)
        for expert, matrices in enumerate(zip(_matrices(theta["wi"]), _matrices(theta["wo"]), strict=True)):
            outputs = self._loop(
                start, self._ends[expert], rows, outputs, context, lambda _, matrices=matrices: matrices
            )
            start = self._ends[expert]
        return outputs

    def _loop(
        self,
        start: tf.Tensor,
        end: tf.Tensor,
        rows: tf.Tensor,
        outputs: tf.Tensor,
        context: Context,
        matrices_of: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    ) -> tf.Tensor:
        """Writes blocks start .. end - 1 of `outputs`, each computed with the two matrices of its expert."""

        def body(block, outputs):
            offset, (wi, wo) = [block * self.size, 0], matrices_of(block)
            own = tf.slice(rows, offset, (self.size, rows.shape[-1]))
            hidden = tf.nn.relu(project(own, wi, context))
            return block + 1, dynamic_update_slice(outputs, project(hidden, wo, context), offset)

        return tf.while_loop(lambda block, _: block < end, body, (start, outputs), maximum_iterations=self.number)[1]

    def combine(self, rows: tf.Tensor, context: Context) -> tf.Tensor:
        """Rows to the weighted sums of each token's choices, in float32: `[G, S, M]`, zeros where it has none."""
        taken = tf.gather(rows, tf.reshape(tf.maximum(self._row_of_choice, 0), self._weights.shape))
        return context.cast(sum_of_choices(tf.cast(taken, tf.float32) * self._weights[..., None]))


def unstack_experts(weights: tf.Tensor) -> dict:
    """`[R, E, ...]` as a tree of each expert's weights, `[R, ...]`, so that no use has to slice them."""
    return {f"expert_{expert}": weights[:, expert] for expert in range(weights.shape[1])}


def _matrices(weights: dict | tf.Tensor) -> list[tf.Tensor]:
    if not isinstance(weights, dict):
        return tf.unstack(weights)
    # By name: a tree that passes a loop or a program is sorted by name, `expert_10` before `expert_2`.
    return [weights[f"expert_{expert}"] for expert in range(len(weights))]


def block_size(num_choices: int, num_experts: int) -> int:
    """A power of two: too few rows waste a read of the weights, too many are mostly empty."""
    half = max(num_choices // num_experts, 1).bit_length() - 2
    return min(max(1 << max(half, 0), _SMALLEST), _LARGEST)
