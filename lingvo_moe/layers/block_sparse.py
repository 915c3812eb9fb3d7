"""The experts' networks over blocks of rows, for inference on a processor: no work for places that hold no token.

Where every expert has room for all tokens, most of the [E, C] places are empty. Here the rows of each expert stand together,
filled up to whole blocks, and a loop computes block after block, as far as there are any (as MegaBlocks does: Gale et al. 2022,
arXiv 2211.15841). How far that is, is known only when it runs; so it has no gradient, and is no work for devices that share the
experts out.
"""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.layers import gating
from lingvo_moe.layers.base import Context, project
from lingvo_moe.layers.dispatch import NONE, choices_of
from lingvo_moe.layers.repeat import dynamic_update
from lingvo_moe.lazy import tf

_SMALLEST, _LARGEST = 8, 64  # rows of a block
# Up to so many experts, each has a loop of its own; of more, the weights of each block's are looked up, and copied.
FEW = 16


class BlockSparse:
    """Where the choices of all tokens stand.

    Choice 2 * n + k is the k-th of token n, all groups counted through; the positions of block b are b * size and following.

    Attributes:
      size: rows of a block, about half of what an expert has on average.
      number: of blocks, at most; as many as are used can be known only when the program runs.
    """

    def __init__(self, routing: gating.Routing, num_experts: int):
        experts, weights = (tf.reshape(part, (-1,)) for part in (routing.experts, routing.weights))
        num_choices = experts.shape[0]
        self.size = block_size(num_choices, num_experts)
        self.number = -(-num_choices // self.size) + num_experts
        present = tf.not_equal(weights, 0.0)
        chosen = tf.cast(tf.logical_and(tf.equal(experts[:, None], tf.range(num_experts)), present[:, None]), tf.int32)
        of_expert = -(-tf.reduce_sum(chosen, axis=0) // self.size)
        self._ends = tf.cumsum(
            of_expert
        )  # [E]: the number of the first block that is not the expert's, nor one's before it
        starts = (self._ends - of_expert) * self.size
        positions = tf.reduce_sum(chosen * (starts + tf.cumsum(chosen, axis=0, exclusive=True)), axis=-1)
        self._positions, self._weights = tf.where(present, positions, NONE), routing.weights

    def dispatch(self, tokens: tf.Tensor) -> tf.Tensor:
        """Tokens `[G, S, M]` to positions `[number * size, M]`, zeros in empty ones."""
        choices = choices_of(self._positions[None], self.number * self.size)[0]
        rows = tf.gather(tf.reshape(tokens, (-1, tokens.shape[-1])), tf.maximum(choices, 0) // 2)
        return tf.where(tf.equal(choices, NONE)[:, None], tf.zeros((), rows.dtype), rows)

    def apply(self, theta: dict, rows: tf.Tensor, context: Context) -> tf.Tensor:
        """The networks of the experts, `wi [E, M, H]` and `wo [E, H, M]` or `one_by_one`: positions to positions, zeros in unused ones."""
        outputs = tf.zeros_like(rows)
        if self._ends.shape[0] > FEW:
            expert_of = tf.reduce_sum(tf.cast(tf.range(self.number)[:, None] >= self._ends, tf.int32), axis=-1)
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
        """`outputs` with blocks start .. end - 1 written, each by the two matrices that are its expert's."""

        def body(block, outputs):
            place, (wi, wo) = [block * self.size, 0], matrices_of(block)
            own = tf.slice(rows, place, (self.size, rows.shape[-1]))
            hidden = tf.nn.relu(project(own, wi, context))
            return block + 1, dynamic_update(outputs, project(hidden, wo, context), place)

        return tf.while_loop(lambda block, _: block < end, body, (start, outputs), maximum_iterations=self.number)[1]

    def combine(self, rows: tf.Tensor, context: Context) -> tf.Tensor:
        """Slots to the weighted sums of each token's two, in float32: `[G, S, M]`, zeros where it has none."""
        groups, size, _ = self._weights.shape
        taken = tf.gather(rows, tf.reshape(tf.maximum(self._positions, 0), (groups, size, 2)))
        first, second = tf.unstack(tf.cast(taken, tf.float32) * self._weights[..., None], axis=2)
        return context.cast(first + second)


def unstack_experts(weights: tf.Tensor) -> dict:
    """`[R, E, ...]` as the tree of its experts' own, `[R, ...]`, which need not be cut out again at each use."""
    return {f"expert_{expert}": weights[:, expert] for expert in range(weights.shape[1])}


def _matrices(weights: dict | tf.Tensor) -> list[tf.Tensor]:
    return list(weights.values()) if isinstance(weights, dict) else tf.unstack(weights)


def block_size(num_choices: int, num_experts: int) -> int:
    """A power of two: too few rows waste a read of the weights, too many are mostly empty."""
    half = max(num_choices // num_experts, 1).bit_length() - 2
    return min(max(1 << max(half, 0), _SMALLEST), _LARGEST)
