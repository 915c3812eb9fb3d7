"""The engine protocol: what training and inference need of an engine, whichever it is.

An engine owns devices. It trains a model (`Engine.training`), computes its held-out loss (`Engine.evaluation`), decodes
with it (`Engine.decoding`) and runs single programs (`Engine.compile`). The packages above depend on this module alone;
`engines.registry` finds an engine by its name.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

import numpy as np

from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import Layout

Metrics = Mapping[str, SupportsFloat]


def torus_order(chip: Sequence[int], core: int) -> tuple[int, ...]:
    """Returns the sort key of a TPU core in the order of plans (`analysis.hardware.Torus`).

    Core by core, then along the first dimension of the torus, the second, and so on: so the axes of a mesh are along
    its dimensions. Host by host, or in a ring of chips, a row of the mesh would be in several rows of the torus.

    Args:
      chip: the position of its chip along each dimension.
      core: its number in the chip.
    """
    return (*reversed(chip), core)


class StepPrograms(Protocol):
    """A model's step functions, lowered; `steps.Steps` implements it."""

    def init(self) -> Program:
        """`{seed} -> {state}`."""
        ...

    def train(self, batch_specs: dict) -> Program:
        """`{state, batch} -> {state, metrics}`, the state donated."""
        ...

    def evaluate(self, batch_specs: dict) -> Program:
        """`{theta, batch} -> {metrics}`."""
        ...

    def diagnose(self, batch_specs: dict) -> Program:
        """`{state, batch} -> ...`, of the parts `program.DIAGNOSED` of a state; see `steps.diagnose_function`."""
        ...

    def decode(self, source_specs: dict, search: Any) -> Program:
        """`{theta, source} -> {ids, scores, lengths}`."""
        ...

    def prepare_decoding(self) -> Program:
        """`{theta} -> {theta}`, the weights as `decode_prepared` takes them, for one device."""
        ...

    def decode_prepared(self, source_specs: dict, search: Any) -> Program:
        """`{theta, source} -> {ids, scores, lengths}`, with prepared weights."""
        ...

    def transcribe(self, source_specs: dict) -> Program:
        """`{theta, source} -> {classes}`, of the positions of recordings; see `steps.Steps.transcribe`."""
        ...

    def segment(self, source_specs: dict) -> Program:
        """`{theta, source} -> {classes}`, of the voxels of volumes; see `steps.Steps.segment`."""
        ...

    def explain(self, batch_specs: dict) -> Program:
        """`{theta, batch} -> ...`, which experts take each token; see `steps.Steps.explain`."""
        ...


class StepFunctions(Protocol):
    """A model's step functions, as pure functions of tensors; `steps.Steps` implements it."""

    @property
    def layout(self) -> Layout:
        """The layout that the functions annotate tensors with."""
        ...

    @property
    def matmul_precision(self) -> str:
        """The precision to compile the functions for, see `ops.precision`."""
        ...

    @property
    def windowed_einsum_mib(self) -> int:
        """The smallest tensor, in MiB, for which XLA makes a windowed einsum, see `program.Program`."""
        ...

    def state_specs(self) -> dict:
        """Returns the tree of `Spec`s of the training state."""
        ...

    def init_function(self, inputs: dict) -> dict:
        """`{seed} -> {state}`."""
        ...

    def train_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """`{state, batch} -> {state, metrics}`."""
        ...

    def evaluate_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """`{theta, batch} -> {metrics}`."""
        ...

    def diagnose_function(self, batch_specs: dict) -> Callable[[dict], dict]:
        """`{state, batch} -> ...`, of the parts `program.DIAGNOSED` of a state."""
        ...


class ModelSteps(StepPrograms, StepFunctions, Protocol):
    """A model's step functions in both forms; an engine uses the form it needs."""


class Executable(Protocol):
    """A compiled program: call it with the tree of inputs to get the tree of outputs."""

    def __call__(self, inputs: Mapping[str, Any]) -> dict:
        """Runs the program; donated inputs are consumed."""
        ...

    def shardings(self, path: str) -> dict:
        """Returns the tree of shardings of the inputs below `path`, for a checkpoint to be restored to."""
        ...


