"""Says that a program is compiled, and how long it took: a minute or more without any other output."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from lingvo_moe import lazy
from lingvo_moe.experiment import Experiment

_logger = logging.getLogger(__name__)
UNLESS_CACHED = 2.0  # seconds, in which most programs come from the program cache


@contextlib.contextmanager
def announced(what: str, experiment: Experiment, platform: str, after: float = 0.0) -> Iterator[None]:
    """Logs that a program is compiled within this context, and at its end, but for that of an error, how long it took.

    Args:
      what: is compiled, usually the registered name of a model.
      experiment: its experiment.
      platform: of the devices.
      after: nothing is logged of what takes fewer seconds, such as `UNLESS_CACHED`.
    """
    start, said = time.monotonic(), threading.Event()
    weights, devices = f"{experiment.model.num_weights():,}", f"{experiment.mesh.size} {platform} device(s)"

    def say():
        with lazy.STDERR:
            _logger.info("compiling %s, %s weights, for %s, mesh %s ...", what, weights, devices, experiment.mesh)
        said.set()

    timer = threading.Timer(after, say)
    if after:
        timer.start()
    else:
        say()
    try:
        yield
    finally:
        timer.cancel()
    if said.is_set():
        _logger.info("compiled in %.0f s", time.monotonic() - start)
