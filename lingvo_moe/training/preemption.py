"""Preemption: SIGINT and SIGTERM end training after the step in progress, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from typing import Self

EXIT_STATUS = 130


class PreemptionGuard:
    """A context in which SIGINT and SIGTERM only set `requested`; a second SIGINT interrupts at once.

    If JAX's runtime catches SIGTERM, so that all processes stop after the same step, the guard catches SIGINT alone.

    Attributes:
      requested: whether the process was asked to stop.
    """

    def __init__(self, grace_seconds: float, catches_sigterm: bool = True):
        """Makes a guard that is not active yet.

        Args:
          grace_seconds: the seconds from SIGTERM after which the process ends in any case, because its sender would
            kill it.
          catches_sigterm: whether the guard catches SIGTERM. If not, the caller calls `request`.
        """
        self.requested = False
        self._caught = (signal.SIGINT, signal.SIGTERM) if catches_sigterm else (signal.SIGINT,)
        self._grace_seconds = grace_seconds
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._on_signal) for number in self._caught}
        return self

    def __exit__(self, kind, value, traceback):
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def request(self):
        """Sets `requested` and starts the grace period, as SIGTERM does."""
        self._set_requested()
        if self._timer is None:
            self._timer = threading.Timer(self._grace_seconds, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _on_signal(self, number, frame):
        if number == signal.SIGTERM:
            self.request()
        elif self.requested:
            raise KeyboardInterrupt
        else:
            self._set_requested()

    def _set_requested(self):
        if not self.requested:
            # Not print or logging: the signal may interrupt one of them, and Python refuses to write inside a
            # write.
            os.write(2, b"\nstopping after this step, with a checkpoint; the same command will resume from there ...\n")
        self.requested = True

    def _give_up(self):
        os.write(
            2,
            f"\nstep and checkpoint were not done {self._grace_seconds:g} s after SIGTERM (training.grace_seconds); "
            f"stopped. The same command will resume from the checkpoint before.\n".encode(),
        )
        os._exit(EXIT_STATUS)
