"""What no compiler can make is refused before it is asked, and each kind of machine has its own executables."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from lingvo_moe.engines import compilation
from lingvo_moe.errors import UserError
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

GRID = Layout.of(DeviceMesh((4, 2)))


def _same(rows: int) -> Program:
    """Returns a program that returns its input."""
    return harness.lower_for(dict, {"batch": {"x": np.ones((rows, 8), np.float32)}}, GRID, {"batch/x": "BM"})


@pytest.fixture
def restored_cache() -> Iterator[None]:
    """Restores JAX's settings of the cache of executables."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("restored_cache")
def test_each_number_of_cores_has_its_own_executables(monkeypatch, tmp_path):
    """XLA divides work among threads when it compiles: on other cores an executable sums in another order."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("the system does not report the cores of a process")
    directories = []
    for cores in ({0}, {0, 1}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: cores)
        compilation.use_compilation_cache(tmp_path)
        directories.append(jax.config.jax_compilation_cache_dir)
    assert directories[0] != directories[1] == directories[2]


def test_windowed_einsums_by_xla_are_refused_where_it_does_not_make_them():
    """Not compiled as if nothing had been asked for."""
    program = _same(rows=8)
    with pytest.raises(UserError, match="test has windowed_einsum_mib=0: .*only on TPUs, and this is a cpu.*mib=-1"):
        harness.engine(GRID).compile(dataclasses.replace(program, windowed_einsum_mib=0))


def test_devices_that_do_not_divide_the_batch_are_an_error():
    with pytest.raises(UserError, match=r"batch/x \[6, 8\] has a dimension of 6, which mesh axis x of 4 devices"):
        harness.engine(GRID).compile(_same(rows=6))
