"""Where a process stood: from the stacks that `faulthandler` writes to the part of training they belong to."""

from __future__ import annotations

import re
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(.*)", line \d+ in (.*)$', re.MULTILINE)
# The first of these of which a frame is found in the main thread counts. A file's name is a part of its path.
_MAIN = (
    ("training/checkpoint.py", "save", "save"),
    ("training/checkpoint.py", "restore", "restore"),
    ("training/standard_callbacks.py", "_cross_entropy", "evaluation"),
    ("training/standard_callbacks.py", "", "curves"),
    ("lingvo_moe/data/", "", "data"),
    ("training/loop.py", "_make_steps", "step"),
    ("training/loop.py", "_compile", "compile"),
    ("training/checkpoint.py", "", "look for a checkpoint"),
    ("training/loop.py", "_restore_or_initialise", "compile"),
)
# What another thread does meanwhile: a checkpoint is written, then sealed.
_BESIDE = (
    ("training/checkpoint_manifest.py", "write_manifest", "seal"),
    ("training/checkpoint.py", "_write_manifest", "write"),
)
# The outermost frame; it is written last.
_OUTERMOST = "_run_module_as_main"
BEFORE_TRAINING = "start"


class Place(NamedTuple):
    """What the main thread did, and what was done to a checkpoint beside it (`write`, `seal` or an empty string)."""

    main: str
    beside: str = ""

    def __str__(self) -> str:
        return f"{self.main}, {self.beside} beside" if self.beside else self.main


def is_whole(dump: str) -> bool:
    """Whether the main thread's stack, the last one, has been written to its end."""
    return dump.endswith("\n") and _OUTERMOST in dump


def place(dump: str) -> Place:
    """Reads what SIGUSR1 made a process write; an empty text is of one that had not come to its imports."""
    threads = [_FRAME.findall(thread) for thread in dump.split("\n\n")]
    own = next((frames for frames in threads if frames and frames[-1][1] == _OUTERMOST), [])
    beside = (_first(frames, _BESIDE) for frames in threads if frames is not own)
    return Place(_first(own, _MAIN) or BEFORE_TRAINING, next(filter(None, beside), ""))


def _first(frames: list[tuple[str, str]], places: tuple[tuple[str, str, str], ...]) -> str | None:
    for part, wanted, name in places:
        if any(part in file and wanted in ("", function) for file, function in frames):
            return name
    return None
