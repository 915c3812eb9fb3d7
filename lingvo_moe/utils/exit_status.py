"""Exit statuses that several programs of the project share; `cli.app` lists all of them."""

from __future__ import annotations

USER_ERROR = 2  # a mistake that the user can correct
PROCESS_LOST = 3  # another process of the same run is gone
INTERRUPTED = 130  # as shells report a process that SIGINT ended
BROKEN_PIPE = 141  # as shells report a process that SIGPIPE ended: the reader of the output has closed it
