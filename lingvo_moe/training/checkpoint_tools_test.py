"""What `verify` and `overview` find in valid and corrupt checkpoints."""

from __future__ import annotations

import errno
import os
import re

import numpy as np
import pytest
from orbax import checkpoint as orbax

from lingvo_moe.testing.checkpoints import (
    largest,
    save,
)
from lingvo_moe.training import checkpoint_manifest
from lingvo_moe.training import checkpoint_tools as tools
from lingvo_moe.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Checkpoints:
    """Steps 4, 8 and 12 of the small state."""
    return save(tmp_path_factory.mktemp("log"), 4, 8, 12)


def test_verify_names_files_and_arrays(tmp_path):
    """A missing file, and the array that cannot be read without it."""
    save(tmp_path, 8)
    checkpoints = Checkpoints(tmp_path)
    assert tools.verify(checkpoints, 8) == []
    data = largest(checkpoints.path(8), "theta/ocdbt.process_0/d/*")
    data.unlink()
    found = tools.verify(checkpoints, 8)
    assert found[0] == f"theta/ocdbt.process_0/d/{data.name} is missing"
    assert found[1].startswith("theta/expert/inner cannot be read")
    assert tools.overview(checkpoints, 8).problem == found[0]


@pytest.mark.parametrize(
    "module, name", [(checkpoint_manifest, "size"), (orbax.CompositeCheckpointHandler, "metadata")]
)
def test_overview_of_what_cannot_be_read_for_now(trained, monkeypatch, module, name):
    """A file server that has restarted is no problem of the checkpoint, and no error: the other steps are shown."""

    def fail(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "file")

    monkeypatch.setattr(module, name, fail)
    seen = tools.overview(trained, 8)
    assert re.fullmatch(r"cannot be read \(.*Stale file handle.*\)", seen.problem) and seen.bytes is None


def test_statistics_are_of_finite_values():
    """Others are counted."""
    found = tools.Statistics.of(np.array([[3.0, -4.0, np.nan], [np.inf, 0.0, 1.0]], np.float32))
    assert (found.mean, found.least, found.greatest, found.not_finite) == (0.0, -4.0, 3.0, 2)
    assert found.rms == pytest.approx(np.sqrt(26 / 4))
    nothing = tools.Statistics.of(np.full(3, np.nan, np.float32))
    assert np.isnan(nothing.mean) and nothing.not_finite == 3


def test_overview_of_a_corrupt_checkpoint(trained, tmp_path):
    """What cannot be read is None, and the problem is named."""
    seen = tools.overview(trained, 8)
    assert (seen.model, seen.weights, seen.problem, seen.origin) == ("tiny", 16 * 8 + 4 * 8 * 16, "", None)
    save(tmp_path, 8)
    (tmp_path / "checkpoints" / "8" / "meta" / "metadata").unlink()
    seen = tools.overview(Checkpoints(tmp_path), 8)
    assert (seen.model, seen.weights, seen.problem) == (None, None, "meta/metadata is missing")
