"""Being asked to stop: SIGINT and SIGTERM end training after the step in progress, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading

EXIT_STATUS = 130


class PreemptionGuard:
    """While it is entered, the signals do nothing but set `requested`; a second SIGINT interrupts at once.

    Attributes:
      requested: whether one has come.
    """

    def __init__(self, grace_seconds: float):
        """`grace_seconds`: the process ends that long after SIGTERM, done or not: what sent it would kill it anyway."""
        self.requested = False
        self._grace = grace_seconds
        self._timer: threading.Timer | None = None

    def __enter__(self) -> PreemptionGuard:
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind, value, traceback):
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number, frame):
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        # Not print: the signal may have come in the middle of one, and Python refuses to write inside a write.
        os.write(2, b"\nstopping after this step, with a checkpoint; the same command will go on from there ...\n")
        if number == signal.SIGTERM and self._timer is None:
            self._timer = threading.Timer(self._grace, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self):
        os.write(
            2,
            f"\nstep and checkpoint were not done {self._grace:g} s after SIGTERM (training.grace_seconds); stopped. The "
            f"same command will go on from the checkpoint before.\n".encode(),
        )
        os._exit(EXIT_STATUS)
