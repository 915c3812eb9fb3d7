"""A run of one process answers every question of a process group by itself."""

from __future__ import annotations

from lingvo_moe.distributed.process_group import ProcessGroup


def test_one_process_agrees_with_itself(tmp_path):
    """The training loop calls the same methods for one process and for many."""
    group = ProcessGroup()
    assert group.is_primary and group.broadcast(lambda: 7) == 7 and group.gather(7) == [7]
    assert group.any(True) and not group.any(False)
    group.require_same({"a": "1"})
    group.require_shared(tmp_path)
    group.finish()
    assert group.finished and not list(tmp_path.iterdir())
