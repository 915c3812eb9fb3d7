"""Callbacks of the training loop: what happens beside the steps themselves.

Reporting, checkpoints, held-out evaluation, progress and the handling of non-finite steps are callbacks
(`training.standard_callbacks`, `training.non_finite`). A user's own comes through `--import`:

    @register_callback("timer")
    class Timer(Callback):
        def on_step(self, run, result): ...

It then takes part in every run of the process that imported it, after the standard ones.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from lingvo_moe import definitions
from lingvo_moe.data.batching import Batch
from lingvo_moe.data.pipeline import State, merge_states
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.engines.base import Metrics, Training
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.experiment import Experiment
from lingvo_moe.extensions import Registry
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.preemption import PreemptionGuard


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The steps of one call of the engine: one, or `training.steps_per_loop` of them.

    Attributes:
      step: the number of the last of these steps, counted from 1.
      batches: this process's rows of the batch of each step.
      metrics: of the last of these steps. Reading one waits for that step.
      data_state: the state of this process's input pipeline after these batches.
      last: whether training ends here, because it is complete or because a process was asked to stop.
    """

    step: int
    batches: Sequence[Batch]
    metrics: Metrics
    data_state: State
    last: bool


@dataclasses.dataclass
class TrainingRun:
    """What callbacks know of the run they belong to.

    Attributes:
      name: the registered name of the model.
      experiment: what is trained.
      training: the training state on the engine's devices.
      checkpoints: the checkpoints of the log directory.
      process_group: the processes that train together.
      preemption: whether this process was asked to stop.
      logdir: the log directory.
      first_step: how many steps earlier runs have made.
      scalars: the most recently reported values by name, `valid/cross_entropy` among them if it was computed since.
    """

    name: str
    experiment: Experiment
    training: Training
    checkpoints: Checkpoints
    process_group: ProcessGroup
    preemption: PreemptionGuard
    logdir: pathlib.Path
    first_step: int = 0
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)

    def should_stop(self) -> bool:
        """Returns whether one of the processes was asked to stop; the same answer in all, which call it together."""
        stops = self.process_group.any_stop_requested(self.preemption.requested)
        if stops and self.process_group.catches_sigterm:
            self.preemption.request()
        return stops

    def global_data_state(self, data_state: State) -> State:
        """Returns, in the primary process, the state of all processes' input pipelines; all call it together."""
        return merge_states(self.process_group.gather(data_state))


class Callback:
    """Base class of callbacks; each hook does nothing by default.

    With several processes every hook is called in all of them, in the same order. A hook may use the collective
    operations of `run.process_group` if it does so in all processes alike. An exception from a hook ends training.
    """

    def on_start(self, run: TrainingRun):
        """Called once, before the first step."""

    def on_step(self, run: TrainingRun, result: StepResult):
        """Called after each call of the engine. Its steps may still be running; reading a metric waits for them."""

    def on_end(self, run: TrainingRun, result: StepResult):
        """Called once, after the last step, if nothing failed."""

    def on_close(self, error: BaseException | None):
        """Called once, in reverse order, if `on_start` was called; `error` is what ended training early."""


def _check_factory(what: str, factory: Callable[[], Callback]):
    """Raises UserError for a class that is no callback, has a hook that callbacks lack, or needs arguments."""
    definitions.check_call(what, factory)
    if not isinstance(factory, type):
        return
    definitions.check(what, factory, Callback)
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(factory):
        if name.startswith("on_") and name not in hooks:
            raise UserError(f"{what}: there is no hook {name}.{did_you_mean(name, hooks)} Hooks: {', '.join(hooks)}.")


CALLBACKS: Registry[Callable[[], Callback]] = Registry("callback", check=_check_factory)


def register_callback(name: str) -> Callable[[Callable[[], Callback]], Callable[[], Callback]]:
    """Class decorator: adds the callback to every training run of this process.

    The class, or a function that returns a callback, is called without arguments at the start of each run.

    Args:
      name: of the callback.

    Raises:
      UserError: the name is missing, malformed or belongs to another class; or the class needs arguments, or has a hook
        that `Callback` lacks, or one with other parameters.
    """
    return CALLBACKS.decorator("register_callback", name)


def registered_callbacks() -> list[Callback]:
    """Makes the registered callbacks, in the order of registration; raises UserError where a function made none."""
    return [_make(f"callback {name!r}", CALLBACKS.get(name)) for name in CALLBACKS.names()]


def check_callback(what: str, callback: object):
    """Raises UserError for a class, and for what lacks a hook or has one with other parameters."""
    if isinstance(callback, type):
        raise UserError(f"{what} is the class {callback.__name__}; expected an object, {callback.__name__}().")
    definitions.check(what, callback, Callback)


def _make(what: str, factory: Callable[[], Callback]) -> Callback:
    with definitions.named(lambda: what, factory):
        callback = factory()
        check_callback(what, callback)
        return callback
