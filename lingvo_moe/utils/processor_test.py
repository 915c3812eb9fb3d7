"""What Linux says of a processor is read by field, and an unknown one has neither name nor instructions."""

from __future__ import annotations

import pytest

from lingvo_moe.utils import processor

_TWO_CORES = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: A Processor: 16 cores
flags\t\t: fpu sse2 fma avx2 avx512_bf16

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


@pytest.fixture(autouse=True)
def described(tmp_path, monkeypatch):
    """Describes the processor in a file of the test's own."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "_DESCRIPTION", file)
    processor.description.cache_clear()
    yield file.write_text
    processor.description.cache_clear()


def test_the_first_core_is_described(described):
    """A colon in a value stays, other cores are not read."""
    described(_TWO_CORES)
    assert processor.name() == "A Processor: 16 cores"
    assert processor.vector_flags() == ("fma", "avx2", "avx512_bf16")
    assert processor.multiplies_bfloat16() and processor.has_avx512_bf16()


@pytest.mark.parametrize(
    "vendor, flags, faster",
    [
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_tile", True),
        ("GenuineIntel", "avx512f avx512_bf16", False),  # as where a virtual machine hides AMX
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx512f avx512_vnni", False),
    ],
)
def test_processors_whose_bfloat16_products_are_faster(described, vendor, flags, faster):
    """AVX-512 alone has none, and Intel's AVX512-BF16 gains nothing."""
    described(f"vendor_id: {vendor}\nmodel name: x\nflags: {flags}\n")
    assert processor.multiplies_bfloat16() == faster
    assert processor.has_avx512_bf16() == ("avx512_bf16" in flags)


def test_a_system_that_describes_no_processor():
    """Nothing is assumed."""
    assert (processor.name(), processor.vector_flags()) == ("unknown", ())
    assert not processor.multiplies_bfloat16() and not processor.has_avx512_bf16()
