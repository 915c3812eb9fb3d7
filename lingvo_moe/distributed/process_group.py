"""The processes of a run and what they agree on: values, decisions, settings. This module imports no JAX.

`ProcessGroup` is a run of one process. `jax_runtime.join` returns the group of several processes.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from lingvo_moe.errors import UserError

Value = TypeVar("Value")


class ProcessGroup:
    """The processes of a run. This class is a run of one process, where every method returns at once.

    Values are JSON: a method returns lists in place of tuples. All processes call the methods in the same order.

    Attributes:
      count: the number of processes.
      finished: whether `finish` has returned.
      catches_sigterm: whether the runtime handles SIGTERM, which `any_stop_requested` then reports; otherwise the
        caller handles it.
    """

    count: int = 1
    finished: bool = False
    catches_sigterm: bool = False

    @property
    def index(self) -> int:
        """The number of this process, from 0."""
        return 0

    @property
    def is_primary(self) -> bool:
        """Whether this is process 0, which logs and writes what there is only one of."""
        return self.index == 0

    def broadcast(self, function: Callable[[], Any]) -> Any:
        """Calls `function` in process 0; returns its value, or raises its UserError, in all processes."""
        return function()

    def gather(self, value: Any) -> list:
        """Returns the values of all processes, by index, in all processes."""
        return [value]

    def run_in_all(self, function: Callable[[], Value], kinds: Collection[type[UserError]] = ()) -> Value:
        """Calls `function` in each process; returns its value there, or raises the first UserError in all processes.

        A process that raised it alone would leave the others waiting for it.

        Args:
          function: its value need not be JSON.
          kinds: subclasses of UserError, made from a message, which are raised as such; others become a UserError.
        """
        value, problem = None, None
        try:
            value = function()
        except UserError as error:
            problem = [type(error).__name__, str(error)]
        for name, message in filter(None, self.gather(problem)):
            raise next((kind for kind in kinds if kind.__name__ == name), UserError)(message)
        return value  # type: ignore[return-value]  (None only where `function` returns it)

    def any_stop_requested(self, stop_requested: bool) -> bool:
        """Returns whether any process was asked to stop. Collective; with JAX, turns an own request into SIGTERM.

        All processes get the same answer; a late request counts in a later call.

        Args:
          stop_requested: whether this process was.
        """
        return stop_requested

    def barrier(self):
        """Waits, without a time limit, until all processes have called this."""

    def finish(self):
        """Waits for all processes for the last time. Calls after the first do nothing."""
        if not self.finished:
            self.barrier()
            self.finished = True

    def require_same(self, settings: dict[str, str]):
        """Raises UserError, in all processes, if the settings of one differ from those of process 0.

        The error names the first setting that differs, so a setting must come before those that depend on it.
        """
        everyone = self.gather({"--processes": str(self.count), **settings})
        for index, theirs in enumerate(everyone):
            _check_same(index, theirs, everyone[0])

    def require_shared(self, directory: pathlib.Path):
        """Raises UserError, in all processes, if one does not see the files that process 0 writes into `directory`."""
        with contextlib.ExitStack() as stack:
            name = self.broadcast(lambda: _temporary_file(stack, directory))
            visible = self.gather((directory / name).exists())
        if not all(visible):
            raise UserError(
                f"--logdir={directory}: process {visible.index(False)} does not see what process 0 writes there; all "
                f"processes write their part of a checkpoint, so it must be one directory that all machines share."
            )


def _check_same(index: int, theirs: dict[str, str], first: dict[str, str]):
    for key in first | theirs:
        if first.get(key) != theirs.get(key):
            raise UserError(
                f"process {index} has {key} = {theirs.get(key)}, process 0 has {first.get(key)}; start all processes "
                f"with the same flags and data."
            )


def _temporary_file(stack: contextlib.ExitStack, directory: pathlib.Path) -> str:
    """Returns the name of an empty file in `directory`, which is removed when `stack` closes."""
    return pathlib.Path(stack.enter_context(tempfile.NamedTemporaryFile(dir=directory, prefix="shared.")).name).name
