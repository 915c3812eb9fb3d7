"""The loss of many batches together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lingvo_moe.data.batching import Batch


def total_loss(evaluate: Callable[[Batch], Mapping[str, Any]], batches: Iterable[Batch]) -> tuple[float, float]:
    """Returns (predicted tokens, the sum of their nats) of all batches; a batch counts by its tokens.

    Args:
      evaluate: returns a batch's metrics, of which `tokens` and `cross_entropy` (nats per token) are used.
      batches: to evaluate.
    """
    nats = tokens = 0.0
    for batch in batches:
        metrics = evaluate(batch)
        count = float(metrics["tokens"])
        nats, tokens = nats + float(metrics["cross_entropy"]) * count, tokens + count
    return tokens, nats
