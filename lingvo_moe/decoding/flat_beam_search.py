"""Flat beam search (GShard appendix A.1): the hypotheses of a sentence share one sequence of keys and values.

At step t the K hypotheses of a sentence write their keys and values to the positions t*K .. t*K + K - 1 of one cache of
T*K positions. A hypothesis sees the positions of its ancestors, which a 0/1 mask says. When the beam is reordered only the
mask is: keys and values are written once and never move. The search is graph code from beginning to end, one XLA program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.top_k import VocabularyChunks, largest_few

_IMPOSSIBLE = -float("inf")

# (model state, ids [B, K], position, first cache position, mask [B, K, T*K]) -> (logits [B, K, V], model state)
Step = Callable[[dict, "tf.Tensor", "tf.Tensor", "tf.Tensor", "tf.Tensor"], tuple["tf.Tensor", dict]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """How to search.

    Attributes:
      beam_size: K, hypotheses kept per sentence; also how many are returned.
      max_length: T, the most tokens a translation may have, its eos included.
      length_alpha: scores are divided by ((5 + length) / 6)^alpha (Wu et al. 2016, section 7, as appendix A.1 cites it).
      bos_id, eos_id: the token that begins the decoder's input, and the one that ends a hypothesis.
      forbidden_ids: tokens that no hypothesis may hold (padding, bos, unknown).
    """

    beam_size: int = 4
    max_length: int = 64
    length_alpha: float = 0.6
    bos_id: int = 2
    eos_id: int = 1
    forbidden_ids: tuple[int, ...] = (0, 2, 3)

    def __post_init__(self):
        if self.beam_size < 1 or self.max_length < 1:
            raise UserError(f"beam_size is {self.beam_size} and max_length {self.max_length}; both must be at least 1.")

    @property
    def cache_length(self) -> int:
        """T*K, the cache positions that one sentence needs."""
        return self.beam_size * self.max_length


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """The best translations of each sentence, best first.

    Attributes:
      ids: `[B, K, T] int32`, ending with eos where it was reached, then zeros.
      scores: `[B, K] float32`, length-normalised log-probabilities.
      lengths: `[B, K] int32`, tokens, eos included.
    """

    ids: tf.Tensor
    scores: tf.Tensor
    lengths: tf.Tensor


def flat_beam_search(search: BeamSearch, step: Step, model_state: dict, batch: int, context: Context) -> Hypotheses:
    """Finds the K best translations of each of `batch` sentences.

    A sentence is done when its worst finished hypothesis is better than its best living one can become. A hypothesis that
    reaches `max_length` without eos counts after all finished ones.

    Args:
      search: how.
      step: the model's decoding step.
      model_state: the model's state before the first token.
      batch: B.
      context: places the search's own tensors.
    """
    beam = _Beam(search, batch, context)

    def body(t, alive, finished, mask, model_state):
        own = beam.own_positions(t)
        logits, model_state = step(model_state, alive["last"], t, t * search.beam_size, tf.logical_or(mask, own))
        alive, finished, parents = beam.expand(t, logits, alive, finished)
        mask = beam.reorder(tf.logical_or(mask, own), parents)
        return t + 1, alive, finished, mask, model_state

    def unfinished(t, alive, finished, mask, model_state):
        del mask, model_state
        return tf.logical_and(t < search.max_length, tf.reduce_any(beam.can_improve(alive, finished)))

    mask = context.annotate(tf.zeros((batch, search.beam_size, search.cache_length), tf.bool), "BTL")
    state = (tf.constant(0), beam.first_alive(), beam.none_finished(), mask, model_state)
    t, alive, finished, _, _ = tf.while_loop(unfinished, body, state, maximum_iterations=search.max_length)
    return beam.result(t, alive, finished)


class _Beam:
    """The bookkeeping of one search. Living hypotheses: `ids [B, K, T]`, `last [B, K]`, `scores [B, K]` (sums of
    log-probabilities). Finished ones: `ids`, `scores` (normalised), `lengths`."""

    def __init__(self, search: BeamSearch, batch: int, context: Context):
        self._search, self._batch, self._context = search, batch, context
        self._shape = (batch, search.beam_size)

    def first_alive(self) -> dict:
        """One living hypothesis per sentence, the empty one; the other places hold impossible ones."""
        only_first = tf.range(self._search.beam_size) > 0
        scores = tf.tile(tf.where(only_first, _IMPOSSIBLE, 0.0)[None], [self._batch, 1])
        ids = tf.zeros((*self._shape, self._search.max_length), tf.int32)
        return {
            "ids": self._place(ids),
            "last": self._place(tf.fill(self._shape, self._search.bos_id)),
            "scores": self._place(scores),
        }

    def none_finished(self) -> dict:
        """No finished hypothesis yet."""
        return {
            "ids": self._place(tf.zeros((*self._shape, self._search.max_length), tf.int32)),
            "scores": self._place(tf.fill(self._shape, _IMPOSSIBLE)),
            "lengths": self._place(tf.zeros(self._shape, tf.int32)),
        }

    def own_positions(self, t: tf.Tensor) -> tf.Tensor:
        """Where step t's tokens are in the cache: `[1, K, T*K] bool`, true at t*K + k for hypothesis k."""
        own = t * self._search.beam_size + tf.range(self._search.beam_size)
        return tf.equal(tf.range(self._search.cache_length), own[:, None])[None]

    def reorder(self, values: tf.Tensor, parents: tf.Tensor) -> tf.Tensor:
        """`[B, K, ...]` by `parents [B, K]`."""
        return self._place(tf.gather(values, parents, batch_dims=1))

    def expand(self, t: tf.Tensor, logits: tf.Tensor, alive: dict, finished: dict) -> tuple[dict, dict, tf.Tensor]:
        """Prolongs every living hypothesis by every token; returns the new living and finished ones and the parents."""
        size, vocabulary = self._search.beam_size, logits.shape[-1]
        logits = self._place(self._forbid(logits))
        chunks = VocabularyChunks.of(logits, 2 * size)
        best = chunks.largest()
        normalizers = best + tf.math.log(tf.reduce_sum(tf.exp(logits - best[..., None]), axis=-1))
        # Among the best 2K candidates at most K end, so at least K go on.
        scores, flat = chunks.largest_few_sums(alive["scores"] - normalizers, 2 * size, self._context)
        parents, tokens = flat // vocabulary, flat % vocabulary
        written = tf.equal(tf.range(self._search.max_length), t)
        ids = tf.where(written, tokens[..., None], tf.gather(alive["ids"], parents, batch_dims=1))
        ended = tf.equal(tokens, self._search.eos_id)
        candidates = {
            "ids": ids,
            "scores": tf.where(ended, scores / self._penalty(t + 1), _IMPOSSIBLE),
            "lengths": tf.fill(scores.shape, t + 1),
        }
        finished = self._keep_best({name: tf.concat([finished[name], candidates[name]], axis=1) for name in finished})
        alive = self._keep_best(
            {"ids": ids, "last": tokens, "parents": parents, "scores": tf.where(ended, _IMPOSSIBLE, scores)}
        )
        return {name: alive[name] for name in ("ids", "last", "scores")}, finished, alive["parents"]

    def can_improve(self, alive: dict, finished: dict) -> tf.Tensor:
        """`[B] bool`: whether a living hypothesis can still become better than the worst finished one."""
        # Log-probabilities only fall and the penalty only grows, so this bounds every continuation (for alpha >= 0).
        bound = alive["scores"][:, 0] / self._penalty(tf.constant(self._search.max_length))
        return bound > finished["scores"][:, -1]

    def result(self, t: tf.Tensor, alive: dict, finished: dict) -> Hypotheses:
        """The finished hypotheses, then living ones where there are too few."""
        living_scores = alive["scores"] / self._penalty(t)
        count = tf.reduce_sum(tf.cast(finished["scores"] > _IMPOSSIBLE, tf.int32), axis=-1, keepdims=True)
        place = tf.range(self._search.beam_size)[None]
        order = tf.where(place < count, place, self._search.beam_size + place - count)  # both lists are sorted
        lengths = tf.fill(self._shape, t)

        def pick(of_finished: tf.Tensor, of_living: tf.Tensor) -> tf.Tensor:
            return self._place(tf.gather(tf.concat([of_finished, of_living], axis=1), order, batch_dims=1))

        return Hypotheses(
            ids=pick(finished["ids"], alive["ids"]),
            scores=pick(finished["scores"], living_scores),
            lengths=pick(finished["lengths"], lengths),
        )

    def _keep_best(self, candidates: dict) -> dict:
        _, order = largest_few(candidates["scores"], self._search.beam_size, self._context)
        return {name: self.reorder(value, order) for name, value in candidates.items()}

    def _forbid(self, logits: tf.Tensor) -> tf.Tensor:
        ids = tf.range(logits.shape[-1])
        forbidden = tf.reduce_any(tf.equal(ids[:, None], tf.constant(self._search.forbidden_ids, tf.int32)), axis=-1)
        return tf.where(forbidden, _IMPOSSIBLE, logits)

    def _penalty(self, length: tf.Tensor) -> tf.Tensor:
        return tf.pow((5.0 + tf.cast(length, tf.float32)) / 6.0, self._search.length_alpha)

    def _place(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, "BTL"[: tensor.shape.rank])
