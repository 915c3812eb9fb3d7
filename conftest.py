"""What every test runs under: eight virtual CPU devices, and property tests that draw the same examples every time."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile

import hypothesis
import pytest

from lingvo_moe.cli import process_setup

# For this process and for the programs that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
# What those compile, the next ones find, and those of pytest's other workers; the user's own cache stays as it is.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="lingvo_moe_cache_")
    os.environ["LINGVO_MOE_CACHE"] = _CACHE.name

import jax
from jax.experimental.compilation_cache import compilation_cache

# JAX fixes its devices when it starts. Started here, it has enough for every test, whichever comes first; an engine
# takes the first 1, 2, 4 or 8.
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()

# More examples where a property is cheap: @settings(max_examples=...) on the test.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_sessionstart(session):
    """Sets this process up as the command line does; after pytest has installed hooks of its own."""
    process_setup.set_up_process()


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped(request):
    """A file's programs are not another's: kept to the end of the run, all of them together took twenty gigabytes."""
    with pytest.MonkeyPatch.context() as patch:
        # Tests run many programs and few steps of each, so freed memory is not used again.
        patch.setattr(process_setup, "keep_freed_memory", lambda: None)
        yield
    for function in vars(request.module).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    jax.clear_caches()
    # A file that uses the cache of programs, as `testing.experiments.compile_once` and commands do, sets it again.
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    gc.collect()
    # What compilers took for a moment, the C library keeps for the process, and most of it is never used again.
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