class Training(Protocol):
    """A training state on an engine's devices.

    Attributes:
      state: the tree of the training state, as checkpoints save it; leaves are arrays or `ShardedTensor`s.
      rows: the rows of a batch that this process feeds.
    """

    state: dict
    rows: range

    @property
    def shardings(self) -> dict | None:
        """The tree of shardings that a checkpoint is restored to; None if `load` reads leaves part by part."""
        ...

    def initialise(self, seed: int):
        """Creates the initial state on the devices."""
        ...

    def load(self, state: dict):
        """Takes over a state that a checkpoint restored."""
        ...

    def load_weights(self, theta: dict):
        """Replaces the weights of the state by restored ones."""
        ...

    def set_weight(self, path: str, value: np.ndarray):
        """Replaces one weight of the state by a value of its shape, which all processes pass whole."""
        ...

    def train(self, batches: Sequence[dict]) -> Metrics:
        """Runs one step for each batch.

        Args:
          batches: this process's `rows` of each batch.

        Returns:
          The metrics of the last step. Reading one waits for that step.
        """
        ...

    def evaluate(self, batch: dict) -> Metrics:
        """Returns the metrics of one batch, of which all rows are passed, without training."""
        ...

    def diagnose(self, batch: dict, step: int) -> Mapping[str, Any]:
        """Compiles and runs `steps.diagnose_function` with the current weights.

        Args:
          batch: this process's `rows`.
          step: how many steps precede the diagnosed one, which selects its random numbers.
        """
        ...


class Evaluation(Protocol):
    """A model's loss on an engine's devices, for weights that do not change."""

    @property
    def shardings(self) -> dict:
        """The tree of shardings that `load` takes weights in."""
        ...

    def load(self, theta: dict):
        """Takes over weights that a checkpoint restored."""
        ...

    def evaluate(self, batch: dict) -> Metrics:
        """Returns the metrics of one batch."""
        ...


class Decoding(Protocol):
    """A model's beam search on an engine's devices."""

    @property
    def shardings(self) -> dict:
        """The tree of shardings that `load` takes weights in."""
        ...

    def load(self, theta: dict):
        """Takes over weights that a checkpoint restored, and may consume them."""
        ...

    def decode(self, source: dict) -> Mapping[str, Any]:
        """Returns `ids` `[B, K, L]`, `scores` `[B, K]` and `lengths` `[B, K]` of the K best hypotheses of each row."""
        ...


class Engine(Protocol):
    """Devices that run programs.

    Methods raise UserError for what this engine cannot do, or where the model does not fit its devices.
    """

    @property
    def devices(self) -> Sequence[Any]:
        """All devices, those of other processes included."""
        ...

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        ...

    def compile(self, program: Program) -> Executable:
        """Compiles a program."""
        ...

    def training(self, steps: ModelSteps, batch_specs: dict, evaluates: bool = True) -> Training:
        """Prepares to train a model, and to compute its held-out loss if `evaluates`."""
        ...

    def evaluation(self, steps: ModelSteps, batch_specs: dict) -> Evaluation:
        """Prepares to compute a model's loss."""
        ...

    def decoding(self, steps: ModelSteps, source_specs: dict, search: Any) -> Decoding:
        """Prepares to decode with a model.

        Args:
          steps: the model's step functions.
          source_specs: the tree of `Spec`s of a batch of source sentences or prompts.
          search: a `decoding.flat_beam_search.BeamSearch`, or a `decoding.sampling.Sampling`.
        """
        ...


class ShardedTensor(abc.ABC):
    """A tensor of the training state that no host holds whole: checkpoints write and read it shard by shard."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    @property
    @abc.abstractmethod
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of one shard."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """The type of the elements."""

    @abc.abstractmethod
    def shards(self) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yields (index, value) of each shard once, one after another; `index` selects it in the whole tensor."""

    @abc.abstractmethod
    def load(self, value: Any):
        """Assigns each shard from `value[index]`; raises UserError for a value of another shape."""
