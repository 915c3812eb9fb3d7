"""The interface of a router, the registry of routers, and what token-choice routers have in common.

A router of your own is one file, loaded with `--import=my_router.py` and chosen with `--set model.router=NAME`:

    @register_router("mine")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class MyRouter(Router): ...
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

from lingvo_moe import definitions
from lingvo_moe.errors import UserError
from lingvo_moe.extensions import Registry
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.routing import Routing
from lingvo_moe.ops.top_k import max_with_index
from lingvo_moe.utils import extension_choice


class Router(Protocol):
    """Decides which experts take which tokens, from the products of tokens and gate weights. A frozen dataclass.

    Attributes:
      metric_names: the scalars of `Routing.metrics`. The metric `aux_loss` is an auxiliary loss: the model adds it,
        times `aux_loss_weight`, to its loss. By convention it is 1/E^2 in perfect balance, as Algorithm 1's.
      is_causal: whether a token's experts depend on no later token. Only causal routers are allowed in decoders.
      has_fixed_capacity: whether its capacity is a part of what it computes, so that a model's
        `inference_min_capacity`, which prevents dropped tokens, must not raise it.
    """

    metric_names: tuple[str, ...] = ()
    is_causal: bool = True
    has_fixed_capacity: bool = False

    def check(self, num_experts: int):
        """Raises UserError where the router does not work with this many experts."""

    def capacity(self, tokens_per_group: int, num_experts: int, factor: float | None) -> int:
        """The buffer positions C of each expert for a group; see `expert_capacity`."""
        return expert_capacity(tokens_per_group, num_experts, factor)

    @abc.abstractmethod
    def experts_per_token(self, num_experts: int) -> float:
        """The mean number of experts that compute a token where none overflows, to count operations."""
        ...

    @abc.abstractmethod
    def __call__(self, logits: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
        """Routes all groups at once.

        Args:
          logits: `[G, S, E] float32`, products of tokens and gate weights.
          paddings: `[G, S] bool`, true where there is no token: it takes no position and counts nowhere.
          capacity: C, positions per expert and group.
          context: of the call.
        """
        ...


ROUTERS: Registry[type[Router]] = Registry(
    "router", check=lambda what, cls: definitions.check_dataclass(what, cls, Router)
)


def register_router(name: str) -> Callable[[type], type]:
    """Class decorator: registers a frozen dataclass that implements `Router` under `name`.

    Raises:
      UserError: the name is missing, malformed or taken; or the class is no frozen dataclass, lacks something of
        `Router`, or has a method that cannot be called as `Router` says.
    """
    return ROUTERS.decorator("register_router", name)


def make_router(choice: str) -> Router:
    """Makes a router from `NAME` or `NAME:field=value:...`, for instance `top_k:k=4`.

    Raises:
      UserError: an unknown name or field, or a value that the router refuses.
    """
    return extension_choice.make(ROUTERS, choice)


def call_router(router: Router, logits: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
    """Calls a router, see `Router.__call__`.

    Raises:
      UserError: it did not return a `Routing` of K choices for each token, with the metrics of `metric_names`.
    """
    label = ROUTERS.label(type(router))
    with definitions.named(lambda: f"{label} in {context.scope.rstrip('/')}", router):
        routing = router(logits, paddings, capacity, context)
        definitions.check_type(f"{label}: the result of a call", routing, Routing)
        extension_choice.check_metrics(ROUTERS, router, routing.metrics)
        shape = *logits.shape[:2], *(tuple(routing.weights.shape)[2:3] or "K")
        if routing.experts is None:
            shape = logits.shape  # choice e is expert e
        else:
            definitions.check_form(f"{label}: Routing.experts", routing.experts, definitions.form_of("int32", shape))
        definitions.check_form(f"{label}: Routing.positions", routing.positions, definitions.form_of("int32", shape))
        definitions.check_form(f"{label}: Routing.weights", routing.weights, definitions.form_of("float32", shape))
        return routing


def check_num_experts(router: str, num_experts: int, least: int):
    """Raises UserError where there are fewer than `least` experts."""
    if num_experts < least:
        raise UserError(
            f"num_experts is {num_experts}; router {router} needs at least {least} experts. A dense model has "
            f"num_experts=0 and layer_pattern=dense."
        )


def expert_capacity(tokens_per_group: int, num_experts: int, capacity_factor: float | None) -> int:
    """The tokens of a group that an expert takes at most: C = factor * S / E, rounded down, from 1 to S.

    The papers' 2N/(G E) is a factor of 2 (GShard section 2.2, "Local group dispatching"). None: for every token, C = S.
    The factor is the decimal that is written: in floating point, 1.16 * 100 / 4 is less than 29.
    """
    if capacity_factor is None:
        return tokens_per_group
    return min(tokens_per_group, max(1, math.floor(Fraction(str(capacity_factor)) * tokens_per_group / num_experts)))


def largest_gates(gates: tf.Tensor, count: int, context: Context) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the experts with the `count` largest gates `[G, S, E]`, and these gates.

    Returns:
      (`[G, S] int32` for each, of equal gates the lower index first; `[G, S, count] float32`).
    """
    num_experts, experts, masks, left = gates.shape[-1], [], [], gates
    for _ in range(count):
        _, expert = max_with_index(left)
        mask = tf.equal(expert[..., None], tf.range(num_experts))
        experts, masks, left = [*experts, expert], [*masks, mask], tf.where(mask, -1.0, left)
    chosen = tf.stack([tf.reduce_sum(tf.where(mask, gates, 0.0), axis=-1) for mask in masks], axis=-1)
    return [context.checkpoint_name(expert, "output", "GS") for expert in experts], chosen


