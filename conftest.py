"""What every test runs under: eight virtual CPU devices, and property tests that draw the same examples every time."""

from __future__ import annotations

import gc
import os

import hypothesis
import pytest

# For this process and for the programs that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402  (reads the variable above)

# JAX fixes its devices when it starts. Started here, it has enough for every test, whichever comes first; an engine
# takes the first 1, 2, 4 or 8.
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()

# More examples where a property is cheap: @settings(max_examples=...) on the test.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped():
    """A file's programs are not another's: kept to the end of the run, all of them together took ten gigabytes."""
    yield
    jax.clear_caches()
    gc.collect()
