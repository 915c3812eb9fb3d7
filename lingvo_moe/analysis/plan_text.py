"""A plan as text for people; every figure says whose it is: [c] the compiler's, [p] the program's own sizes, [m] our model's."""

from __future__ import annotations

from collections.abc import Iterator

from lingvo_moe.analysis.hardware import GENERATIONS
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.analysis.search import Trial

_GIB = 2**30
_WORTH_A_LINE = 0.005
_LEGEND = "[c] the TPU compiler's figure   [p] counted from the program's inputs   [m] our model of the links"


def text(plan: Plan, tokens: float) -> str:
    """Renders a plan; `tokens` are of the training run whose cost is asked for."""
    return (
        "\n".join([*_title(plan), "", *_memory(plan), *(_time(plan, tokens) if plan.fits else ()), "", _LEGEND]) + "\n"
    )


def trial(tried: Trial) -> str:
    """One line of a search."""
    label = " ".join(tried.changes) or "as it is"
    if tried.plan is None:
        return f"{label:44} refused: {tried.refusal}"
    memory, plan = tried.plan.memory, tried.plan
    if not plan.fits:
        return f"{label:44} does not fit: {memory.needed / _GIB:.2f} of {memory.available / _GIB:.2f} GiB [c]"
    again = plan.rematerialised_cycles / plan.cycles
    return (
        f"{label:44} {memory.total / _GIB:6.2f} GiB [c]  {plan.step_seconds:8.3f} s/step  {tried.tokens_per_second:14,.0f} "
        f"tokens/s [c, m]  {again:4.0%} again"
    )


def _title(plan: Plan) -> Iterator[str]:
    yield (
        f"{plan.model}: {plan.weights:,} weights, program {plan.program}, on {plan.topology}, {plan.cores} cores, "
        f"mesh {plan.mesh}"
    )
    yield f"traced and lowered in {plan.lower_seconds:.0f} s, compiled in {plan.compile_seconds:.0f} s"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield "memory per core, GiB"
    for label, size, whose in (
        ("replicated weights", memory.replicated_weights, "p"),
        ("distributed weights", memory.distributed_weights, "p"),
        ("optimizer state", memory.optimizer_state, "p"),
        ("inputs", memory.inputs, "p"),
        ("activations, gradients, buffers", memory.temporaries, "c"),
    ):
        if size is not None:
            yield f"  {label:34}{size / _GIB:8.2f} [{whose}]"
    if plan.fits:
        yield f"  {'total':34}{memory.total / _GIB:8.2f}"
        return
    yield f"  DOES NOT FIT: the compiler asks for {memory.needed / _GIB:.2f} of {memory.available / _GIB:.2f} GiB [c]."
    yield (
        "  The largest buffers, as compiled for cores with more memory:"
        if plan.largest_buffers
        else "  The largest buffers are not known: no TPU's cores have enough memory to compile it for."
    )
    for buffer in plan.largest_buffers:
        yield f"    {buffer.bytes / _GIB:8.2f} [c]  {buffer.shape:28} {buffer.op_name.rpartition('call_exported/')[2]}"
    yield "  What helps: a smaller --set input.batch_size=..., --set model.remat=full, --set model.activation_dtype=bfloat16,"
    yield "  --set layout=gshard_sharded_update or a mesh of two axes (--mesh=AxB), which cut replicated weights as well, or a"
    yield "  slice of more cores. --search=remat,mesh,groups,batch tries some."


def _time(plan: Plan, tokens: float) -> Iterator[str]:
    yield ""
    yield "exchanges between cores, of one run" + (
        f" ({plan.unknown_loops} loops of unknown length counted once)" if plan.unknown_loops else ""
    )
    for collective in plan.collectives:
        yield (
            f"  {collective.kind:20}among {collective.group:5}{collective.runs:7} x [c]{collective.bytes / 2**20:11,.1f} MiB [c]"
            f"{collective.seconds * 1e3:9.2f} ms [m]"
        )
    if not plan.collectives:
        yield "  none"
    yield ""
    if plan.compute_seconds is None:
        yield f"compute: {plan.cycles:,} cycles [c]; the clock of this generation is not published"
        return
    yield "time of one run"
    again = (
        f", {plan.rematerialised_cycles / plan.cycles:.0%} of it rematerialisation"
        if plan.rematerialised_cycles
        else ""
    )
    generation = GENERATIONS[plan.topology.partition(":")[0]]
    yield f"  compute         {plan.compute_seconds:8.3f} s [c] at {generation.clock / 1e6:.0f} MHz{again}"
    for part, cycles in sorted(plan.cycles_by_part.items(), key=lambda item: -item[1]):
        if cycles / plan.cycles >= _WORTH_A_LINE:
            yield f"    {part:20}{cycles / plan.cycles:6.0%} [c]"
    yield f"  exchanges       {plan.collective_seconds:8.3f} s [m] at {generation.link_bandwidth / 1e9:.0f} GB/s a link, none hidden"
    yield f"  together        {plan.step_seconds:8.3f} s"
    yield f"  tokens/s        {plan.tokens / plan.step_seconds:12,.0f}"
    if plan.program == "train":
        yield f"  utilisation     {plan.utilisation:8.1%} of the cores' peak, rematerialisation and empty places not counted"
        days = tokens / plan.tokens * plan.step_seconds / 86400
        yield f"  {tokens:.3g} tokens    {plan.core_years(tokens):,.2f} core-years, {days:,.1f} days"
    yield f"  (clock and links: {generation.source})"
