"""A plan as text for people; every figure says whose it is: [c] the compiler's, [p] the program's own sizes, [m] our model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lingvo_moe.analysis.hardware import GENERATIONS
from lingvo_moe.analysis.plan import Plan

_GIB = 2**30
_LEGEND = "[c] the TPU compiler's figure   [p] counted from the program's inputs   [m] our model of the links"


def text(plan: Plan, tokens: float, largest: Sequence[tuple[str, int]] = ()) -> str:
    """Renders a plan.

    Args:
      plan: the plan.
      tokens: of the training run whose cost is asked for.
      largest: (path, bytes per core) of the largest weights, named where the program does not fit.
    """
    return "\n".join([*_title(plan), "", *_memory(plan, largest), *(_time(plan, tokens) if plan.fits else ()), "", _LEGEND]) + "\n"


def _title(plan: Plan) -> Iterator[str]:
    yield (f"{plan.model}: {plan.weights:,} weights, program {plan.program}, on {plan.topology}, {plan.cores} cores, "
           f"mesh {plan.mesh}")
    yield f"traced and lowered in {plan.lower_seconds:.0f} s, compiled in {plan.compile_seconds:.0f} s"


def _memory(plan: Plan, largest: Sequence[tuple[str, int]]) -> Iterator[str]:
    memory = plan.memory
    yield "memory per core, GiB"
    for label, size, whose in (("replicated weights", memory.replicated_weights, "p"),
                               ("distributed weights", memory.distributed_weights, "p"),
                               ("optimizer slots", memory.slots, "p"), ("inputs", memory.inputs, "p"),
                               ("activations, gradients, buffers", memory.temporaries, "c")):
        if size is not None:
            yield f"  {label:34}{size / _GIB:8.2f} [{whose}]"
    if plan.fits:
        yield f"  {'total':34}{memory.total / _GIB:8.2f}"
        return
    yield (f"  DOES NOT FIT: the compiler needs {memory.needed / _GIB:.2f} of {memory.available / _GIB:.2f} [c] beside what is "
           f"given to the program. The largest weights, with gradients as large again:")
    for path, size in largest:
        yield f"    {path:40}{size / _GIB:8.2f} [p]"
    yield "  What helps: a smaller --set input.batch_size=..., --set model.remat=full, --set model.activation_dtype=bfloat16,"
    yield "  a slice of more cores, or a mesh of two axes (--mesh=AxB), which cuts the replicated weights as well."


def _time(plan: Plan, tokens: float) -> Iterator[str]:
    yield ""
    yield "exchanges between cores, of one run" + (
        f" ({plan.unknown_loops} loops of unknown length counted once)" if plan.unknown_loops else "")
    for exchange in plan.exchanges:
        yield (f"  {exchange.kind:20}among {exchange.group:5}{exchange.runs:7} x [c]{exchange.bytes / 2**20:11,.1f} MiB [c]"
               f"{exchange.seconds * 1e3:9.2f} ms [m]")
    if not plan.exchanges:
        yield "  none"
    yield ""
    if plan.compute_seconds is None:
        yield f"compute: {plan.cycles:,} cycles [c]; the clock of this generation is not published"
        return
    yield "time of one run"
    again = f", {plan.rematerialised_cycles / plan.cycles:.0%} of it rematerialisation" if plan.rematerialised_cycles else ""
    for part, cycles in sorted(plan.cycles_by_part.items(), key=lambda item: -item[1]):
        if cycles:
            yield f"    {part:16}{cycles / plan.cycles:8.0%}"
    generation = GENERATIONS[plan.topology.partition(":")[0]]
    yield f"  compute         {plan.compute_seconds:8.3f} s [c] at {generation.clock / 1e6:.0f} MHz{again}"
    yield f"  exchanges       {plan.exchange_seconds:8.3f} s [m] at {generation.link_bandwidth / 1e9:.0f} GB/s a link, none hidden"
    yield f"  together        {plan.step_seconds:8.3f} s"
    yield f"  tokens/s        {plan.tokens / plan.step_seconds:12,.0f}"
    if plan.program == "train":
        yield f"  utilisation     {plan.utilisation:8.1%} of the cores' peak, rematerialisation and empty places not counted"
        days = tokens / plan.tokens * plan.step_seconds / 86400
        yield f"  {tokens:.3g} tokens    {plan.core_years(tokens):,.2f} core-years, {days:,.1f} days"
    yield f"  (clock and links: {generation.source})"
