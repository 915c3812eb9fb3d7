"""Sampling: tokens are drawn from a model's probabilities, for language models.

The samples of a prompt share one cache as the hypotheses of a flat beam search do, and none is ever reordered: at step
t sample k writes its keys and values to position t*K + k, and attends to the positions k, K + k, ..., t*K + k.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_moe import definitions, ranges
from lingvo_moe.decoding.flat_beam_search import MOST_POSITIONS, BeamSearch, Hypotheses, Step
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops import random_numbers
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.top_k import max_with_index, top_k
from lingvo_moe.ranges import COUNT, COUNT_OR_0, Range
from lingvo_moe.sharding.layout import Spec

RANGES = {
    "samples": COUNT,
    "temperature": Range(0.01, 100),  # far beyond any use; quotients of others may not be finite
    "top_k": COUNT_OR_0,
    "top_p": Range(maximum=1, exclusive_minimum=True),
}
_FEW = 64  # candidates; `top_k` finds so few without a sort
_BITS_OF_1 = 0x3F800000  # 1.0 as float32; those of smaller numbers are smaller


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of sampling.

    Attributes:
      samples: K, the number of samples of each prompt.
      temperature: logits are divided by it: below 1, probable tokens become more probable.
      top_k: how many of the most probable tokens one is drawn from (Fan et al. 2018); 0 for all.
      top_p: one is drawn from the fewest most probable tokens that have this share of the probability (Holtzman et al.
        2020), after `temperature` and `top_k`; 1 for all. Tokens of equal probability are all kept or all
        removed.
      search: the model's beam search, whose maximal length and special tokens hold here, too.
    """

    samples: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    search: BeamSearch = BeamSearch()

    def __post_init__(self):
        definitions.check_type("sampling.search", self.search, BeamSearch)
        ranges.check("sampling.", self, RANGES)
        if self.cache_length > MOST_POSITIONS:
            raise UserError(
                f"sampling.samples {self.samples} x search.max_length {self.search.max_length} are {self.cache_length} "
                f"positions of keys and values for a prompt; expected at most {MOST_POSITIONS}."
            )

    @property
    def cache_length(self) -> int:
        """T*K, the number of cache positions for one prompt."""
        return self.samples * self.search.max_length

    @property
    def of_program(self) -> Sampling:
        """The settings that a program is made for; the others are among its inputs, so it serves all their values."""
        return dataclasses.replace(self, temperature=1.0, top_p=1.0)

    def inputs(self, seeds: np.ndarray) -> dict[str, np.ndarray | np.float32]:
        """Returns the inputs of `sample` for the seeds `[B, 2] int32` of prompts."""
        return {"seeds": seeds, "temperature": np.float32(self.temperature), "top_p": np.float32(self.top_p)}


def input_specs(batch_size: int) -> dict[str, Spec]:
    """Returns the `Spec`s of `Sampling.inputs`."""
    number = Spec((), "float32", "")
    return {"seeds": Spec((batch_size, 2), "int32", "Br"), "temperature": number, "top_p": number}


def sample(
    sampling: Sampling,
    step: Step,
    model_state: dict,
    present: tf.Tensor,
    inputs: dict[str, tf.Tensor],
    context: Context,
) -> Hypotheses:
    """Draws K samples for each prompt; a sample ends with eos, or after `max_length` tokens.

    Samples of a prompt depend on its own seed, not on the others of the batch or on the devices.

    Args:
      sampling: the settings; temperature and top_p are those of `inputs`.
      step: the model's decoding step, see `flat_beam_search`.
      model_state: the model's decoding state before the first token.
      present: `[B] bool`, whether a row has a prompt. The samples of other rows are empty.
      inputs: `seeds [B, 2] int32`, of each prompt, `temperature` and `top_p`, scalars float32.
      context: the layout of the samples' own tensors.

    Returns:
      The samples in the order of their drawing. Their scores are means over the tokens of the model's own
      log-probabilities, whatever the temperature.
    """
    samples, batch = sampling.samples, present.shape[0]

    def body(t, drawn, model_state):
        seen = context.annotate(tf.tile(_own_positions(sampling, t), (batch, 1, 1)), "BTL")
        paddings = tf.logical_not(drawn["active"])
        logits, model_state = step(model_state, drawn["last"], paddings, t, t * samples, seen)
        return t + 1, _extended(sampling, drawn, logits, inputs, t, context), model_state

    _, drawn, _ = tf.while_loop(
        lambda t, drawn, _: tf.reduce_any(drawn["active"]),
        body,
        (tf.constant(0), _empty(sampling, present, context), model_state),
        maximum_iterations=sampling.search.max_length,
    )
    scores = drawn["scores"] / tf.cast(tf.maximum(drawn["lengths"], 1), tf.float32)
    return Hypotheses(drawn["ids"], scores, drawn["lengths"])


