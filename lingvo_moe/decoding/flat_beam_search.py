"""Flat beam search (GShard appendix A.1): the hypotheses of a sentence share one sequence of keys and values.

At step t the K hypotheses of a sentence write their keys and values to the positions t*K .. t*K + K - 1 of one cache of
T*K positions. A 0/1 mask says which positions a hypothesis attends to: those of its ancestors. Reordering the beam
reorders the mask alone; keys and values are written once and never move. The search is graph code, one XLA program.

The searches of a batch do not end together: of m4.Pocket's batches, an eighth of the sentences is still searched after
three quarters of the steps. On one device, the loop over tokens is therefore two loops: of the whole batch and, as soon
as that is enough for the searches that have not ended, of a quarter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from lingvo_moe import ranges, tree
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.top_k import VocabularyChunks, top_k
from lingvo_moe.ranges import COUNT, COUNT_OR_0, Range

_NO_SCORE = -float("inf")

# (decoding state, ids [B, K], paddings [B, K], position, first cache position, mask [B, K, T*K])
# -> (logits [B, K, V], decoding state)
Step = Callable[[dict, "tf.Tensor", "tf.Tensor", "tf.Tensor", "tf.Tensor", "tf.Tensor"], tuple["tf.Tensor", dict]]
# (decoding state, rows of the batch) -> decoding state of these rows
SelectRows = Callable[[dict, "tf.Tensor"], dict]
MOST_POSITIONS = 2**24  # of a cache for one sentence; far beyond any memory
_ALPHAS = Range(0, 10)  # far beyond any use; scores of larger ones are not finite
_FEW_ROWS_DIVISOR = 4  # a search narrows to a quarter of its batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """The settings of a beam search.

    Attributes:
      beam_size: K, the number of hypotheses kept, and returned, for each sentence.
      max_length: T, the maximal number of tokens of a translation, eos included.
      length_alpha: scores are divided by ((5 + length) / 6)^alpha (Wu et al. 2016, section 7, cited in appendix A.1).
      bos_id, eos_id: the token that begins the decoder's input, and the one that ends a hypothesis.
      forbidden_ids: tokens that no hypothesis contains (padding, bos, unknown).
      force_first: whether each sentence comes with the first token of its hypotheses, that of their language, instead
        of the model choosing it. Its probability is 1, and it is one of the `max_length` tokens.
    """

    beam_size: int = 4
    max_length: int = 64
    length_alpha: float = 0.6
    bos_id: int = 2
    eos_id: int = 1
    forbidden_ids: tuple[int, ...] = (0, 2, 3)
    force_first: bool = False

    def __post_init__(self):
        counts = dict.fromkeys(("beam_size", "max_length"), COUNT)
        ids = {"bos_id": COUNT_OR_0, "eos_id": COUNT_OR_0}
        ranges.check("search.", self, {**counts, **ids, "length_alpha": _ALPHAS})
        if self.cache_length > MOST_POSITIONS:
            raise UserError(
                f"search.beam_size {self.beam_size} x search.max_length {self.max_length} are {self.cache_length} "
                f"positions of keys and values for a sentence; expected at most {MOST_POSITIONS}."
            )

    @property
    def cache_length(self) -> int:
        """T*K, the number of cache positions for one sentence."""
        return self.beam_size * self.max_length

    def forbid(self, logits: tf.Tensor, t: tf.Tensor, first_ids: tf.Tensor | None = None) -> tf.Tensor:
        """Returns logits of token number t with minus infinity for what it cannot be.

        Args:
          logits: `[..., V]`; with `first_ids`, `[B, K, V]`.
          t: scalar int32.
          first_ids: `[B] int32`, the only possible first token of each sentence; None for any.
        """
        ids = tf.range(logits.shape[-1])
        forbidden = tf.reduce_any(tf.equal(ids[:, None], tf.constant(self.forbidden_ids, tf.int32)), axis=-1)
        if first_ids is not None:
            others = tf.not_equal(ids, first_ids[:, None])
            forbidden = tf.where(tf.equal(t, 0), others, forbidden)[:, None]
        return tf.where(forbidden, _NO_SCORE, logits)

    def confidence(self, score: float, length: int) -> float:
        """Returns the geometric mean of the tokens' probabilities of a hypothesis, 0 to 1; 0 for a score of NaN.

        Args:
          score: its length-normalised log-probability.
          length: in tokens, eos included.
        """
        log_probability = score * ((5 + length) / 6) ** self.length_alpha
        chosen = length - self.force_first
        return 0.0 if math.isnan(log_probability) else math.exp(log_probability / max(chosen, 1))


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
    search: BeamSearch,
    step: Step,
    model_state: dict,
    present: tf.Tensor,
    context: Context,
    select_rows: SelectRows | None = None,
    first_ids: tf.Tensor | None = None,
) -> Hypotheses:
    """Finds the K best translations of each sentence.

    The search of a sentence ends when its worst finished hypothesis is better than its best active one can become. A
    hypothesis that reaches `max_length` without eos ranks after all finished ones.

    To the model's step, hypotheses that can have no effect are paddings, so that experts spend no capacity on them:
    impossible ones (at the first token all but one), and those of sentences whose search has ended or that are absent.

    Args:
      search: the settings.
      step: the model's decoding step: `protocols.DecodingModel.decode_step` from the decoding state on, with the same
        arguments in order, without the context.
      model_state: the model's decoding state before the first token, a tree of tensors, or an empty dict.
      present: `[B] bool`, whether a row has a sentence. The hypotheses of other rows have no meaning.
      context: the layout of the search's own tensors.
      select_rows: selects rows of the model's decoding state. With it, the search continues in a quarter of the batch
        as soon as that is enough for the searches that have not ended. Hypotheses stay the same, but for rounding, if
        the logits of a sentence do not depend on other sentences.
      first_ids: `[B] int32`, the first token of each sentence's hypotheses, if the search has `force_first`.

    Returns:
      The hypotheses of all sentences.

    Raises:
      ValueError: `first_ids` without `force_first`, or the reverse.
    """
    if search.force_first != (first_ids is not None):
        raise ValueError(f"force_first is {search.force_first}, but first_ids are {first_ids}.")
    beam, batch = _Beam(search, context, first_ids), present.shape[0]
    mask = context.annotate(tf.zeros((batch, search.beam_size, search.cache_length), tf.bool), "BTL")
    beams = {"active": beam.initial(batch), "finished": beam.no_finished(batch), "mask": mask}
    few = batch // _FEW_ROWS_DIVISOR if select_rows else 0
    t, beams, model_state = beam.run(step, present, (tf.constant(0), beams, model_state), until=few)
    if select_rows and few:
        live = _first_true(beam.searched(present, beams), few)
        start = (t, _gather_rows(beams, live), select_rows(model_state, live))
        if first_ids is not None:
            first_ids = tf.gather(first_ids, live)
        narrow_beam = _Beam(search, context, first_ids)
        t, narrow, _ = narrow_beam.run(step, tf.gather(present, live), start, until=0)
        beams = _write_rows(beams, live, narrow)
    return beam.result(t, beams["active"], beams["finished"])


def _first_true(mask: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the indices `[count]` of a mask `[B]`, those where it is true first."""
    return tf.argsort(tf.cast(tf.logical_not(mask), tf.int32), stable=True)[:count]


