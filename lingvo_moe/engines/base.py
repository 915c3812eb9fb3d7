"""What a training loop needs of an engine, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

Metrics = Mapping[str, SupportsFloat]


class Training(Protocol):
    """A model's state on an engine's devices, and what is done with it.

    Attributes:
      state: the tree of the training state, as checkpoints take it.
      shardings: the tree of places that a checkpoint restores it to; None for leaves that are read part by part.
      rows: of a batch, those that this process feeds.
    """

    state: dict
    shardings: dict | None
    rows: range

    def initialise(self, seed: int):
        """Creates the state where it stays."""

    def load(self, state: Mapping[str, Any]):
        """Takes over a state that a checkpoint gave back."""

    def train(self, batches: Sequence[dict]) -> Metrics:
        """Makes one step for each batch, of which it is given its `rows`; returns the metrics of the last, of which reading one
        waits for it."""

    def evaluate(self, batch: dict) -> Metrics:
        """The metrics of one batch."""

    def diagnose(self, batch: dict, step: int) -> Mapping[str, Any]:
        """What `steps.diagnose_function` tells of a training step from these weights after `step` steps, made with `rows` of a
        batch; compiles first."""


class Engine(Protocol):
    """Devices that train.

    Attributes:
      devices: all of them.
      platform: `cpu`, `gpu` or `tpu`.
    """

    devices: Sequence[Any]
    platform: str

    def training(self, steps: Any, batch_specs: dict, evaluates: bool = True) -> Training:
        """Prepares to train `steps` (`steps.Steps`), to measure its held-out loss too if it `evaluates`."""
