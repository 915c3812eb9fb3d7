"""The setting of every test: eight virtual CPU devices, repeatable property tests, and bounded memory."""

from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

from lingvo_moe.cli import process_setup
from lingvo_moe.utils import allocator

# For this process and for the programs that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile many programs for the CPU and run few steps of each; this saves a third of the compiler's time.
# Partitioning is not affected. `tools.soak` runs optimised programs.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
# XLA's older code generator for CPUs takes a third less of what is left; one module of machine code, a fifth less than
# the 32 that are generated in parallel; the suite's two processes use both cores anyway. The last two flags do
# for TensorFlow's XLA, which runs the programs of a slice here, what the variable above does for JAX's.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)
# Processes, pytest's other workers included, share a cache of compiled programs; the user's own cache is not used.
# `make pytest` names one for all parts of the suite.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="lingvo_moe_cache_")
    os.environ["LINGVO_MOE_CACHE"] = os.environ.get("LINGVO_MOE_TEST_CACHE", _CACHE.name)

import jax
from jax.experimental.compilation_cache import compilation_cache

gc.disable()  # while modules are imported, which leave hardly any garbage; see `pytest_collection_finish`
# JAX fixes its devices when it starts. Starting it here gives enough for every test; an engine takes the first 1, 2, 4
# or 8.
jax.config.update("jax_num_cpu_devices", 8)
# Compiling reads XLA_FLAGS, which are hidden from libtpu later.
jax.jit(lambda: 0)()

# More examples where a property is cheap: @settings(max_examples=...) on the test.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20, database=None)
hypothesis.settings.load_profile("repeatable")


_PEAKS = pytest.StashKey[list[float]]()
_RETURNED_AT = pytest.StashKey[float]()  # GB of this process when freed memory was last returned


def pytest_addoption(parser: pytest.Parser):
    """Adds the option `--part`, and the setting it reads."""
    parser.addini("large_memory", "test files of which each is a part of its own", type="paths")
    parser.addoption(
        "--part",
        metavar="I/N",
        help="run the I-th of N parts of the test files; compilers never return some of their memory, so the suite "
        "runs in several pytest processes.",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores the test files of other parts."""
    part = config.getoption("--part")
    if part is None or not collection_path.name.endswith("_test.py"):
        return None
    index, count = map(int, part.split("/"))
    large = config.getini("large_memory")
    if count <= len(large):
        raise pytest.UsageError(
            f"--part={part}: expected more than {len(large)} parts, see large_memory in pytest.ini."
        )
    if collection_path in large:
        return None if large.index(collection_path) == index - 1 else True
    files = {path for top in config.getini("testpaths") for path in (config.rootpath / top).rglob("*_test.py")}
    others = sorted(files.difference(large))
    return None if len(large) + others.index(collection_path) % (count - len(large)) == index - 1 else True


def pytest_sessionfinish(session: pytest.Session):
    """Reports this worker's peak memory to pytest's main process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_gb"] = _peak_gb()


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Collects the peak memory of a worker."""
    node.config.stash.setdefault(_PEAKS, []).append(getattr(node, "workeroutput", {}).get("peak_gb", 0.0))


def pytest_terminal_summary(terminalreporter, config: pytest.Config):
    """Prints the part, and the peak memory of the workers, or of this process if it has none."""
    peaks = ", ".join(f"{peak:.1f}" for peak in config.stash.get(_PEAKS, []) or [_peak_gb()])
    terminalreporter.write_line(f"part {config.getoption('--part') or '1/1'}, peak memory: {peaks} GB")


def pytest_sessionstart(session: pytest.Session):
    """Sets this process up as the command line does; after pytest has installed hooks of its own."""
    process_setup.set_up_process()


def pytest_collection_finish(session: pytest.Session):
    """Collects garbage from here on, and never looks for it among the objects of the imported modules."""
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item):
    """Returns what a test's compilers freed when the process has grown: one file compiles programs of many GB."""
    if _resident_gb() > item.config.stash.get(_RETURNED_AT, 0.0) + 0.2:
        _return_freed_memory(item.config)


def _resident_gb() -> float:
    if sys.platform != "linux":
        return 0.0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


def _return_freed_memory(config: pytest.Config):
    """Gives freed memory back to the system: the C library keeps it, and the process rarely uses it again."""
    gc.collect()  # lowered graphs are cycles, which Python leaves for long
    allocator.return_freed_memory()
    config.stash[_RETURNED_AT] = _resident_gb()


@pytest.fixture(scope="module", autouse=True)
def drop_compiled_programs(request):
    """Drops a file's compiled programs when it ends; the programs of the whole suite would take twenty gigabytes."""
    with pytest.MonkeyPatch.context() as patch:
        # Tests run many programs and few steps of each, so freed memory is not used again.
        patch.setattr(allocator, "keep_freed_memory", lambda: None)
        yield
    for function in vars(request.module).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    jax.clear_caches()
    # A file that uses the cache of programs, as `testing.experiments.compile_once` and commands do, sets it again.
    if program_cache := sys.modules.get("lingvo_moe.program_cache"):
        program_cache.use(program_cache.OFF)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    _return_freed_memory(request.config)


@pytest.fixture(scope="module", autouse=True)
def no_model_is_left_registered():
    """Fails the file that leaves a model of its own registered; tests of other files in its process walk over all."""
    yield
    registry = sys.modules.get("lingvo_moe.registry")
    names = registry.MODELS.names() if registry else ()
    left = [name for name in names if not registry.MODELS.get(name).__module__.startswith("params.")]
    assert not left, f"register {', '.join(left)} inside `with registry.MODELS.isolated():`"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small corpus of two synthetic languages and its tokenizers, `testing.experiments.Data`."""
    from lingvo_moe.testing import experiments

    return experiments.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> list[str]:
    """Returns the flags of a tiny model, which the command line trained for two steps."""
    from lingvo_moe.cli import main
    from lingvo_moe.testing import experiments

    flags = [*experiments.settings(), f"--tokenizers={data.tokenizers}", f"--logdir={tmp_path_factory.mktemp('log')}"]
    steps = ("--steps=2", "--set=training.evaluate_every=0")
    assert main.main(["lingvo_moe", "train", *flags, f"--corpus={data.corpus}", *steps]) == 0
    return flags


@pytest.fixture(scope="module")
def compiled_once():
    """Compiles each program of a file once: `pytest.mark.usefixtures("compiled_once")`."""
    from lingvo_moe.testing import experiments

    with pytest.MonkeyPatch.context() as patch:
        experiments.compile_once(patch)
        yield
