"""The processor of this machine, as Linux describes it; on other systems nothing is known of it."""

from __future__ import annotations

import functools
import pathlib

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


def has_avx512_bf16() -> bool:
    """Returns whether the processor has AVX512-BF16, as have those with fast matmuls of float32 in 512 bits.

    Older ones with AVX-512 are slower, the more so as a cloud's core may be half of one.
    """
    return "avx512_bf16" in vector_flags()


def multiplies_bfloat16() -> bool:
    """Returns whether the processor multiplies bfloat16, with sums in float32, faster than float32.

    Those with AMX do, and AMD's with AVX512-BF16. On an Intel processor without AMX, a product with AVX512-BF16 takes
    longer than one of float32 (docs/performance.md).
    """
    flags = vector_flags()
    return "amx_bf16" in flags or ("avx512_bf16" in flags and description().get("vendor_id") == "AuthenticAMD")
