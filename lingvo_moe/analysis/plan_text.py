"""A plan as text. Every number is marked: [c] the compiler's, [p] from the program's inputs, [m] our model's."""

from __future__ import annotations

from collections.abc import Iterator

from lingvo_moe.analysis import remedies
from lingvo_moe.analysis.hardware import hardware_of
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.analysis.search import Trial
from lingvo_moe.engines.cluster import Gpu
from lingvo_moe.utils.counts import counted

_MIB, _GIB = 2**20, 2**30
_MIN_FRACTION = 0.005
_HOURS_PER_YEAR = 365.25 * 24
LEGEND = "[c] the compiler's number   [p] counted from the program's inputs   [m] our model   [c, m] of both"


def text(plan: Plan, tokens: float, price: float | None = None, sufficient: remedies.Sufficient | None = None) -> str:
    """Returns the text of a plan.

    Args:
      plan: of one program.
      tokens: the length of the training run whose cost it states.
      price: of a TPU chip or a GPU for an hour, in any currency.
      sufficient: what the program is predicted to fit, if it does not fit.
    """
    lines = [
        *_title(plan),
        LEGEND,
        "",
        *_memory(plan, sufficient),
        *(_time(plan, tokens, price) if plan.fits else ()),
    ]
    return "\n".join(lines) + "\n"


