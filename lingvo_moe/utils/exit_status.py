"""Exit statuses that several programs of the project share; `cli.app` lists all of them."""

from __future__ import annotations

INTERRUPTED = 130  # as shells report a process that SIGINT ended
