"""The allocator of a process: jemalloc where the system has it, and memory that is kept for the next step."""

from __future__ import annotations

import os
import sys

import pytest

from lingvo_moe.testing.processes import run_code
from lingvo_moe.utils import allocator

needs_jemalloc = pytest.mark.skipif(
    not allocator.preloading(), reason=f"needs {allocator.PACKAGE}, which tools/setup.sh installs"
)
_PAGE_FAULTS = """
import ctypes, resource, statistics, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: where huge pages are used, 8192 pages are 16
from lingvo_moe.utils import allocator
if sys.argv[1] == "keep":
    allocator.keep_freed_memory()
import jax
sums = jax.jit(lambda x: jax.lax.optimization_barrier(x * 2).reshape(-1, 8).sum(0))
value = jax.numpy.ones(2**23)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sums(value * 2).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(int(statistics.quantiles((faults() for _ in range(25)), n=4)[0]))
"""


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A directory with a library of that name; returns its path."""
    monkeypatch.setattr(allocator, "_DIRECTORIES", (str(tmp_path / "none"), str(tmp_path)))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    library = tmp_path / "libjemalloc.so.2"
    library.touch()
    return str(library)


@pytest.fixture
def started(monkeypatch):
    """The programs that were started in this process's place: path, arguments, environment."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    return calls


def _without_preloading() -> dict[str, str]:
    """Returns the variables of a process with the C library's allocator; `make` runs these tests with jemalloc."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def test_the_command_restarts_with_jemalloc(monkeypatch, installed, started):
    """With all of its arguments, those of Python included, and its environment; options of the user's stay."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-W", "error", "-m", "lingvo_moe", "train", "--steps=1"])
    monkeypatch.setenv("MALLOC_CONF", "narenas:1")
    allocator.use_jemalloc()
    [(path, arguments, environment)] = started
    assert path == arguments[0] == sys.executable
    assert arguments[1:] == ["-W", "error", "-m", "lingvo_moe", "train", "--steps=1"]
    assert environment == {**os.environ, "LD_PRELOAD": installed, "MALLOC_CONF": "narenas:1"}


@pytest.mark.parametrize("chosen", ["", "libtcmalloc.so.4"])
def test_an_allocator_of_the_users_stays(monkeypatch, installed, started, chosen):
    """An empty value is a choice, too; and a process is restarted only once."""
    monkeypatch.setenv("LD_PRELOAD", chosen)
    allocator.use_jemalloc()
    assert not started and not allocator.is_missing()


def test_a_program_from_standard_input_is_not_restarted(monkeypatch, installed, started):
    """It has been read already."""
    monkeypatch.setattr(sys, "argv", ["-", "train"])
    allocator.use_jemalloc()
    assert not started


def test_without_jemalloc_the_command_continues(monkeypatch, installed, started):
    os.remove(installed)
    allocator.use_jemalloc()
    assert not started and allocator.preloading() == {} and allocator.is_missing()


@needs_jemalloc
def test_a_started_process_has_jemalloc():
    """The system's library is one that this interpreter can load, and the command sees its own arguments."""
    code = (
        "import ctypes, sys; from lingvo_moe.utils import allocator; allocator.use_jemalloc()\n"
        "print(hasattr(ctypes.CDLL(None), 'mallctl'), sys.argv[1:])"
    )
    process = run_code(code, "a b", "", environment=_without_preloading())
    assert (process.stdout, process.stderr) == ("True ['a b', '']\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("kept_by", ["keep", pytest.param("jemalloc", marks=needs_jemalloc)])
def test_program_called_again_reuses_its_memory(kept_by):
    """The pages of 32 MiB of temporaries, 8192 a call, are not allocated again; by default they are.

    The lower quartile counts: where the memory of the last call is not freed yet, the heap grows, and later calls reuse
    it; on a busy machine it grows in several calls. The program waits for the value of another one, so that it runs on
    a thread of JAX, which must use the heap of the others.
    """
    of_system = _without_preloading()
    environment = of_system | (allocator.preloading() if kept_by == "jemalloc" else {})
    kept = int(run_code(_PAGE_FAULTS, kept_by, environment=environment).stdout)
    default = int(run_code(_PAGE_FAULTS, "default", environment=of_system).stdout)
    assert kept < 1000 < 8192 <= default


_RESIDENT = """
import sys
from lingvo_moe.utils import allocator
if sys.argv[1] == "keep":
    allocator.keep_freed_memory()
import numpy
def megabytes():
    return next(int(line.split()[1]) // 1000 for line in open("/proc/self/status") if line.startswith("RssAnon"))
arrays = [numpy.ones(2**23, numpy.int8) for _ in range(32)]
small = bytes(9)  # above them in the heap
del arrays
kept = megabytes()
allocator.return_freed_memory()
print(kept - megabytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept_by", ["keep", pytest.param("jemalloc", marks=needs_jemalloc)])
def test_freed_memory_is_returned(kept_by):
    """Most of 268 MB of arrays that are gone, which the process would keep."""
    environment = _without_preloading() | (allocator.preloading() if kept_by == "jemalloc" else {})
    assert 200 < int(run_code(_RESIDENT, kept_by, environment=environment).stdout) < 300
