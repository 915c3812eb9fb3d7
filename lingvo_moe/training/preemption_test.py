"""Protects the end of a training that was asked to stop: after the step, in time, and at once if asked twice."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from lingvo_moe.training import preemption
from lingvo_moe.training.preemption import PreemptionGuard
from lingvo_moe.utils.exit_status import INTERRUPTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A step that does not end: the argument is the grace period.
_BLOCKED = """
import sys, time
from lingvo_moe.training.preemption import PreemptionGuard

with PreemptionGuard(float(sys.argv[1])):
    print("started", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _a_terminal():
    """Tests may run under nohup, whose processes ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_the_process_ends_after_the_grace_period_in_any_case():
    """With a status and a line of its own, because the sender of SIGTERM would kill it without one."""
    returncode, stderr = _end_blocked(signal.SIGTERM)
    assert returncode == INTERRUPTED == 130
    stopping, gave_up = stderr.split("\n\n")
    assert "stopping after this step, with a checkpoint" in stopping
    assert "were not done 0.2 s after the request to stop (training.grace_seconds)" in gave_up


def test_a_closed_terminal_is_a_request_which_nohup_ignores():
    """A signal whose message nobody reads must neither raise an error in the handler nor stop the grace period."""
    assert _end_blocked(signal.SIGHUP, closes=True)[0] == INTERRUPTED
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with PreemptionGuard(60) as guard:
            signal.raise_signal(signal.SIGHUP)
        assert not guard.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def _end_blocked(number: signal.Signals, closes: bool = False) -> tuple[int, str]:
    """Sends a signal to a step that does not end; returns its status and messages, or closes its standard error."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BLOCKED, "0.2"],
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout and process.stdout.readline() == "started\n"
        if closes and process.stderr:
            process.stderr.close()
        process.send_signal(number)
        stderr = "" if closes else process.communicate(timeout=30)[1]
        return process.wait(30), stderr


def test_a_second_interruption_does_not_wait_for_the_step(capfd):
    """The first only sets the request; after SIGTERM and SIGHUP, too, which a user may be unaware of."""
    for first in _SIGNALS:
        with PreemptionGuard(60) as guard:
            assert not guard.requested
            signal.raise_signal(first)
            assert guard.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.count("stopping after this step") == len(_SIGNALS)


def _timers() -> list[threading.Timer]:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return [timer for timer in threads if not timer.finished.is_set()]  # not those that a test before has cancelled


def test_a_training_that_ends_in_time_is_not_ended_again(monkeypatch):
    """SIGTERM, even twice, starts one timer, which ends with the context; the handlers of before are back."""
    gave_up, before = [], [signal.getsignal(number) for number in _SIGNALS]
    monkeypatch.setattr(preemption.os, "_exit", gave_up.append)
    with PreemptionGuard(20) as guard:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        (timer,) = _timers()
        assert not set(before) & {signal.getsignal(number) for number in _SIGNALS}
    assert [signal.getsignal(number) for number in _SIGNALS] == before
    timer.join()
    assert guard.requested and not gave_up
    with PreemptionGuard(0.5) as guard:  # and without the end of the context
        guard.request()
        _timers()[0].join()
    assert gave_up == [INTERRUPTED]


def test_sigterm_is_left_to_the_runtime_of_several_processes():
    """JAX catches it, so that all processes stop after the same step."""
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionGuard(60, catches_sigterm=False) as guard:
        assert signal.getsignal(signal.SIGTERM) == before
        signal.raise_signal(signal.SIGINT)
    assert guard.requested
