"""Everything that a command line changes for its whole process, done once at its start.

A module of the library changes nothing process-wide when it is imported; what a command needs of that kind is called
from here.
"""

from __future__ import annotations

import _thread
import functools
import glob
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from lingvo_moe import lazy
from lingvo_moe.cli import logging_setup
from lingvo_moe.utils import cuda

_UNTIL_RAISED_AGAIN = 0.05  # seconds; the callback takes less


def set_up_process():
    """Prepares this process to run a command; `app.run_process` calls it before anything else."""
    set_environment()
    lazy.configure_tensorflow()
    logging_setup.silence_libraries()
    handle_unraisable_exceptions()


def set_environment():
    """Sets environment variables that XLA, TensorFlow and libtpu read when they start; what the user has set stays."""
    # The C++ logs of XLA and TensorFlow at start-up need no action and hide the program's own output. JAX sets 1 when
    # it is imported, which a tool may have done already.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # libtpu, which `plan` compiles with, queries the network for its TPU whenever JAX starts, and logs at length that
    # there is none. The patterns are where Linux shows the chips of a TPU; without them, these are the answers.
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v3-8")
    # XLA's compiler for GPUs can be here without CUDA (`engines.cluster`): JAX need not report that, and must not start
    # a GPU with the compiler alone. `engines.pjrt` warns about a GPU that is not used.
    if not cuda.has_runtime():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if cuda.has_unusable_gpu():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def handle_unraisable_exceptions():
    """Stops Python from reporting reads that Orbax abandons, and from losing a Ctrl-C.

    When one of several reads fails, Orbax leaves the others to threads that find their event loop closed. The failure
    itself is raised. JAX has a callback of Python's garbage collection: a KeyboardInterrupt inside of it would only be
    reported, so it is raised again soon after.
    """
    sys.unraisablehook = functools.partial(_handle, sys.unraisablehook)


def _interrupt_later():
    time.sleep(_UNTIL_RAISED_AGAIN)
    _thread.interrupt_main()


def _handle(report: Callable[[Any], object], unraisable: Any):
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        # Not threading's: the collection may have begun while its lock is held.
        _thread.start_new_thread(_interrupt_later, ())
    elif str(unraisable.exc_value) != "Event loop is closed":
        report(unraisable)