def _empty(sampling: Sampling, present: tf.Tensor, context: Context) -> dict[str, tf.Tensor]:
    """Returns samples without tokens: those of `Hypotheses`, `last` tokens and which are `active`, both `[B, K]`."""
    shape = (present.shape[0], sampling.samples)
    empty = {
        "ids": tf.zeros((*shape, sampling.search.max_length), tf.int32),
        "last": tf.fill(shape, sampling.search.bos_id),
        "scores": tf.zeros(shape),
        "lengths": tf.zeros(shape, tf.int32),
        "active": tf.tile(present[:, None], (1, sampling.samples)),
    }
    return {name: context.annotate(value, "BTL"[: value.shape.rank]) for name, value in empty.items()}


def _extended(
    sampling: Sampling,
    drawn: dict[str, tf.Tensor],
    logits: tf.Tensor,
    inputs: dict[str, tf.Tensor],
    t: tf.Tensor,
    context: Context,
) -> dict[str, tf.Tensor]:
    """Returns the samples with one more token of each active one; their scores are sums of log-probabilities."""
    search, active = sampling.search, drawn["active"]
    logits = search.forbid(logits, t)
    tokens = _draw(sampling, logits, inputs, t, context)
    log_probabilities = tf.gather(tf.nn.log_softmax(logits), tokens, batch_dims=2)
    written = tf.logical_and(tf.equal(tf.range(search.max_length), t), active[..., None])
    return {
        "ids": tf.where(written, tokens[..., None], drawn["ids"]),
        "last": tokens,
        "scores": drawn["scores"] + tf.where(active, log_probabilities, 0.0),
        "lengths": drawn["lengths"] + tf.cast(active, tf.int32),
        "active": tf.logical_and(active, tf.not_equal(tokens, search.eos_id)),
    }


def _own_positions(sampling: Sampling, t: tf.Tensor) -> tf.Tensor:
    """Returns the cache positions that each sample has written up to step t: `[1, K, T*K] bool`."""
    positions, samples = tf.range(sampling.cache_length), tf.range(sampling.samples)
    own = tf.equal(positions % sampling.samples, samples[:, None])
    return tf.logical_and(own, positions < (t + 1) * sampling.samples)[None]


def _draw(
    sampling: Sampling, logits: tf.Tensor, inputs: dict[str, tf.Tensor], t: tf.Tensor, context: Context
) -> tf.Tensor:
    """Draws a token for each row of `logits [B, K, V]`: `[B, K] int32`."""
    vocabulary, share = logits.shape[-1], inputs["top_p"]
    values, ids = logits / inputs["temperature"], None
    count = min(sampling.top_k or vocabulary, vocabulary)
    if count < vocabulary:
        values, ids = _most_probable(values, count, context)
    values = tf.cond(share < 1.0, lambda: _nucleus(values, share), lambda: values)
    # The largest sum of a logit and Gumbel noise is a token drawn from the softmax (Gumbel 1954).
    uniform = random_numbers.uniform_by_row(inputs["seeds"], tuple(values.shape[1:]), t)
    _, chosen = max_with_index(values - tf.math.log(-tf.math.log(uniform)))
    return chosen if ids is None else tf.gather(ids, chosen, batch_dims=2)


def _most_probable(values: tf.Tensor, count: int, context: Context) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the `count` largest values of each row of `[B, K, V]`, descending, and their indices."""
    if count > _FEW:
        ids = tf.argsort(values, direction="DESCENDING", stable=True)[..., :count]
        return tf.gather(values, ids, batch_dims=2), ids
    rows = tf.reshape(values, (-1, values.shape[-1]))
    best, ids = top_k(rows, count, context)
    shape = (*values.shape[:2], count)
    return tf.reshape(best, shape), tf.reshape(ids, shape)


def _nucleus(values: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns `values [B, K, V]` with minus infinity for all but the largest, which have a share of the softmax.

    A sort of the vocabulary takes many times as long as a step of decoding. So the least probability of those that stay
    is found by bisection of its bits, which, as integers, are in the order of the numbers.
    """
    probabilities = tf.nn.softmax(values)
    bits = tf.bitcast(probabilities, tf.int32)

    def halve(step, least, above):
        middle = (least + above) // 2
        kept = tf.reduce_sum(tf.where(bits >= middle[..., None], probabilities, 0.0), axis=-1)
        return step + 1, tf.where(kept >= share, middle, least), tf.where(kept >= share, above, middle)

    least = tf.zeros(values.shape[:-1], tf.int32)
    start = (tf.constant(0), least, tf.fill(least.shape, _BITS_OF_1 + 1))
    steps = _BITS_OF_1.bit_length()
    _, least, _ = tf.while_loop(lambda step, *_: step < steps, halve, start, maximum_iterations=steps)
    return tf.where(bits >= least[..., None], values, -float("inf"))
