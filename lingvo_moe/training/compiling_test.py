"""What takes a minute without output is announced, and what the program cache has is not."""

from __future__ import annotations

import logging
import time

import pytest

from lingvo_moe import experiment, lazy
from lingvo_moe.cli import logging_setup
from lingvo_moe.training import compiling

CONFIG = experiment.get("m4.Quickstart")
DEVICES = f"{CONFIG.mesh.size} cpu device(s), mesh {CONFIG.mesh}"
LINE = f"compiling it, {CONFIG.model.num_weights():,} weights, for {DEVICES} ..."


@pytest.mark.parametrize("after, takes, said", [(0.0, 0.0, True), (0.05, 0.2, True), (5.0, 0.0, False)])
def test_what_takes_longer_is_announced(caplog, after, takes, said):
    """While it is compiled, and at its end; a program of the cache says neither."""
    with caplog.at_level(logging.INFO):
        with compiling.announced("it", CONFIG, "cpu", after):
            time.sleep(takes)
            assert caplog.messages == [LINE] * said
        assert caplog.messages[1:] == ["compiled in 0 s"] * said


def test_what_cannot_be_compiled_is_not_said_to_be(caplog):
    with caplog.at_level(logging.INFO):
        with pytest.raises(ValueError), compiling.announced("it", CONFIG, "cpu"):
            raise ValueError
        with pytest.raises(ValueError), compiling.announced("it", CONFIG, "cpu", after=5.0):
            raise ValueError
        assert caplog.messages == [LINE]


def test_the_line_is_not_lost_while_tensorflow_is_imported(capfd):
    """The import discards what any thread writes to standard error, and comes first in most commands."""
    with logging_setup.plain_lines(), compiling.announced("it", CONFIG, "cpu", after=0.05):
        with lazy.deferred_stderr():
            time.sleep(0.2)
        time.sleep(0.1)
    assert capfd.readouterr().err == f"{LINE}\ncompiled in 0 s\n"