def _gather_rows(beams: dict, rows: tf.Tensor) -> dict:
    """Returns these rows of every leaf."""
    return tree.map_leaves(lambda leaf: tf.gather(leaf, rows), beams)


def _write_rows(beams: dict, rows: tf.Tensor, new: dict) -> dict:
    """Returns `beams` with every leaf's `rows` replaced by those of `new`."""
    return tree.map_leaves(lambda old, new: tf.tensor_scatter_nd_update(old, rows[:, None], new), beams, new)


class _Beam:
    """The hypotheses of one search.

    Active ones are a dict of `ids [B, K, T]`, `last [B, K]` and `scores [B, K]`, sums of log-probabilities. Finished
    ones are a dict of `ids`, `scores` (normalised) and `lengths`. Both, and the mask of the cache, are a search's
    `beams`.
    """

    def __init__(self, search: BeamSearch, context: Context, first_ids: tf.Tensor | None):
        self._search, self._context, self._first_ids = search, context, first_ids

    def run(
        self, step: Step, present: tf.Tensor, start: tuple[tf.Tensor, dict, dict], until: int
    ) -> tuple[tf.Tensor, dict, dict]:
        """Searches while more than `until` searches have not ended and `max_length` is not reached.

        Args:
          step: the model's decoding step.
          present: `[B] bool`, whether a row has a sentence.
          start: (the next token's position, beams, the model's decoding state).
          until: a number of sentences.

        Returns:
          The same three values after the last step.
        """
        size = self._search.beam_size

        def body(t, beams, model_state):
            active, finished = beams["active"], beams["finished"]
            paddings = self.paddings(active, self.searched(present, beams))
            seen = tf.logical_or(beams["mask"], self.own_positions(t))
            logits, model_state = step(model_state, active["last"], paddings, t, t * size, seen)
            active, finished, parents = self.expand(t, logits, active, finished)
            return t + 1, {"active": active, "finished": finished, "mask": self.reorder(seen, parents)}, model_state

        def unfinished(t, beams, model_state):
            del model_state
            searched = self.searched(present, beams)
            many = tf.reduce_sum(tf.cast(searched, tf.int32)) > until if until else tf.reduce_any(searched)
            return tf.logical_and(t < self._search.max_length, many)

        return tf.while_loop(unfinished, body, start, maximum_iterations=self._search.max_length)

    def searched(self, present: tf.Tensor, beams: dict) -> tf.Tensor:
        """Returns `[B] bool`: whether a sentence is `present [B]` and its hypotheses can still become better."""
        return tf.logical_and(present, self.can_improve(beams["active"], beams["finished"]))

    def initial(self, batch: int) -> dict:
        """Returns the empty hypothesis of each sentence, and impossible ones for the rest of the beam."""
        shape, only_first = (batch, self._search.beam_size), tf.range(self._search.beam_size) > 0
        return {
            "ids": self._annotate(tf.zeros((*shape, self._search.max_length), tf.int32)),
            "last": self._annotate(tf.fill(shape, self._search.bos_id)),
            "scores": self._annotate(tf.tile(tf.where(only_first, _NO_SCORE, 0.0)[None], [batch, 1])),
        }

    def no_finished(self, batch: int) -> dict:
        """Returns impossible hypotheses: none is finished yet."""
        shape = (batch, self._search.beam_size)
        return {
            "ids": self._annotate(tf.zeros((*shape, self._search.max_length), tf.int32)),
            "scores": self._annotate(tf.fill(shape, _NO_SCORE)),
            "lengths": self._annotate(tf.zeros(shape, tf.int32)),
        }

    def own_positions(self, t: tf.Tensor) -> tf.Tensor:
        """Returns the mask of step t's own cache positions: `[1, K, T*K] bool`, true at t*K + k for hypothesis k."""
        own = t * self._search.beam_size + tf.range(self._search.beam_size)
        return tf.equal(tf.range(self._search.cache_length), own[:, None])[None]

    def paddings(self, active: dict, searched: tf.Tensor) -> tf.Tensor:
        """Returns `[B, K] bool`: the impossible hypotheses, and all of sentences that are not `searched [B] bool`."""
        possible = active["scores"] > _NO_SCORE
        return self._annotate(tf.logical_not(tf.logical_and(possible, searched[:, None])))

    def reorder(self, values: tf.Tensor, parents: tf.Tensor) -> tf.Tensor:
        """Gathers `values [B, K, ...]` by `parents [B, K]`."""
        return self._annotate(tf.gather(values, parents, batch_dims=1))

    def expand(self, t: tf.Tensor, logits: tf.Tensor, active: dict, finished: dict) -> tuple[dict, dict, tf.Tensor]:
        """Extends every active hypothesis by every token; returns (active, finished, parents of the active ones)."""
        size, vocabulary = self._search.beam_size, logits.shape[-1]
        logits = self._annotate(self._search.forbid(logits, t, self._first_ids))
        chunks = VocabularyChunks.of(logits, 2 * size)
        best = chunks.largest()
        normalizers = best + tf.math.log(tf.reduce_sum(tf.exp(logits - best[..., None]), axis=-1))
        # Of the best 2K candidates at most K end, so at least K stay active.
        scores, flat = chunks.top_k_sums(active["scores"] - normalizers, 2 * size, self._context)
        parents, tokens = flat // vocabulary, flat % vocabulary
        written = tf.equal(tf.range(self._search.max_length), t)
        ids = tf.where(written, tokens[..., None], tf.gather(active["ids"], parents, batch_dims=1))
        ended = tf.equal(tokens, self._search.eos_id)
        candidates = {
            "ids": ids,
            "scores": tf.where(ended, scores / self._length_penalty(t + 1), _NO_SCORE),
            "lengths": tf.fill(scores.shape, t + 1),
        }
        finished = self._keep_best({name: tf.concat([finished[name], candidates[name]], axis=1) for name in finished})
        active = self._keep_best(
            {"ids": ids, "last": tokens, "parents": parents, "scores": tf.where(ended, _NO_SCORE, scores)}
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
        count = tf.reduce_sum(tf.cast(finished["scores"] > _NO_SCORE, tf.int32), axis=-1, keepdims=True)
        rank = tf.range(self._search.beam_size)[None]
        order = tf.where(rank < count, rank, self._search.beam_size + rank - count)  # both lists are sorted
        lengths = tf.fill(finished["lengths"].shape, t)

        def pick(finished: tf.Tensor, active: tf.Tensor) -> tf.Tensor:
            return self._annotate(tf.gather(tf.concat([finished, active], axis=1), order, batch_dims=1))

        return Hypotheses(
            ids=pick(finished["ids"], active["ids"]),
            scores=pick(finished["scores"], active_scores),
            lengths=pick(finished["lengths"], lengths),
        )

    def _keep_best(self, candidates: dict) -> dict:
        _, order = top_k(candidates["scores"], self._search.beam_size, self._context)
        return {name: self.reorder(value, order) for name, value in candidates.items()}

    def _length_penalty(self, length: tf.Tensor) -> tf.Tensor:
        """Returns the length penalty ((5 + length) / 6) ** alpha (Wu et al. 2016, section 7)."""
        return tf.pow((5.0 + tf.cast(length, tf.float32)) / 6.0, self._search.length_alpha)

    def _annotate(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, "BTL"[: tensor.shape.rank])
