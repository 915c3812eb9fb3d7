"""The cache is where the user keeps caches."""

from __future__ import annotations

import pathlib

from lingvo_moe.utils import user_cache


def test_the_directory_is_that_of_the_specification(monkeypatch):
    """An empty variable counts as none."""
    monkeypatch.setenv("HOME", "/home/somebody")
    for value, expected in (("/somewhere", "/somewhere"), ("", "/home/somebody/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache.directory() == pathlib.Path(expected, "lingvo_moe")
