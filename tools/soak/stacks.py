"""Maps the stacks that `faulthandler` dumps to the phase of training that they show."""

from __future__ import annotations

import re
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(.*)", line \d+ in (.*)$', re.MULTILINE)
# (part of a file's path, function, phase): the first with a frame in the main thread counts.
_MAIN = (
    ("training/checkpoint.py", "save", "save"),
    ("training/checkpoint.py", "restore", "restore"),
    ("training/standard_callbacks.py", "_cross_entropy", "evaluation"),
    ("training/standard_callbacks.py", "", "curves"),
    ("lingvo_moe/data/", "", "data"),
    ("training/loop.py", "_make_steps", "step"),
    ("training/loop.py", "_compile", "compile"),
    ("training/checkpoint.py", "", "find a checkpoint"),
    ("training/start.py", "load_state", "compile"),
)
# What another thread does meanwhile: it writes a checkpoint, then its manifest.
_BACKGROUND = (
    ("training/checkpoint_manifest.py", "write_manifest", "manifest"),
    ("training/checkpoint.py", "_write_manifest", "write"),
)
# The outermost frame, which is dumped last.
_OUTERMOST = "_run_module_as_main"
BEFORE_TRAINING = "start"


class Phase(NamedTuple):
    """What the main thread does, and what another one does to a checkpoint (`write`, `manifest` or an empty string)."""

    main: str
    background: str = ""

    def __str__(self) -> str:
        return f"{self.main}, {self.background} in background" if self.background else self.main


def is_complete(dump: str) -> bool:
    """Returns whether the dump has reached the end of the main thread's stack, which comes last."""
    return dump.endswith("\n") and _OUTERMOST in dump


def phase(dump: str) -> Phase:
    """Returns the phase that a dump shows; an empty one is of a process before its imports."""
    threads = [_FRAME.findall(thread) for thread in dump.split("\n\n")]
    own = next((frames for frames in threads if frames and frames[-1][1] == _OUTERMOST), [])
    background = (_first(frames, _BACKGROUND) for frames in threads if frames is not own)
    return Phase(_first(own, _MAIN) or BEFORE_TRAINING, next(filter(None, background), ""))


def _first(frames: list[tuple[str, str]], phases: tuple[tuple[str, str, str], ...]) -> str | None:
    for part, wanted, name in phases:
        if any(part in file and wanted in ("", function) for file, function in frames):
            return name
    return None
