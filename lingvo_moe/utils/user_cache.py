"""The user's cache directory of this program."""

from __future__ import annotations

import os
from pathlib import Path


def directory() -> Path:
    """Returns `$XDG_CACHE_HOME/lingvo_moe`, or `~/.cache/lingvo_moe`, as the XDG base directory specification has it.

    Compiled programs are below it, and downloaded packages. Nothing is created.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")) / "lingvo_moe"
