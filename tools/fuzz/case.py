"""A case of the fuzzer: what is called on which files, and how its outcome is judged."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Callable, Mapping

Snapshot = Mapping[str, str]
DONE, MISTAKE = 0, 2
_SHORTEST_MESSAGE = 20
# A line of help or of a log may speak of errors; a message begins with the word.
_MESSAGE = re.compile(r"^error: (.*)", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a front door.

    Attributes:
      door: the row of the summary.
      entry: what is called, a name of `runner.ENTRIES`.
      arguments: its arguments; `WORLD/` at the beginning of a path stands for the directory of sound inputs.
      about: an error must name one of these: the flag, the value, the file that is wrong. Letter case does not matter.
      prepare: puts files into the directory that the case runs in.
      input: standard input.
      writes: names of files, there, that it may write over if it ends with status 0.
      tells_on_stdout: status 2 may come with a verdict on standard output in place of an error.
    """

    entry_point: str
    entry: str
    arguments: tuple[str, ...]
    about: tuple[str, ...]
    prepare: Callable[[pathlib.Path], None] = lambda directory: None
    input: bytes = b""
    writes: tuple[str, ...] = ()
    tells_on_stdout: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a call.

    Attributes:
      status: the exit status; None where an exception came out or the time was up.
      stdout, stderr: what was written.
      raised: the exception's traceback or the reason why there is no status.
    """

    status: int | None
    stdout: str
    stderr: str
    raised: str = ""


def judge(case: Case, outcome: Outcome, before: Snapshot, after: Snapshot) -> list[str]:
    """Returns what is wrong with an outcome, a line each."""
    return [*_of_the_call(case, outcome), *_of_the_files(case, outcome, before, after)]


def snapshot(*directories: pathlib.Path) -> Snapshot:
    """A digest of every file below some directories, by path; what links lead to is not looked at, nor Python's own caches."""
    return {
        str(path): _digest(path)
        for directory in directories
        for path in directory.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.parent.name != "__pycache__"
    }


def _of_the_call(case: Case, outcome: Outcome) -> list[str]:
    if outcome.status is None:
        return [f"no exit status: {outcome.raised.strip()}"]
    if _TRACEBACK in outcome.stderr + outcome.stdout:
        return [f"a traceback was printed, status {outcome.status}: {outcome.stderr.strip()[-2000:]}"]
    messages = _MESSAGE.findall(outcome.stderr)
    if outcome.status == DONE:
        return [f"status 0, but: {messages[0]}"] if messages else []
    if outcome.status != MISTAKE:
        return [f"status {outcome.status}: {outcome.stderr.strip()[-500:]}"]
    if case.tells_on_stdout and outcome.stdout.strip() and not messages:
        return []
    if len(messages) != 1:
        return [f"{len(messages)} lines begin with error: {outcome.stderr.strip()[-500:]!r}"]
    return _of_the_message(case, outcome.stderr.partition("error: ")[2])


def _of_the_message(case: Case, message: str) -> list[str]:
    if len(message) < _SHORTEST_MESSAGE:
        return [f"the message says next to nothing: {message!r}"]
    if not any(word.lower() in message.lower() for word in case.about if word):
        return [f"the message names none of {', '.join(case.about)}: {message.strip()!r}"]
    return []


def _of_the_files(case: Case, outcome: Outcome, before: Snapshot, after: Snapshot) -> list[str]:
    problems = [f"{path} is gone" for path in before.keys() - after.keys()]
    problems += [
        f"{path} has changed"
        for path in before.keys() & after.keys()
        if before[path] != after[path] and not (outcome.status == DONE and pathlib.Path(path).name in case.writes)
    ]
    new = sorted(after.keys() - before.keys())
    left = [path for path in new if outcome.status != DONE or "partial" in pathlib.Path(path).name]
    return problems + [f"{path} was left behind" for path in left]


def _digest(path: pathlib.Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest()
