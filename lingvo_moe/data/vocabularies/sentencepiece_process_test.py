"""Protects the process that trains a tokenizer: its errors, and that Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lingvo_moe.data.vocabularies import sentencepiece_process
from lingvo_moe.errors import UserError

_OPTIONS = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 3}
_ENDLESS = """
import itertools, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from lingvo_moe.data.vocabularies import sentencepiece_process

def lines():
    for number in itertools.count():
        if number == 1000:
            print("started", flush=True)
        yield f"sentence number {number}"

sentencepiece_process.train(lines(), {"vocab_size": 400, "minloglevel": 3}, print)
"""


def test_an_error_of_sentencepiece_has_its_text():
    """It names the least number of pieces."""
    with pytest.raises(RuntimeError, match="required_chars"):
        sentencepiece_process.train(["abcdefghijklm"] * 20, {**_OPTIONS, "vocab_size": 5}, print)


def test_a_process_that_is_killed_is_an_error(monkeypatch):
    """The system ends one that takes too much memory."""
    monkeypatch.setattr(sentencepiece_process, "_CHILD", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match="has ended with status -9; if memory ran out, .* --max_sentences"):
        sentencepiece_process.train(["a"] * 100_000, _OPTIONS, print)


def test_the_time_is_reported(monkeypatch):
    """Every ten seconds."""
    monkeypatch.setattr(sentencepiece_process, "_SECONDS_BETWEEN_REPORTS", 0.01)
    seconds: list[float] = []
    assert sentencepiece_process.train([f"a word {n}" for n in range(100)], _OPTIONS, seconds.append)
    assert seconds and seconds == sorted(seconds)


def test_ctrl_c_ends_both_processes():
    """A terminal sends SIGINT to all processes of the command; SentencePiece would go on to its end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", _ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        process_group=0,
    ) as process:
        assert process.stdout and process.stdout.readline() == b"started\n"
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT
        assert process.stderr and b"KeyboardInterrupt" in process.stderr.read()
    deadline = time.monotonic() + 10
    while _is_running(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(process.pid)


def _is_running(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
