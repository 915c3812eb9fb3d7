"""The roofline of kernels, counted by hand from modules in XLA's notation for GPUs."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis import roofline
from lingvo_moe.analysis.hardware import GENERATIONS
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.engines.cluster import GPUS

H100 = GPUS["h100"]
MODULE = """HloModule jit_step, is_scheduled=true

%gemm_computation (p0: bf16[4096,1024], p1: bf16[1024,8192]) -> bf16[4096,8192] {
  %p0 = bf16[4096,1024]{1,0} parameter(0)
  %p1 = bf16[1024,8192]{1,0} parameter(1)
  %dot.1 = f32[4096,8192]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %convert.1 = bf16[4096,8192]{1,0} convert(%dot.1)
}

%slice_computation (p2: f32[18,1024,8192], p3: s32[]) -> bf16[1024,8192] {
  %p2 = f32[18,1024,8192]{2,1,0} parameter(0)
  %p3 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice.1 = f32[1,1024,8192]{2,1,0} dynamic-slice(%p2, %p3, %zero, %zero), dynamic_slice_sizes={1,1024,8192}
  %bitcast.1 = f32[1024,8192]{1,0} bitcast(%slice.1)
  ROOT %convert.2 = bf16[1024,8192]{1,0} convert(%bitcast.1)
}

%update_computation (p4: f32[18,4096], p5: f32[4096], p6: s32[]) -> (f32[18,4096], f32[]) {
  %p4 = f32[18,4096]{1,0} parameter(0)
  %p5 = f32[4096]{0} parameter(1)
  %p6 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %sum = f32[] reduce(%p5, %zero.1), dimensions={0}, to_apply=%add
  %bitcast.2 = f32[1,4096]{1,0} bitcast(%p5)
  %update = f32[18,4096]{1,0} dynamic-update-slice(%p4, %bitcast.2, %p6, %zero.1)
  ROOT %both = (f32[18,4096]{1,0}, f32[]) tuple(%update, %sum)
}

ENTRY %main (a: bf16[4096,1024], b: bf16[1024,8192]) -> f32[4096] {
  %a = bf16[4096,1024]{1,0} parameter(0)
  %b = bf16[1024,8192]{1,0} parameter(1)
  %c = f32[18,1024,8192]{2,1,0} parameter(2)
  %d = s32[] parameter(3)
  %e = f32[18,4096]{1,0} parameter(4)
  %f = f32[4096]{0} parameter(5)
  %gemm = bf16[4096,8192]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_computation
  %sliced = bf16[1024,8192]{1,0} fusion(%c, %d), kind=kLoop, calls=%slice_computation
  %updated = (f32[18,4096]{1,0}, f32[]) fusion(%e, %f, %d), kind=kInput, calls=%update_computation
  %float32 = f32[4096]{0} dot(%x, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %x = f32[4096,4096]{1,0} copy(%y)
  %y = f32[4096,4096]{0,1} transpose(%x), dimensions={1,0}
  %exact = f32[4096,4096]{1,0} dot(%x, %y), lhs_contracting_dims={1}, operand_precision={highest,highest}
  %rounded = f32[4096,4096]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %reduced = f32[4096]{0} all-reduce(%f), replica_groups={}, to_apply=%add
  %alone = f32[1,4096]{1,0} dynamic-slice(%e, %d, %d), dynamic_slice_sizes={1,4096}
  %library = (bf16[4096,8192]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}
  %library_exact = (f32[4096,4096]{1,0}, s8[64]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"]},"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}}
  %library_of_vector = (f32[4096]{0}, s8[4194304]{0}) custom-call(%x, %f), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %called = (f32[8]{0}, s8[64]{0}) custom-call(%f), custom_call_target="__cudnn$convForward"
  ROOT %copied = f32[4096]{0} copy(%f)
}
"""
BANDWIDTH = 3352e9
COMPUTED = {
    # 2 x 4096 x 8192 x 1024 operations; 92 MB would take 28 us.
    "gemm": 2 * 4096 * 8192 * 1024 / 989.4e12,
    # One layer's slice is read and written, rounded; the index is four bytes. The weights of all layers are not read.
    "sliced": (1024 * 8192 * 4 + 4 + 1024 * 8192 * 2) / BANDWIDTH,
    # The vector and the index are read, the vector is written to its place, and a sum.
    "updated": (4096 * 4 + 4 + 4096 * 4 + 4) / BANDWIDTH,
    # A vector times a matrix reads the matrix.
    "float32": (4096 * 4096 + 4096 + 4096) * 4 / BANDWIDTH,
    "exact": 2 * 4096**3 / 66.9e12,
    # cuBLAS makes the same products. The second element of the result is memory to work in, which is not counted.
    "library": 2 * 4096 * 8192 * 1024 / 989.4e12,
    "library_exact": 2 * 4096**3 / 66.9e12,
    "library_of_vector": (4096 * 4096 + 4096 + 4096) * 4 / BANDWIDTH,
    "rounded": 2 * 4096**3 / 494.7e12,
    "reduced": 0.0,  # the model of the links has it
    "alone": 2 * 4096 * 4 / BANDWIDTH,
    "copied": 2 * 4096 * 4 / BANDWIDTH,
    "a": 0.0,
}


@pytest.mark.parametrize("name", sorted(COMPUTED))
def test_seconds_are_those_counted_by_hand(name):
    module = Module(MODULE, 8)
    assert roofline.seconds(module, module.named(name), H100) == pytest.approx(COMPUTED[name], rel=1e-9)


def test_cycles_are_seconds_at_the_clock():
    module = Module(MODULE, 8)
    assert roofline.cycles(module, module.named("gemm"), H100) == pytest.approx(COMPUTED["gemm"] * 1.98e9, abs=1)


def test_a_library_call_is_not_counted_as_nothing():
    """The compiler without a GPU calls no library; if one does, its work must not be left out silently."""
    module = Module(MODULE, 8)
    with pytest.raises(ValueError, match="called calls a library whose work is not counted"):
        roofline.seconds(module, module.named("called"), H100)


# As the TPU's compiler writes products of M4's layers: a batch of matrices has a window that skips all but one of them.
TPU_MODULE = """HloModule jit_layers, is_scheduled=true

