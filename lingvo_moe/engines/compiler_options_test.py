"""Options of XLA's compilers reach the compiler; one that it refuses is an error before the long work."""

from __future__ import annotations

import pytest

from lingvo_moe.engines import compilation, compiler_options
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh

_OF_TPU, _OF_GPU = "xla_tpu_run_space_to_batch=false", "xla_gpu_enable_latency_hiding_scheduler=false"


def test_options_are_named_values():
    """XLA's own options need booleans, libtpu's take both; the last value of a name counts."""
    found = compiler_options.parse([_OF_TPU, "a=1", "b=true", "a=x=y"])
    assert found == {"xla_tpu_run_space_to_batch": False, "a": "x=y", "b": True}


@pytest.mark.parametrize("option", ["", "a", "a=", "=1", "--a=1", "a b=1"])
def test_another_form_is_an_error(option):
    with pytest.raises(UserError, match=f"^--compiler_option={option}: expected NAME=VALUE"):
        compiler_options.parse([option])


def test_options_replace_defaults_of_their_name():
    """A plan records each option once, so that its command can be repeated."""
    assert compiler_options.merge(["a=1", "b=2"], ["c=3", "a=4"]) == ("b=2", "c=3", "a=4")
    own = Cluster.of("h100:1x8").compiler_options
    assert own and Cluster.of("h100:1x8", own).compiler_options == own


def test_options_of_the_environment_are_recorded(monkeypatch):
    """XLA obeys them, so a plan that did not name them could not be made again; ours and the user's are stronger."""
    (own,) = Cluster.of("h100:1x8").compiler_options
    name = own.partition("=")[0]
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_a=1  --xla_gpu_enable_fast_min_max --{name}=false --{_OF_GPU}")
    found = Cluster.of("h100:1x8").compiler_options
    assert found == ("xla_gpu_enable_fast_min_max=true", _OF_GPU, own)
    assert Cluster.of("h100:1x8", [f"{name}=false"]).compiler_options[-1] == f"{name}=false"


def test_options_of_libtpu_s_environment_are_recorded(monkeypatch):
    """libtpu obeys them, but no compilation takes the flags of all of libtpu; ours and the user's are stronger."""
    assert Slice.of("v6e:2x2").compiler_options == ()  # and libtpu, which reads the variable once, has started
    fusion, own = "xla_tpu_enable_async_collective_fusion", "xla_tpu_offload_gather_to_sparsecore=true"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_jf_dump_to=/tmp  --{_OF_TPU} --no{fusion} --{own} --megascale_x=1")
    found = Slice.of("v6e:2x2").compiler_options
    assert found == (_OF_TPU, f"{fusion}=false")
    assert Slice.of("v6e:2x2", [f"{fusion}=true", own]).compiler_options == (_OF_TPU, f"{fusion}=true", own)


@pytest.mark.parametrize(
    ("make", "target", "good", "bad", "reason"),
    [
        (Slice.of, "v3:2x2x1", _OF_TPU, "xla_tpu_none=1", "No such compile option: 'xla_tpu_none'"),
        (Slice.of, "v3:2x2x1", _OF_TPU, "xla_tpu_run_space_to_batch=maybe", "Failed to parse 'maybe'"),
        (Cluster.of, "h100:1x8", _OF_GPU, _OF_TPU, "No such compile option"),
    ],
)
def test_the_compiler_of_the_target_is_asked(make, target, good, bad, reason):
    """With the option, the target and the compiler's reason in the error; XLA_FLAGS do not disturb libtpu."""
    assert make(target, [good]).compiler_options[-1:] == (good,)
    with pytest.raises(UserError, match=f"^--compiler_option={bad}: the compiler for {target} refuses it: {reason}"):
        make(target, [good, bad])


def test_a_program_is_compiled_with_the_options(monkeypatch):
    """They come after a slice's own, and a slice with more memory keeps them."""
    given = []
    monkeypatch.setattr(compilation, "compile_program", lambda program, mesh, options: given.append(options))
    of_slice = "xla_tpu_offload_gather_to_sparsecore=true"
    target = Slice.of("v6e:2x2", [of_slice])
    more = target.with_more_memory()
    assert more is not None and more.name == "v5p:2x2x1" and more.compiler_options == (of_slice,)
    program = Program("p", DeviceMesh((4,)), (), (), (), b"")
    target.compile(program)
    assert given[0]["xla_tpu_offload_gather_to_sparsecore"] is True and len(given[0]) > 1
