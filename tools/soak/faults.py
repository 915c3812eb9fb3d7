"""Faults of processes, drawn from a seed, and corruption of checkpoints while no process runs."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Callable, Iterator

KILL, TERMINATE = "SIGKILL", "SIGTERM"
# The phases that a fault is aimed at, with weights and the longest delay in seconds. A save takes tenths of a second,
# writing its manifest milliseconds; a start takes as long as that of the reference run.
AIMS = {"start": (2, None), "step": (3, 0.05), "save": (4, 0.25), "manifest": (2, 0.02), "evaluation": (2, 0.05)}
_TERMINATE_SHARE, _CORRUPTION_SHARE = 0.1, 0.2


@dataclasses.dataclass(frozen=True)
class Fault:
    """A signal to one process, and corruption of the newest checkpoint afterwards.

    Attributes:
      signal: KILL or TERMINATE.
      aim: the phase to wait for, of AIMS.
      ahead: number of new steps to make first.
      delay: time to wait after the phase has begun, as a share of the longest delay.
      process: the process that gets the signal, as a share of their number.
      corruption: what is done to the newest checkpoint afterwards, of CORRUPTIONS; None for nothing.
    """

    signal: str
    aim: str
    ahead: int
    delay: float
    process: float
    corruption: str | None


def draw(kills: int, seed: int, most_ahead: int) -> Iterator[Fault]:
    """Yields faults until `kills` of them were kills; the same seed draws the same ones."""
    generator = random.Random(seed)
    names, weights = list(AIMS), [weight for weight, _ in AIMS.values()]
    while kills:
        terminates = generator.random() < _TERMINATE_SHARE
        fault = Fault(
            TERMINATE if terminates else KILL,
            generator.choices(names, weights)[0],
            generator.randint(1, most_ahead),
            generator.random(),
            generator.random(),
            generator.choice(list(CORRUPTIONS)) if generator.random() < _CORRUPTION_SHARE else None,
        )
        kills -= not terminates
        yield fault


def _truncate(step: pathlib.Path, generator: random.Random):
    file = _any_file(step, generator)
    file.write_bytes(file.read_bytes()[: generator.randrange(file.stat().st_size)])


def _flip(step: pathlib.Path, generator: random.Random):
    file = _any_file(step, generator)
    content = bytearray(file.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    file.write_bytes(content)


def _remove(step: pathlib.Path, generator: random.Random):
    _any_file(step, generator).unlink()


def _remove_manifest(step: pathlib.Path, generator: random.Random):
    del generator
    (step / "manifest.json").unlink(missing_ok=True)


def _leave_partial(step: pathlib.Path, generator: random.Random):
    """Leaves what a process leaves that is killed while it writes."""
    partial = step.with_name(f"{int(step.name) + 1}.orbax-checkpoint-tmp") / "theta"
    partial.mkdir(parents=True)
    (partial / "d").write_bytes(generator.randbytes(100))


# Corruptions of the newest checkpoint by name, and whether the checkpoint is valid afterwards.
CORRUPTIONS: dict[str, tuple[Callable[[pathlib.Path, random.Random], None], bool]] = {
    "truncated file": (_truncate, False),
    "flipped bit": (_flip, False),
    "missing file": (_remove, False),
    "no manifest": (_remove_manifest, True),
    "partial directory": (_leave_partial, True),
}


def _any_file(step: pathlib.Path, generator: random.Random) -> pathlib.Path:
    """Returns a file that is in the manifest and not empty."""
    files = (path for path in sorted(step.rglob("*")) if path.is_file() and path.name != "manifest.json")
    return generator.choice([path for path in files if path.stat().st_size])