%logits (p0: bf16[16,128,16,128], p1: bf16[16,128,16,128]) -> f32[16,16,128,128] {
  %p0 = bf16[16,128,16,128]{3,1,2,0} parameter(0)
  %p1 = bf16[16,128,16,128]{3,1,2,0} parameter(1)
  ROOT %batch = f32[16,16,128,128]{2,3,1,0} convolution(%p0, %p1), window={size=16x16 stride=15x15 lhs_dilate=16x16}, \
dim_labels=0b1f_0o1i->01bf
}

ENTRY %main (a: bf16[16,128,1024], b: bf16[1024,8192,1]) -> f32[16,128,8192] {
  %a = bf16[16,128,1024]{2,1,0} parameter(0)
  %b = bf16[1024,8192,1]{1,0,2} parameter(1)
  %d = f32[2,1024,1024]{2,1,0} parameter(3)
  %e = f32[1024,2048,1]{1,0,2} parameter(4)
  %q = bf16[16,128,16,128]{3,1,2,0} parameter(5)
  %image = f32[8,64,64,32]{3,2,1,0} parameter(6)
  %kernel = f32[3,3,32,64]{3,2,1,0} parameter(7)
  %hidden = f32[16,128,8192]{2,1,0} convolution(%a, %b), window={size=1}, dim_labels=0bf_io0->0bf
  %scores = f32[16,16,128,128]{2,3,1,0} fusion(%q, %q), kind=kOutput, calls=%logits
  %gate = f32[2,1024,2048]{2,1,0} convolution(%d, %e), window={size=1}, \
dim_labels=0bf_io0->0bf, operand_precision={highest,highest}
  %padded = f32[8,64,64,64]{3,2,1,0} convolution(%image, %kernel), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_01io->b01f
  ROOT %unlabelled = f32[16,128,8192]{2,1,0} convolution(%a, %b), window={size=1}
}
"""
V3_PEAK, V3_BANDWIDTH = 61.5e12, 450e9
TPU_COMPUTED = {
    "hidden": 2 * 16 * 128 * 1024 * 8192 / V3_PEAK,
    # Logits of 16 rows and 16 heads, 128 queries and keys, heads of 128; 50 MB of operands and result take longer.
    "scores": (2 * 16 * 128 * 16 * 128 * 2 + 16 * 16 * 128 * 128 * 4) / V3_BANDWIDTH,
    # An exact product of float32 takes six passes.
    "gate": 6 * 2 * 2048 * 1024 * 2048 / V3_PEAK,
}


@pytest.mark.parametrize("name", sorted(TPU_COMPUTED))
def test_seconds_of_a_tpu_are_those_counted_by_hand(name):
    module = Module(TPU_MODULE, 8)
    found = roofline.seconds(module, module.named(name), GENERATIONS["v3"])
    assert found == pytest.approx(TPU_COMPUTED[name], rel=1e-9)


@pytest.mark.parametrize(
    "name, flops",
    [
        ("batch", 2 * 16 * 16 * 128 * 128 * 128),  # not 2 x 16 x 16 x (16 x 16) ...: the window covers one matrix
        ("padded", 2 * 8 * 32 * 64 * (3 * 64 - 2) ** 2),  # at a border two columns of the kernel are inside
    ],
)
def test_positions_without_input_are_not_counted(name, flops):
    """Padding and the holes of a dilation multiply nothing, and the compiler skips them."""
    module = Module(TPU_MODULE, 8)
    assert roofline._convolution_flops(module, module.named(name)) == flops


def test_a_convolution_that_cannot_be_read_is_not_counted_as_nothing():
    module = Module(TPU_MODULE, 8)
    with pytest.raises(ValueError, match="unlabelled is a convolution without dim_labels"):
        roofline.seconds(module, module.named("unlabelled"), GENERATIONS["v3"])
