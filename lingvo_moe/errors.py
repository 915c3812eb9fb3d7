"""The one exception for mistakes a person can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message names the thing, what was expected and the remedy, in one or two lines.

    The command line prints it after `error: ` and exits with status 2; no traceback is shown.
    """


def did_you_mean(word: str, known: Iterable[str], limit: int = 3) -> str:
    """Returns ` Did you mean a, b?` for the known words nearest to `word`, or an empty string."""
    known = list(known)
    by_lower = {k.lower(): k for k in known}
    near = [by_lower[m] for m in difflib.get_close_matches(word.lower(), by_lower, n=limit, cutoff=0.5)]
    return f" Did you mean {', '.join(near)}?" if near else ""
