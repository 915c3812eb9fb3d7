"""Trains a SentencePiece model in a process of its own, which Ctrl-C ends: SentencePiece itself ignores signals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sentencepiece

from lingvo_moe.errors import UserError

_CHILD = "from lingvo_moe.data.vocabularies import sentencepiece_process; sentencepiece_process.serve()"
_REFUSED = 3  # the exit status of the child where SentencePiece raises an error, whose text it writes
_SECONDS_BETWEEN_REPORTS = 10.0


def train(lines: Iterable[str], options: Mapping[str, Any], report: Callable[[float], None]) -> bytes:
    """Returns the bytes of a model.

    Args:
      lines: of the input, as `input_format` has them, without line ends.
      options: of `SentencePieceTrainer.train`, as JSON can have them.
      report: called every ten seconds with the number of seconds since the start.

    Raises:
      RuntimeError: SentencePiece's, with its text.
      UserError: something else ended the process.
    """
    start = time.monotonic()
    command = [sys.executable, "-c", _CHILD, json.dumps(dict(options))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):  # the process has ended, and says why
                for line in lines:
                    process.stdin.write(f"{line}\n".encode())
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    written, _ = process.communicate(timeout=_SECONDS_BETWEEN_REPORTS)
                    break
                report(time.monotonic() - start)
        finally:
            process.kill()  # after Ctrl-C; without effect on a process that has ended
            process.wait()
    if process.returncode == _REFUSED:
        raise RuntimeError(written.decode())
    if process.returncode:
        raise UserError(
            f"the process that trains a tokenizer has ended with status {process.returncode}; if memory ran out, free "
            f"some, or pass a smaller --max_sentences."
        )
    return written


def serve():
    """Trains with the options of the first argument, on the lines of standard input, and writes the model."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler waits for SentencePiece to return
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line.removesuffix(b"\n").decode() for line in sys.stdin.buffer),
            model_writer=model,
            **json.loads(sys.argv[1]),
        )
    except RuntimeError as error:
        sys.stdout.buffer.write(str(error).encode())
        sys.exit(_REFUSED)
    sys.stdout.buffer.write(model.getvalue())
