"""What every test runs under: eight virtual CPU devices, and property tests that draw the same examples every time."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile

import hypothesis
import pytest

# For this process and for the programs that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
# What those compile, the next ones find, and those of pytest's other workers; the user's own cache stays as it is.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="lingvo_moe_cache_")
    os.environ["LINGVO_MOE_CACHE"] = _CACHE.name

import jax  # noqa: E402  (reads a variable above)
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

# JAX fixes its devices when it starts. Started here, it has enough for every test, whichever comes first; an engine
# takes the first 1, 2, 4 or 8.
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()

# More examples where a property is cheap: @settings(max_examples=...) on the test.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_sessionstart(session):
    """Sets this process up as the command line does; after pytest has installed hooks of its own."""
    from lingvo_moe.cli import process_setup

    process_setup.set_up_process()


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped(request):
    """A file's programs are not another's: kept to the end of the run, all of them together took twenty gigabytes."""
    with pytest.MonkeyPatch.context() as patch:
        if engine := sys.modules.get("lingvo_moe.engines.pjrt"):
            # Many programs, and few steps of each: what is freed is not used again.
            patch.setattr(engine, "keep_freed_memory", lambda: None)
        yield
    for function in vars(request.module).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    jax.clear_caches()
    # A file that looks for programs in the cache, as `testing.experiments.compile_once` and commands do, says so itself.
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    gc.collect()
    # What compilers took for a moment, the C library keeps for the process, and most of it is never used again.
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
