"""Flat beam search (GShard appendix A.1): the hypotheses of a sentence share one sequence of keys and values.

At step t the K hypotheses of a sentence write their keys and values to the positions t*K .. t*K + K - 1 of one cache of
T*K positions. A 0/1 mask says which positions a hypothesis attends to: those of its ancestors. Reordering the beam
reorders the mask alone; keys and values are written once and never move. The search is graph code, one XLA program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.top_k import VocabularyChunks, largest_few

_IMPOSSIBLE = -float("inf")

# (decoding state, ids [B, K], paddings [B, K], position, first cache position, mask [B, K, T*K])
# -> (logits [B, K, V], decoding state)
Step = Callable[[dict, "tf.Tensor", "tf.Tensor", "tf.Tensor", "tf.Tensor", "tf.Tensor"], tuple["tf.Tensor", dict]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """The settings of a beam search.

    Attributes:
      beam_size: K, the number of hypotheses kept, and returned, for each sentence.
      max_length: T, the maximal number of tokens of a translation, eos included.
      length_alpha: scores are divided by ((5 + length) / 6)^alpha (Wu et al. 2016, section 7, cited in appendix A.1).
      bos_id, eos_id: the token that begins the decoder's input, and the one that ends a hypothesis.
      forbidden_ids: tokens that no hypothesis contains (padding, bos, unknown).
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
        """T*K, the number of cache positions for one sentence."""
        return self.beam_size * self.max_length

    def confidence(self, score: float, length: int) -> float:
        """Returns the geometric mean of the tokens' probabilities of a hypothesis, 0 to 1.

        Args:
          score: its length-normalised log-probability.
          length: in tokens, eos included.
        """
        log_probability = score * ((5 + length) / 6) ** self.length_alpha
        return math.exp(log_probability / max(length, 1))


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """The best translations of each sentence, best first.

    Attributes:
      ids: `[B, K, T] int32`; a finished hypothesis ends with eos, and zeros follow.
      scores: `[B, K] float32`, length-normalised log-probabilities.
      lengths: `[B, K] int32`, in tokens, eos included.
    """

    ids: tf.Tensor
    scores: tf.Tensor
    lengths: tf.Tensor


def flat_beam_search(
    search: BeamSearch, step: Step, model_state: dict, present: tf.Tensor, context: Context
) -> Hypotheses:
    """Finds the K best translations of each sentence.

    The search of a sentence ends when its worst finished hypothesis is better than its best active one can become. A
    hypothesis that reaches `max_length` without eos ranks after all finished ones.

    To the model's step, hypotheses that can have no effect are paddings, so that experts spend no capacity on them:
    impossible ones (at the first token all but one), and those of sentences whose search has ended or that are absent.

    Args:
      search: the settings.
      step: the model's decoding step.
      model_state: the model's decoding state before the first token.
      present: `[B] bool`, whether a row has a sentence. The hypotheses of other rows have no meaning.
      context: the layout of the search's own tensors.

    Returns:
      The hypotheses of all sentences.
    """
    batch = present.shape[0]
    beam = _Beam(search, batch, context)

    def searched(active, finished):
        return tf.logical_and(present, beam.can_improve(active, finished))

    def body(t, active, finished, mask, model_state):
        own = beam.own_positions(t)
        paddings = beam.paddings(active, searched(active, finished))
        first, seen = t * search.beam_size, tf.logical_or(mask, own)
        logits, model_state = step(model_state, active["last"], paddings, t, first, seen)
        active, finished, parents = beam.expand(t, logits, active, finished)
        mask = beam.reorder(seen, parents)
        return t + 1, active, finished, mask, model_state

    def unfinished(t, active, finished, mask, model_state):
        del mask, model_state
        return tf.logical_and(t < search.max_length, tf.reduce_any(searched(active, finished)))

    mask = context.annotate(tf.zeros((batch, search.beam_size, search.cache_length), tf.bool), "BTL")
    state = (tf.constant(0), beam.initial(), beam.no_finished(), mask, model_state)
    t, active, finished, _, _ = tf.while_loop(unfinished, body, state, maximum_iterations=search.max_length)
    return beam.result(t, active, finished)


