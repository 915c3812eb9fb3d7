"""An engine without devices: steps count, but compute nothing. It makes tests of the training loop fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe import tree
from lingvo_moe.engines.base import Metrics, ModelSteps
from lingvo_moe.errors import UserError
from lingvo_moe.program import Program


class FakeEngine:
    """The protocol `engines.base.Engine`, with NumPy arrays and losses that are functions of the step."""

    platform = "cpu"

    def __init__(self, num_devices: int = 2):
        """Pretends to have this many devices."""
        self.devices = list(range(num_devices))

    def compile(self, program: Program) -> Any:
        """Raises UserError: nothing is compiled."""
        raise UserError(f"the fake engine cannot run {program.name}.")

    def training(self, steps: ModelSteps, batch_specs: dict, evaluates: bool = True) -> FakeTraining:
        """Returns a training state of zeros."""
        return FakeTraining(steps, batch_specs)

    def evaluation(self, steps: ModelSteps, batch_specs: dict) -> Any:
        """Raises UserError."""
        raise UserError("the fake engine cannot evaluate.")

    def decoding(self, steps: ModelSteps, source_specs: dict, search: Any) -> Any:
        """Raises UserError."""
        raise UserError("the fake engine cannot decode.")


class FakeTraining:
    """The protocol `engines.base.Training`.

    Attributes:
      state: NumPy arrays; only `step` changes.
      rows: all rows of a batch.
      shardings: None: leaves of a checkpoint are read by `load`.
    """

    shardings = None

    def __init__(self, steps: ModelSteps, batch_specs: dict):
        self._specs = steps.state_specs()
        self.state: dict = {}
        self.rows = range(next(iter(tree.flatten(batch_specs).values())).shape[0])

    def initialise(self, seed: int):
        """Creates a state of zeros, with the seed."""
        zeros = tree.map_leaves(lambda spec: np.zeros(spec.shape, spec.dtype), self._specs)
        self.state = {**zeros, "seed": np.array([0, seed], np.int32)}

    def load(self, state: dict):
        """Reads a checkpoint's arrays."""
        self.state = tree.map_leaves(
            lambda spec, array: np.asarray(array[tuple(slice(0, size) for size in spec.shape)]), self._specs, state
        )

    def load_weights(self, theta: dict):
        """Replaces the weights of the state."""
        self.state = {**self.state, "theta": tree.map_leaves(lambda leaf: leaf[...], theta)}

    def set_weight(self, path: str, value: np.ndarray):
        """Replaces one weight of the state."""
        self.load_weights(tree.unflatten({**tree.flatten(self.state["theta"]), path: value}))

    def train(self, batches: Sequence[dict]) -> Metrics:
        """Counts the steps."""
        step = int(self.state["step"]) + len(batches)
        self.state = {**self.state, "step": np.int32(step)}
        return {"loss": 2.0 / step, "cross_entropy": 1.0 / step, "gradient_norm": 1.0, "skipped_in_a_row": 0}

    def evaluate(self, batch: dict) -> Metrics:
        """Returns a loss that depends on the step."""
        return {"cross_entropy": 3.0 / int(self.state["step"]), "tokens": 10.0}

    def diagnose(self, batch: dict, step: int) -> Mapping[str, Any]:
        """Raises UserError."""
        raise UserError("the fake engine cannot diagnose.")
