"""The exceptions of the whole project: mistakes that the user can correct, and programs that do not fit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Invalid input; the message names the flag, file or value, what was expected, and the remedy.

    The command line prints it after `error: `, without a traceback, and exits with status 2.
    """


class OutOfMemory(Exception):
    """Raised when a program does not fit into the memory of the devices.

    The command line reports it like XLA's own out-of-memory error.

    Attributes:
      needed: bytes per device; depending on the compiler, with or without the donated inputs.
      available: bytes per device.
    """

    def __init__(self, needed: int, available: int):
        super().__init__(f"{needed / 2**30:,.2f} GiB of a device's {available / 2**30:,.2f} GiB are needed")
        self.needed, self.available = needed, available


def did_you_mean(word: str, known: Iterable[str], limit: int = 3) -> str:
    """Returns ` Did you mean a, b?` with the known words most similar to `word`, or an empty string."""
    known = list(known)
    by_lower = {k.lower(): k for k in known}
    near = [by_lower[match] for match in difflib.get_close_matches(word.lower(), by_lower, n=limit, cutoff=0.5)]
    return f" Did you mean {', '.join(near)}?" if near else ""