class _Beam:
    """The hypotheses of one search.

    Active ones are a dict of `ids [B, K, T]`, `last [B, K]` and `scores [B, K]`, sums of log-probabilities. Finished
    ones are a dict of `ids`, `scores` (normalised) and `lengths`.
    """

    def __init__(self, search: BeamSearch, batch: int, context: Context):
        self._search, self._batch, self._context = search, batch, context
        self._shape = (batch, search.beam_size)

    def initial(self) -> dict:
        """Returns the empty hypothesis of each sentence, and impossible ones for the rest of the beam."""
        only_first = tf.range(self._search.beam_size) > 0
        scores = tf.tile(tf.where(only_first, _IMPOSSIBLE, 0.0)[None], [self._batch, 1])
        ids = tf.zeros((*self._shape, self._search.max_length), tf.int32)
        return {
            "ids": self._annotate(ids),
            "last": self._annotate(tf.fill(self._shape, self._search.bos_id)),
            "scores": self._annotate(scores),
        }

    def no_finished(self) -> dict:
        """Returns impossible hypotheses: none is finished yet."""
        return {
            "ids": self._annotate(tf.zeros((*self._shape, self._search.max_length), tf.int32)),
            "scores": self._annotate(tf.fill(self._shape, _IMPOSSIBLE)),
            "lengths": self._annotate(tf.zeros(self._shape, tf.int32)),
        }

    def own_positions(self, t: tf.Tensor) -> tf.Tensor:
        """Returns the mask of step t's own cache positions: `[1, K, T*K] bool`, true at t*K + k for hypothesis k."""
        own = t * self._search.beam_size + tf.range(self._search.beam_size)
        return tf.equal(tf.range(self._search.cache_length), own[:, None])[None]

    def paddings(self, active: dict, searched: tf.Tensor) -> tf.Tensor:
        """Returns `[B, K] bool`: the impossible hypotheses, and all of sentences that are not `searched [B] bool`."""
        possible = active["scores"] > _IMPOSSIBLE
        return self._annotate(tf.logical_not(tf.logical_and(possible, searched[:, None])))

    def reorder(self, values: tf.Tensor, parents: tf.Tensor) -> tf.Tensor:
        """Gathers `values [B, K, ...]` by `parents [B, K]`."""
        return self._annotate(tf.gather(values, parents, batch_dims=1))

    def expand(self, t: tf.Tensor, logits: tf.Tensor, active: dict, finished: dict) -> tuple[dict, dict, tf.Tensor]:
        """Extends every active hypothesis by every token; returns (active, finished, parents of the active ones)."""
        size, vocabulary = self._search.beam_size, logits.shape[-1]
        logits = self._annotate(self._forbid(logits))
        chunks = VocabularyChunks.of(logits, 2 * size)
        best = chunks.largest()
        normalizers = best + tf.math.log(tf.reduce_sum(tf.exp(logits - best[..., None]), axis=-1))
        # Of the best 2K candidates at most K end, so at least K stay active.
        scores, flat = chunks.largest_few_sums(active["scores"] - normalizers, 2 * size, self._context)
        parents, tokens = flat // vocabulary, flat % vocabulary
        written = tf.equal(tf.range(self._search.max_length), t)
        ids = tf.where(written, tokens[..., None], tf.gather(active["ids"], parents, batch_dims=1))
        ended = tf.equal(tokens, self._search.eos_id)
        candidates = {
            "ids": ids,
            "scores": tf.where(ended, scores / self._length_penalty(t + 1), _IMPOSSIBLE),
            "lengths": tf.fill(scores.shape, t + 1),
        }
        finished = self._keep_best({name: tf.concat([finished[name], candidates[name]], axis=1) for name in finished})
        active = self._keep_best(
            {"ids": ids, "last": tokens, "parents": parents, "scores": tf.where(ended, _IMPOSSIBLE, scores)}
        )
        return {name: active[name] for name in ("ids", "last", "scores")}, finished, active["parents"]

    def can_improve(self, active: dict, finished: dict) -> tf.Tensor:
        """Returns `[B] bool`: whether an active hypothesis can still become better than the worst finished one."""
        # Log-probabilities decrease and the penalty increases, so this bounds every continuation (for alpha >= 0).
        bound = active["scores"][:, 0] / self._length_penalty(tf.constant(self._search.max_length))
        return bound > finished["scores"][:, -1]

    def result(self, t: tf.Tensor, active: dict, finished: dict) -> Hypotheses:
        """Returns the finished hypotheses, followed by active ones where there are fewer than K."""
        active_scores = active["scores"] / self._length_penalty(t)
        count = tf.reduce_sum(tf.cast(finished["scores"] > _IMPOSSIBLE, tf.int32), axis=-1, keepdims=True)
        rank = tf.range(self._search.beam_size)[None]
        order = tf.where(rank < count, rank, self._search.beam_size + rank - count)  # both lists are sorted
        lengths = tf.fill(self._shape, t)

        def pick(finished: tf.Tensor, active: tf.Tensor) -> tf.Tensor:
            return self._annotate(tf.gather(tf.concat([finished, active], axis=1), order, batch_dims=1))

        return Hypotheses(
            ids=pick(finished["ids"], active["ids"]),
            scores=pick(finished["scores"], active_scores),
            lengths=pick(finished["lengths"], lengths),
        )

    def _keep_best(self, candidates: dict) -> dict:
        _, order = largest_few(candidates["scores"], self._search.beam_size, self._context)
        return {name: self.reorder(value, order) for name, value in candidates.items()}

    def _forbid(self, logits: tf.Tensor) -> tf.Tensor:
        ids = tf.range(logits.shape[-1])
        forbidden = tf.reduce_any(tf.equal(ids[:, None], tf.constant(self._search.forbidden_ids, tf.int32)), axis=-1)
        return tf.where(forbidden, _IMPOSSIBLE, logits)

    def _length_penalty(self, length: tf.Tensor) -> tf.Tensor:
        """Returns the length penalty ((5 + length) / 6) ** alpha (Wu et al. 2016, section 7)."""
        return tf.pow((5.0 + tf.cast(length, tf.float32)) / 6.0, self._search.length_alpha)

    def _annotate(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, "BTL"[: tensor.shape.rank])
