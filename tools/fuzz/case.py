"""A case of the fuzzer: what is called on which files, and the checks of its outcome."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping

from lingvo_moe.training import logdir_lock
from lingvo_moe.utils.hashes import file_sha256

Snapshot = Mapping[str, str]
DONE, MISTAKE = 0, 2
_SHORTEST_MESSAGE = 20
# A line of help or of a log may mention errors; a message starts with the word.
_MESSAGE = re.compile(r"^error: (.*)", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an entry point.

    Attributes:
      target: the row of the summary.
      entry_point: what is called, a name of `runner.ENTRY_POINTS`.
      arguments: its arguments; `FIXTURES/` at the start of a path stands for the directory of valid inputs.
      named: an error must name one of these: the flag, the value or the file. Letter case does not matter.
      prepare: puts files into the working directory of the case.
      input: standard input.
      writes: names of files in the working directory that a call with status 0 may overwrite.
      summary_on_stdout: status 2 may come with a summary on standard output instead of an error.
    """

    target: str
    entry_point: str
    arguments: tuple[str, ...]
    named: tuple[str, ...]
    prepare: Callable[[pathlib.Path], None] = lambda directory: None
    input: bytes = b""
    writes: tuple[str, ...] = ()
    summary_on_stdout: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a call.

    Attributes:
      status: the exit status; None after an exception or a timeout.
      stdout, stderr: what was written.
      raised: the exception's traceback, or the reason why there is no status.
    """

    status: int | None
    stdout: str
    stderr: str
    raised: str = ""


def check(case: Case, outcome: Outcome, before: Snapshot, after: Snapshot) -> list[str]:
    """Returns the problems of an outcome, a line each.

    Args:
      case: what was called.
      outcome: its outcome.
      before: snapshot of the files before the call.
      after: snapshot of the files after the call.
    """
    return [*_check_call(case, outcome), *_check_files(case, outcome, before, after)]


def snapshot(*directories: pathlib.Path) -> Snapshot:
    """Returns a digest of every file below some directories, by path; links and Python's caches are skipped."""
    return {
        str(path): _digest(path)
        for directory in directories
        for path in directory.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.parent.name != "__pycache__"
    }


def _check_call(case: Case, outcome: Outcome) -> list[str]:
    if outcome.status is None:
        return [f"no exit status: {outcome.raised.strip()}"]
    if _TRACEBACK in outcome.stderr + outcome.stdout:
        return [f"a traceback was printed, status {outcome.status}: {outcome.stderr.strip()[-2000:]}"]
    messages = _MESSAGE.findall(outcome.stderr)
    if outcome.status == DONE:
        return [f"status 0, but: {messages[0]}"] if messages else []
    if outcome.status != MISTAKE:
        return [f"status {outcome.status}: {outcome.stderr.strip()[-500:]}"]
    if case.summary_on_stdout and outcome.stdout.strip() and not messages:
        return []
    if len(messages) != 1:
        return [f"{len(messages)} lines begin with error: {outcome.stderr.strip()[-500:]!r}"]
    return _check_message(case, outcome.stderr.partition("error: ")[2])


def _check_message(case: Case, message: str) -> list[str]:
    if len(message) < _SHORTEST_MESSAGE:
        return [f"the message is too short to help: {message!r}"]
    if not any(word.lower() in message.lower() for word in case.named if word):
        return [f"the message names none of {', '.join(case.named)}: {message.strip()!r}"]
    return []


def _check_files(case: Case, outcome: Outcome, before: Snapshot, after: Snapshot) -> list[str]:
    problems = [f"{path} is gone" for path in before.keys() - after.keys()]
    problems += [
        f"{path} has changed"
        for path in before.keys() & after.keys()
        if before[path] != after[path] and not (outcome.status == DONE and pathlib.Path(path).name in case.writes)
    ]
    # The lock of a log directory stays, whatever ends the training.
    new = sorted(path for path in after.keys() - before.keys() if pathlib.Path(path).name != logdir_lock.LOCK)
    left = [path for path in new if outcome.status != DONE or "partial" in pathlib.Path(path).name]
    return problems + [f"{path} was left behind" for path in left]


def _digest(path: pathlib.Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return file_sha256(path)
