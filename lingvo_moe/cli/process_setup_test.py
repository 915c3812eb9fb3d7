"""What a command line changes for its process, and that importing the library changes nothing of it."""

from __future__ import annotations

import os
import sys
import types

import pytest

from lingvo_moe.cli import process_setup
from lingvo_moe.testing.processes import run_code
from lingvo_moe.utils import cuda


def test_abandoned_reads_are_not_reported_and_other_exceptions_are(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    process_setup.handle_unraisable_exceptions()
    for message in ("Event loop is closed", "a bug"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(message)))
    assert [str(unraisable.exc_value) for unraisable in reported] == ["a bug"]


def test_an_interrupt_in_a_callback_of_the_garbage_collector_is_not_lost():
    """JAX has such a callback. Python reports what it raises, and goes on."""
    code = (
        "import gc, signal, time; from lingvo_moe.cli import process_setup\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell ignores it for jobs in the background
        "process_setup.handle_unraisable_exceptions()\n"
        "def callback(phase, info):\n"
        "    gc.callbacks.remove(callback)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "gc.callbacks.append(callback)\n"
        "gc.collect()\n"
        "try:\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = run_code(code)
    assert (process.stdout, process.stderr) == ("interrupted\n", "")


def test_importing_the_command_line_changes_nothing_of_the_process():
    """A program of one's own that imports the library keeps its hooks and its logging configuration."""
    code = (
        "import logging, sys; hook = sys.unraisablehook\n"
        "import os; environment = dict(os.environ)\n"
        "import lingvo_moe.cli.main, lingvo_moe.cli.process_setup\n"
        "assert dict(os.environ) == environment\n"
        "assert sys.unraisablehook is hook and not logging.getLogger('lingvo_moe').handlers\n"
        "assert not logging.getLogger('absl').filters and not logging.getLogger('asyncio').filters\n"
    )
    run_code(code)


@pytest.mark.parametrize("given, expected", [(None, "3"), ("1", "3"), ("0", "0"), ("2", "2")])
def test_log_level_of_libraries_is_the_users_or_silent(monkeypatch, given, expected):
    """JAX sets 1 when it is imported; any other value is the user's."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if given is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", given)
    process_setup.set_environment()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == expected


def test_looking_for_devices_is_silent():
    """Without the settings, libtpu reports in five lines that there is no TPU, before any output of a command."""
    code = (
        "import orbax.checkpoint, jax; from lingvo_moe.cli import process_setup\n"
        "process_setup.set_up_process(); print(jax.devices()[0].platform)"
    )
    of_tests = ("JAX_", "TPU_", "TF_CPP", "XLA_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}
    process = run_code(code, environment=environment)
    assert (process.stdout, process.stderr) == ("cpu\n", "")


@pytest.mark.parametrize(
    "gpus, installed, expected",
    [
        ([], False, {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}),
        (["/dev/nvidia0"], False, {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}),
        (["/dev/nvidia0"], True, {}),
    ],
)
def test_a_compiler_for_gpus_without_cuda_does_not_start_a_gpu(monkeypatch, gpus, installed, expected):
    """JAX would start it, and fail: `make quickstart` would, on every workstation with a GPU and no CUDA for JAX."""
    names = ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "JAX_PLATFORMS")
    for name in names:
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(cuda.glob, "glob", lambda pattern: gpus)
    monkeypatch.setattr(cuda, "has_runtime", lambda: installed)
    process_setup.set_environment()
    assert {name: os.environ[name] for name in names if name in os.environ} == expected
