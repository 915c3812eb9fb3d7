"""Block-sparse experts, for inference on one processor: buffer positions without a token are not computed.

Where experts have capacity for every token (C = S), most of the [E, C] buffer positions are empty. Here the rows of
each expert are contiguous and padded to whole blocks, and a loop computes the blocks that are used (as MegaBlocks does:
Gale et al. 2022, arXiv 2211.15841). Their number is known only at run time, so the loop has no gradient and cannot be
sharded over experts.

XLA's CPU kernel rearranges the second factor of a matmul before it multiplies. With few rows, that of an expert's
weights takes longer than the matmul. So a search transposes the weights once, and multiplies them by transposed rows.
"""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe import tree
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.dispatch import choices_of
from lingvo_moe.ops.products import multiply
from lingvo_moe.ops.projection import project
from lingvo_moe.ops.routing import NONE, Routing, sum_of_choices
from lingvo_moe.ops.slices import dynamic_update_slice
from lingvo_moe.ops.tiles import transpose

_SMALLEST, _LARGEST = 8, 64  # rows of a block
# Up to this many experts, each has a loop of its own; of more, the weights of each block are looked up and copied.
FEW_EXPERTS = 16
_WEIGHTS = ("wi", "wo", "wi_bias", "wo_bias")


def prefers_block_sparse(context: Context) -> bool:
    """Whether `BlockSparse` is faster than buffers with capacity for every token.

    It is in inference, on a CPU that has all experts to itself. Pipeline stages cannot vectorise it.
    """
    return not context.training and context.is_one_cpu


class BlockSparse:
    """The rows of all choices, sorted by expert, in blocks.

    Choice K * n + k is the k-th of token n, numbered across all groups; block b has the rows b * size and following.

    Attributes:
      size: rows of a block, see `block_size`.
      number: of blocks, at most; the number in use is known only at run time.
    """

    def __init__(self, routing: Routing, num_experts: int, prepared: bool = False):
        """Sorts the choices; `prepared` tells whether `apply` will have weights of `prepare_experts`."""
        experts, weights = (tf.reshape(part, (-1,)) for part in (routing.expert_indices(), routing.weights))
        num_choices = experts.shape[0]
        self.size = block_size(num_choices, num_experts, prepared)
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
        """Computes the experts' networks: rows to rows; `combine` does not read those of unused rows.

        Args:
          theta: `wi [E, M, H]` and `wo [E, H, M]`, or each as returned by `prepare_experts`; with biases, also
            `wi_bias [E, H]` and `wo_bias [E, M]`.
          rows: `[number * size, M]`.
          context: of the call.
        """
        outputs, of_experts = tf.zeros_like(rows), {name: theta[name] for name in _WEIGHTS if name in theta}
        if not isinstance(theta["wi"], dict) and self._ends.shape[0] > FEW_EXPERTS:
            block_is_after = tf.range(self.number)[:, None] >= self._ends
            expert_of = tf.reduce_sum(tf.cast(block_is_after, tf.int32), axis=-1)

            def compute(block, own):
                return _network(tree.map_leaves(lambda weights: weights[expert_of[block]], of_experts), context)(own)

            return self._loop(tf.constant(0), self._ends[-1], rows, outputs, compute)
        start = tf.constant(0)
        for network, end in zip(_networks(of_experts, context), tf.unstack(self._ends), strict=True):
            outputs = self._loop(start, end, rows, outputs, lambda _, own, network=network: network(own))
            start = end
        return outputs

    def _loop(
        self,
        start: tf.Tensor,
        end: tf.Tensor,
        rows: tf.Tensor,
        outputs: tf.Tensor,
        compute: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Writes blocks start .. end - 1 of `outputs`, each computed from (its number, its rows)."""

        def body(block, outputs):
            offset = [block * self.size, 0]
            own = tf.slice(rows, offset, (self.size, rows.shape[-1]))
            return block + 1, dynamic_update_slice(outputs, compute(block, own), offset)

        return tf.while_loop(lambda block, _: block < end, body, (start, outputs), maximum_iterations=self.number)[1]

    def combine(self, rows: tf.Tensor, context: Context) -> tf.Tensor:
        """Rows to the weighted sums of each token's choices, in float32: `[G, S, M]`, zeros where it has none."""
        taken = tf.gather(rows, tf.reshape(tf.maximum(self._row_of_choice, 0), self._weights.shape))
        return context.cast(sum_of_choices(tf.cast(taken, tf.float32) * self._weights[..., None]))


def prepare_experts(weights: tf.Tensor) -> dict:
    """`[R, E, A, B]` as a tree of each expert's transposed weights, `[R, B, A]`, for many calls of `apply`."""
    return {f"expert_{expert}": tf.transpose(weights[:, expert], (0, 2, 1)) for expert in range(weights.shape[1])}


def _networks(theta: dict, context: Context) -> list[Callable[[tf.Tensor], tf.Tensor]]:
    """The networks of few experts, see `BlockSparse.apply`."""
    network, unstacked = _network, {}
    for name, weights in theta.items():
        if isinstance(weights, dict):
            # By name: a tree that passes a loop or a program is sorted by name, `expert_10` before `expert_2`.
            network = _transposed_network
            unstacked[name] = [weights[f"expert_{expert}"] for expert in range(len(weights))]
        else:
            unstacked[name] = tf.unstack(weights)
    return [
        network(dict(zip(unstacked, of_expert, strict=True)), context)
        for of_expert in zip(*unstacked.values(), strict=True)
    ]


def _network(expert: dict, context: Context) -> Callable[[tf.Tensor], tf.Tensor]:
    """An expert's network of rows `[size, M]`."""

    def compute(rows: tf.Tensor) -> tf.Tensor:
        hidden = tf.nn.relu(project(rows, expert["wi"], context, bias=expert.get("wi_bias")))
        return project(hidden, expert["wo"], context, bias=expert.get("wo_bias"))

    return compute


def _transposed_network(expert: dict, context: Context) -> Callable[[tf.Tensor], tf.Tensor]:
    """The same, from transposed matrices."""

    def product(name: str, columns: tf.Tensor) -> tf.Tensor:
        products = multiply(context.cast(expert[name]), columns, context)
        bias = expert.get(f"{name}_bias")
        return products if bias is None else products + context.cast(bias)[:, None]

    return lambda rows: transpose(product("wo", tf.nn.relu(product("wi", transpose(rows)))))


def block_size(num_choices: int, num_experts: int, prepared: bool = False) -> int:
    """A power of two: too few rows waste a read of the weights, too many are mostly empty.

    About half of an expert's average number of rows. With weights of `prepare_experts`, about that number: a block of
    16 rows takes little longer than one of 8; beyond 32 rows, other matmuls are as fast.
    """
    bits = max(num_choices // num_experts, 1).bit_length()
    if prepared:
        return min(max(1 << (bits - 1), 16), 32)
    return min(max(1 << max(bits - 2, 0), _SMALLEST), _LARGEST)
