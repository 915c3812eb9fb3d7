"""The benchmark's side of a worker process; see `protocol`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
from collections.abc import Mapping, Sequence

from lingvo_moe.errors import UserError
from lingvo_moe.utils import allocator

REPOSITORY = pathlib.Path(__file__).parents[2]
_LAST_LINES = 8


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The answer to a request: CPU seconds of doing the work once, and the losses of all repetitions."""

    seconds: float
    losses: tuple[float, ...]


class Worker:
    """A process that does its work on request; it ends when the context is left.

    Attributes:
      name: name in messages and of its log.
      facts: the facts that it sent when it was ready.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        work: Mapping,
        logs: pathlib.Path,
        environment: Mapping[str, str] | None = None,
    ):
        """Starts `command` with the work as its last argument, and waits until it is ready.

        Raises:
          UserError: the process ended early; the message quotes its last lines.
        """
        self.name = name
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{name}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(work)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                # Both sides have the same allocator; as for our commands, `LD_PRELOAD=` keeps the C library's.
                env={**allocator.preloading(), **os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
            )
        assert self._process.stdin and self._process.stdout, "both are pipes"
        self._requests, self._answers = self._process.stdin, self._process.stdout
        try:
            self.facts: dict = self._receive()["facts"]
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind, value, traceback):
        self._end()

    def run(self, times: int) -> Measurement:
        """Requests the work a number of times; raises UserError if the process ends instead."""
        with contextlib.suppress(BrokenPipeError):  # `_receive` reports why it ended
            self._requests.write(json.dumps({"run": times}) + "\n")
            self._requests.flush()
        answer = self._receive()
        return Measurement(answer["seconds"] / times, tuple(answer["losses"]))

    def _end(self):
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()

    def _receive(self) -> dict:
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            last = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            raise UserError(
                f"the worker {self.name} ended with status {status}; its log is {self._log}:\n" + "\n".join(last)
            )
        return json.loads(line)
