"""The processor of this machine, as Linux describes it; on other systems nothing is known of it."""

from __future__ import annotations

import functools
import pathlib

# Instructions that multiply bfloat16 and add in float32, at twice the rate of float32 or more.
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
_DESCRIPTION = pathlib.Path("/proc/cpuinfo")


@functools.cache
def description() -> dict[str, str]:
    """Returns what the system says of the first core, by field: `model name`, `flags` and others."""
    if not _DESCRIPTION.exists():
        return {}
    lines = _DESCRIPTION.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def name() -> str:
    """Returns the name of the processor, or `unknown`."""
    return description().get("model name", "unknown")


def vector_flags() -> tuple[str, ...]:
    """Returns the flags of instructions on vectors and matrices that speed depends on: AVX, FMA, AMX."""
    return tuple(flag for flag in description().get("flags", "").split() if flag.startswith(("avx", "fma", "amx")))


def multiplies_bfloat16() -> bool:
    """Returns whether the processor has instructions that multiply bfloat16 faster than float32."""
    return any(flag in vector_flags() for flag in BFLOAT16_FLAGS)
