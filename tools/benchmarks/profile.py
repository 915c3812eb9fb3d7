"""The CPU time of a training step by part of the model, from a trace of the runtime.

The trace holds the duration of each instruction of the compiled module, the module its part of the model.
"""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Iterable, Mapping

from lingvo_moe.analysis import hlo, plan
from tools.benchmarks import ours, protocol
from tools.benchmarks.work import Work

_STEPS = 10
_PART = re.compile("|".join(plan.PARTS))


def start(fields: dict) -> protocol.Started:
    """Starts a worker whose facts are the profile; see `protocol.serve`."""
    import jax

    trainer = ours.Trainer(Work(**fields))
    trainer.step()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(_STEPS):
                trainer.step()
        trace = next(pathlib.Path(directory).rglob("*.xplane.pb"))
        events = list(_events(jax.profiler.ProfileData.from_file(str(trace))))
    return {"parts": by_part(events, op_names(trainer.executable.hlo()), _STEPS)}, lambda times: []


def by_part(events: Iterable[tuple[str, float]], names: Mapping[str, str], steps: int) -> dict[str, float]:
    """Returns the seconds of one step by part of the model, the largest first.

    Args:
      events: (instruction, seconds) of every run of every instruction.
      names: the operation of each instruction of the module; events of other names belong to other modules.
      steps: number of traced steps. The shortest run of an instruction counts: others were interrupted.
    """
    runs = collections.defaultdict(list)
    for instruction, seconds in events:
        if instruction in names:
            runs[instruction].append(seconds)
    parts: collections.Counter[str] = collections.Counter()
    for instruction, seconds in runs.items():
        parts[_part(names[instruction])] += min(seconds) * len(seconds) / steps
    return dict(parts.most_common())


def op_names(module: str) -> dict[str, str]:
    """Returns the operation of each instruction; empty for what the compiler added."""
    computations = hlo.Module(module, 1).computations.values()
    return {instruction.name: instruction.op_name for instructions in computations for instruction in instructions}


def _part(op_name: str) -> str:
    """Returns the innermost scope of `plan.PARTS`; the optimizer's own scopes are named after the weights."""
    scopes = _PART.findall(op_name)
    return "optimizer" if "optimizer" in scopes else scopes[-1] if scopes else "other"


def _events(profile) -> Iterable[tuple[str, float]]:
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                yield event.name, event.duration_ns / 1e9


if __name__ == "__main__":
    ours.main(start)
