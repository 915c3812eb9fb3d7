"""The time of a step by the schedule of XLA's CUDA compiler, from its own estimates of kernels and collectives.

The compiler overlaps collectives with kernels, and simulates the result. A loop takes no time in the computation that
it is in, so each computation counts as often as it runs.
"""

from __future__ import annotations

import re

from lingvo_moe.analysis.hlo import Module

# The text of XLA's `ScheduleProto`, of which no Python package has the definition: the module, then the schedules.
_COMPUTATION = re.compile(r'^  computations \{\n    name: "([^"]+)".*?^    id: (\d+)$', re.MULTILINE | re.DOTALL)
_SCHEDULES = "\ncomputation_schedules {\n"
_IDENTITY = re.compile(r"^  computation_id: (\d+)$", re.MULTILINE)
_CYCLES = re.compile(r"^    total_cycles: (\S+)$", re.MULTILINE)
_CYCLES_PER_MICROSECOND = re.compile(r"^  cycles_per_microsecond: (\S+)$", re.MULTILINE)


def seconds(text: str, module: Module) -> float:
    """Returns the seconds of one run of a module.

    Args:
      text: that `--xla_dump_latency_hiding_schedule` writes.
      module: the compiled one.

    Raises:
      ValueError: the text is not the schedule of the module.
    """
    described, *schedules = text.split(_SCHEDULES)
    names = {identity: name for name, identity in _COMPUTATION.findall(described)}
    runs = {module.computation_of(instruction): times for instruction, times in module.runs()}
    total = 0.0
    for schedule in schedules:
        identity, cycles, rate = (pattern.search(schedule) for pattern in (_IDENTITY, _CYCLES, _CYCLES_PER_MICROSECOND))
        if not identity or not rate or names.get(identity[1]) not in module.computations:
            raise ValueError("the compiler's schedule is not that of the module")
        if cycles:  # the scheduler leaves out what takes no time
            total += float(cycles[1]) / float(rate[1]) / 1e6 * runs.get(names[identity[1]], 0)
    if not total:
        raise ValueError("the compiler's schedule has no times")
    return total
