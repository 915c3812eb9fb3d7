"""Progress of long operations: a bar with rate and remaining time on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

Item = TypeVar("Item")
_SECONDS_BETWEEN_LOG_LINES = 10.0
_is_hidden = contextvars.ContextVar("is_hidden", default=False)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Within it, this thread shows no progress: for programs that call the library many times."""
    token = _is_hidden.set(True)
    try:
        yield
    finally:
        _is_hidden.reset(token)


@contextlib.contextmanager
def bar(
    title: str, total: int | None, unit: str = "it", done: int = 0, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """Yields `advance(count=1, note="")`, which is called as the work proceeds.

    Args:
      title: the operation, in a few words.
      total: the number of units, or None if it is not known.
      unit: the name of the unit (`steps`, `pairs`).
      done: the number of units done before (by a run that is resumed).
      shown: whether to show anything; in a run of many processes only the primary one does.

    On a terminal a bar with rate and ETA is drawn on standard error; elsewhere a plain line is printed every ten
    seconds and one at the end, so a log stays readable.
    """
    if not shown or _is_hidden.get():
        yield lambda count=1, note="": None
        return
    reporter = _Bar(title, total, unit, done) if sys.stderr.isatty() else _Lines(title, total, unit, done)
    with reporter:
        yield reporter.advance


def track(items: Iterable[Item], title: str, total: int | None = None, unit: str = "it") -> Iterator[Item]:
    """Yields the items and shows progress; `total` defaults to `len(items)` if the items have a length."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with bar(title, total, unit) as advance:
        for item in items:
            yield item
            advance()


class _Lines:
    """Plain lines for a log."""

    def __init__(self, title: str, total: int | None, unit: str, done: int):
        self._title, self._total, self._unit = title, total, unit
        self._start_count = self._count = done
        self._start = self._last = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        self._print("stopped" if kind else "done")

    def advance(self, count: int = 1, note: str = ""):
        self._count += count
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LOG_LINES:
            self._print(note)

    def _print(self, note: str):
        self._last = time.monotonic()
        elapsed = self._last - self._start
        rate = (self._count - self._start_count) / max(elapsed, 1e-9)
        of = f"/{self._total}" if self._total is not None else ""
        line = f"{self._title}: {self._count}{of} {self._unit}, {rate:.3g} {self._unit}/s, {elapsed:.0f} s"
        if self._total and rate > 0 and self._count < self._total:
            line += f", {(self._total - self._count) / rate:.0f} s left"
        print(line + (f"  {note}" if note else ""), file=sys.stderr, flush=True)


class _Bar:
    """A rich bar on standard error."""

    def __init__(self, title: str, total: int | None, unit: str, done: int):
        from rich import console, progress  # imported only for a terminal

        text = functools.partial(progress.TextColumn, markup=False)  # a file's name may have brackets
        self._progress = progress.Progress(
            text("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            text("{task.fields[rate]} " + unit + "/s"),
            progress.TimeElapsedColumn(),
            text("left"),
            progress.TimeRemainingColumn(),
            text("{task.fields[note]}"),
            console=console.Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # what is printed to a file meanwhile belongs there
        )
        self._note = ""
        self._task = self._progress.add_task(title, total=total, completed=done, rate="-", note="")
        self._start_count = self._count = done
        self._start = time.monotonic()

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, kind, value, traceback):
        self._progress.stop()

    def advance(self, count: int = 1, note: str = ""):
        self._count += count
        rate = (self._count - self._start_count) / max(time.monotonic() - self._start, 1e-9)
        self._note = note or self._note
        self._progress.update(self._task, advance=count, rate=f"{rate:.3g}", note=self._note)