def choice_mask(expert: tf.Tensor, present: tf.Tensor, num_experts: int) -> tf.Tensor:
    """`[G, S]` to `[G, S, E] int32`: 1 at the chosen expert of a present token. bfloat16 cannot count past 256."""
    chosen = tf.logical_and(tf.equal(expert[..., None], tf.range(num_experts)), present[..., None])
    return tf.cast(chosen, tf.int32)


def positions_in_buffers(masks: Sequence[tf.Tensor], context: Context) -> list[tf.Tensor]:
    """The position `[G, S] int32` of each choice in its expert's buffer, from the masks `[G, S, E]` of all choices.

    First choices of the whole group come before all second ones (Algorithm 1, line 14, continues with the counts of
    line 11), and so on. Every choice takes a position whether or not it is dispatched (lines 11 and 22).
    """
    positions, counts = [], None
    for mask in masks:
        before = tf.cumsum(mask, axis=1, exclusive=True)
        before = before if counts is None else before + counts
        positions.append(context.checkpoint_name(tf.reduce_sum(before * mask, axis=-1), "output", "GS"))
        count = tf.reduce_sum(mask, axis=1, keepdims=True)
        counts = count if counts is None else counts + count
    return positions


def load_balance_loss(gates: tf.Tensor, chosen: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    """Algorithm 1's l_aux = 1/E sum_e (c_e/S) m_e, mean over groups; scalar. 1/E^2 is perfect balance.

    Args:
      gates: `[G, S, E] float32`; m_e is their mean over tokens.
      chosen: `[G, S, E]`, the share of each token's choices that is expert e; c_e/S is its mean over tokens.
      present: `[G, S] bool`. Means are over present tokens; groups of paddings alone do not count.
    """
    tokens = tf.reduce_sum(tf.cast(present, tf.float32), axis=1)  # [G]: Algorithm 1's S, without paddings
    inverse = tf.math.divide_no_nan(1.0, tokens)[:, None]
    gate_mean = tf.reduce_sum(tf.where(present[..., None], gates, 0.0), axis=1) * inverse  # m_e [G, E]
    share = tf.cast(tf.reduce_sum(chosen, axis=1), tf.float32) * inverse  # c_e/S [G, E]
    groups = tf.reduce_sum(tf.cast(tokens > 0.0, tf.float32))
    return tf.math.divide_no_nan(tf.reduce_sum(share * gate_mean), groups * gates.shape[-1])


def expert_load(chosen: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    """The largest expert's share of the choices `[G, S, E]` (see `load_balance_loss`) times E; 1 is perfect balance."""
    total = tf.reduce_sum(tf.cast(present, tf.float32))
    load = tf.reduce_max(tf.cast(tf.reduce_sum(chosen, axis=(0, 1)), tf.float32))
    return tf.math.divide_no_nan(load * chosen.shape[-1], total)


def share_of_tokens(condition: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    """The share of present tokens for which a condition `[G, S] bool` holds; 0 where there are none."""
    count = tf.reduce_sum(tf.cast(tf.logical_and(present, condition), tf.float32))
    return tf.math.divide_no_nan(count, tf.reduce_sum(tf.cast(present, tf.float32)))