def size(count: float) -> str:
    """Returns bytes with two decimals and their unit: GiB, or MiB below one GiB."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.2f} MiB"


def duration(seconds: float) -> str:
    """Returns seconds, below 0.1 of them milliseconds, with the unit; the number is aligned in 8 columns."""
    return f"{seconds:8.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:8.2f} ms"


def trial(tried: Trial) -> str:
    """Returns one line of a search; LEGEND explains its marks."""
    label = " ".join(tried.changes) or "unchanged"
    if tried.plan is None:
        return f"{label:44} refused: {tried.refusal}"
    plan = tried.plan
    if not plan.fits:
        return f"{label:44} does not fit: {_needed(plan)} [c]"
    memory = f"{size(plan.memory.total):>11} per {plan.device} [c]"
    if plan.step_seconds is None or not plan.cycles:
        return f"{label:44} {memory}, time unknown"
    rematerialised = (plan.rematerialised_cycles or 0) / plan.cycles
    return (
        f"{label:44} {memory}  {duration(plan.step_seconds):>11}/step  "
        f"{tried.tokens_per_second:14,.0f} {plan.unit}/s [c, m]  {rematerialised:4.0%} rematerialised"
    )


def _title(plan: Plan) -> Iterator[str]:
    yield (
        f"{plan.model}: {plan.weights:,} weights, program {plan.program}, on {plan.topology}, "
        f"{plan.devices} {plan.device}s, mesh {plan.mesh}"
    )
    if plan.compiler_options:
        yield f"compiler options: {', '.join(plan.compiler_options)}"
    yield f"traced and lowered in {plan.lower_seconds:.0f} s, compiled in {plan.compile_seconds:.0f} s"


def _memory(plan: Plan, sufficient: remedies.Sufficient | None) -> Iterator[str]:
    memory = plan.memory
    yield f"memory per {plan.device}"
    for label, part, origin in (
        ("replicated weights", memory.replicated_weights, "p"),
        ("distributed weights", memory.distributed_weights, "p"),
        ("optimizer state", memory.optimizer_state, "p"),
        ("inputs", memory.inputs, "p"),
        ("activations, gradients, buffers", memory.temporaries, "c"),
    ):
        if part is not None:
            yield f"  {label:32}{size(part):>11} [{origin}]"
    if plan.fits:
        yield f"  {'total':32}{size(memory.total):>11}"
        return
    yield f"  DOES NOT FIT: the compiler needs {_needed(plan)} [c]."
    yield (
        f"  The largest buffers, as compiled for {plan.device}s with more memory:"
        if plan.largest_buffers
        else "  The largest buffers are not known: no TPU core has enough memory for the program."
    )
    for buffer in plan.largest_buffers:
        yield f"    {size(buffer.bytes):>11} [c]  {buffer.shape:28} {buffer.op_name.rpartition('call_exported/')[2]}"
    yield "  Remedies:"
    yield from (f"    {remedy}" for remedy in remedies.of(plan))
    if sufficient:
        estimate = sufficient.estimate
        yield (
            f"    the least that is predicted to fit: --topology={sufficient.topology} --mesh={sufficient.mesh}, "
            f"{estimate.bytes / _GIB:.2f} of {estimate.available / _GIB:.2f} GiB [m]"
        )
    if search := remedies.search_of(plan):
        yield f"    {search} tries some."


def _needed(plan: Plan) -> str:
    needed, available = plan.memory.needed or 0, plan.memory.available or 0
    return f"{needed / _GIB:.2f} of {available / _GIB:.2f} GiB"


def _time(plan: Plan, tokens: float, price: float | None) -> Iterator[str]:
    loops = counted(plan.unknown_loops, "loop")
    unknown = f" ({loops} of unknown trip count counted once)" if plan.unknown_loops else ""
    yield ""
    yield f"collectives of one run{unknown}"
    for collective in plan.collectives:
        yield (
            f"  {collective.kind:20}among {collective.group:5} {plan.device}s{collective.runs:7} x [c]"
            f"{collective.bytes / _MIB:11,.1f} MiB per {plan.device} [c]{collective.seconds * 1e3:9.2f} ms [m]"
        )
    if not plan.collectives:
        yield "  none"
    yield ""
    if plan.compute_seconds is None:
        yield f"compute: {plan.cycles:,} cycles [c]; the clock of this generation is not published"
    elif plan.cycles and plan.step_seconds is not None:
        yield from _step(plan, plan.cycles, plan.compute_seconds, plan.step_seconds)
        yield from _cost(plan, plan.step_seconds, tokens, price)
        yield f"  (clock and links: {hardware_of(plan.topology).source})"


def _step(plan: Plan, cycles: int, compute_seconds: float, step_seconds: float) -> Iterator[str]:
    hardware = hardware_of(plan.topology)
    if isinstance(hardware, Gpu):
        mark, how = "[m]", ", each kernel at the peak of matrix products or of memory"
        links = (
            f"NVLink of {hardware.nvlink_bandwidth / 1e9:.0f} GB/s and a network of "
            f"{hardware.network_bandwidth / 1e9:.0f} GB/s per GPU"
        )
    else:
        mark, how = "[c]", f" at {(hardware.clock or 0) / 1e6:.0f} MHz"
        links = f"{hardware.link_bandwidth / 1e9:.0f} GB/s per link"
    rematerialised, bubbles = (plan.rematerialised_cycles or 0) / cycles, plan.bubble_cycles / cycles
    yield "time of one run"
    yield (
        f"  compute         {duration(compute_seconds)} {mark}{how}"
        + (f", {rematerialised:.0%} of it rematerialisation" if rematerialised else "")
        + (f", {bubbles:.0%} bubbles" if bubbles else "")
    )
    for part, part_cycles in sorted(plan.cycles_by_part.items(), key=lambda item: -item[1]):
        if part_cycles / cycles >= _MIN_FRACTION:
            yield f"    {part:20}{part_cycles / cycles:6.0%} {mark}"
    yield f"  collectives     {duration(plan.collective_seconds)} [m] at {links}, without overlap"
    yield f"  total           {duration(step_seconds)}"
    if plan.scheduled_seconds is not None:
        yield (
            f"  schedule        {duration(plan.scheduled_seconds)} [c], collectives overlapped, at the compiler's "
            f"estimates"
        )


def _cost(plan: Plan, step_seconds: float, tokens: float, price: float | None) -> Iterator[str]:
    if plan.program == "decode":
        yield f"  {f'{plan.rows}/s':15} {plan.batch_size / step_seconds:12,.1f}"
        hours = plan.device_hours_per_million() or 0.0
        digits = 1 if hours >= 10 else 3
        yield f"  {f'10^6 {plan.rows}':15} {hours:12,.{digits}f} {plan.device}-hours{_priced(plan, hours, price)}"
        yield f"  (searches of the greatest length; a search ends when all of its {plan.rows} have ended)"
    else:
        yield f"  {plan.unit}/s        {plan.tokens_per_second or 0.0:12,.0f}"
        yield f"  utilisation     {plan.utilisation:8.1%} of the {plan.device}s' peak, rematerialisation not counted"
        days, years = tokens / plan.tokens * step_seconds / 86400, plan.device_years(tokens) or 0.0
        yield (
            f"  {tokens:.3g} {plan.unit}    {years:,.2f} {plan.device}-years, {days:,.1f} days"
            f"{_priced(plan, years * _HOURS_PER_YEAR, price)}"
        )


def _priced(plan: Plan, hours: float, price: float | None) -> str:
    """Returns what `hours` of one of the plan's devices cost; clouds have a price for a chip, not for its cores."""
    if price is None:
        return ""
    hardware = hardware_of(plan.topology)
    if isinstance(hardware, Gpu):
        return f", cost {hours * price:,.0f} at {price:g} per GPU-hour"
    cores = hardware.cores_per_chip
    unit = "chip-hour" if cores == 1 else f"chip-hour (a chip has {cores} cores)"
    return f", cost {hours / cores * price:,.0f} at {price:g} per {unit}"
