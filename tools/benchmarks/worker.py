"""The benchmark's end of a worker process; see `protocol`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
from collections.abc import Mapping, Sequence

from lingvo_moe.errors import UserError

REPOSITORY = pathlib.Path(__file__).parents[2]
_LAST_LINES = 8


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one request told: CPU seconds of one piece of work, and the losses of all that were done."""

    seconds: float
    losses: tuple[float, ...]


class Worker:
    """A process that does one piece of work as often as it is asked to; it ends when the context is left.

    Attributes:
      name: for messages, and of the file that its standard error goes to.
      facts: what it told when it was ready.
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
          UserError: it ended before it was; its last lines are told.
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
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
            )
        try:
            self.facts: dict = self._receive()["facts"]
        except UserError:
            self._end()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind, value, traceback):
        self._end()

    def run(self, times: int) -> Measurement:
        """Has the work done so often; raises UserError where the process ends instead."""
        with contextlib.suppress(BrokenPipeError):  # what it said before its end is told below
            self._process.stdin.write(json.dumps({"run": times}) + "\n")
            self._process.stdin.flush()
        answer = self._receive()
        return Measurement(answer["seconds"] / times, tuple(answer["losses"]))

    def _end(self):
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _receive(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            raise UserError(
                f"the worker {self.name} ended with status {status}; the whole of what it said is in {self._log}:\n"
                + "\n".join(said)
            )
        return json.loads(line)
