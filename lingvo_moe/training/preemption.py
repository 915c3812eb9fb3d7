"""Preemption: SIGINT, SIGTERM and SIGHUP end training after the step in progress, with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Self

from lingvo_moe.utils.exit_status import INTERRUPTED


class PreemptionGuard:
    """A context in which SIGINT, SIGTERM and SIGHUP only set `requested`; a second SIGINT interrupts at once.

    SIGHUP, of a terminal that is closed, counts as SIGTERM, unless it is ignored, as under `nohup`. If JAX's runtime
    catches SIGTERM, so that all processes stop after the same step, the guard does not.

    Attributes:
      requested: whether the process was asked to stop.
    """

    def __init__(self, grace_seconds: float, catches_sigterm: bool = True):
        """Makes a guard that is not active yet.

        Args:
          grace_seconds: the seconds from SIGTERM, SIGHUP or `request` after which the process ends in any case, because
            the sender of a signal would kill it.
          catches_sigterm: whether the guard catches SIGTERM. If not, the caller calls `request`.
        """
        self.requested = False
        self._caught = [signal.SIGINT]
        if catches_sigterm:
            self._caught.append(signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._caught.append(signal.SIGHUP)
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
        """Sets `requested` and starts the grace period, as SIGTERM and SIGHUP do."""
        self._set_requested()
        if self._timer is None:
            self._timer = threading.Timer(self._grace_seconds, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _on_signal(self, number, frame):
        if number != signal.SIGINT:
            self.request()
        elif self.requested:
            raise KeyboardInterrupt
        else:
            self._set_requested()

    def _set_requested(self):
        if not self.requested:
            _say("stopping after this step, with a checkpoint; the same command will resume from there ...")
        self.requested = True

    def _give_up(self):
        _say(
            f"step and checkpoint were not done {self._grace_seconds:g} s after the request to stop "
            f"(training.grace_seconds); stopped. The same command will resume from the checkpoint before."
        )
        os._exit(INTERRUPTED)


def _say(message: str):
    """Writes a line, if anybody reads standard error."""
    # Not print or logging: the signal may interrupt one of them, and Python refuses to write inside a write.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{message}\n".encode())
