"""A replay is restored as it was saved, written completely or not at all, and no other file is accepted as one."""

from __future__ import annotations

import errno
import math
import os
import pathlib

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.training import replay
from lingvo_moe.training.replay import Replay

SPECS = {"target": dict.fromkeys(("ids", "labels"), Spec((2, 3), "int32", "BT"))}


def a_replay(step: int = 7) -> Replay:
    batch = {"target": {name: np.arange(6, dtype=np.int32).reshape(2, 3) + step for name in ("ids", "labels")}}
    return Replay("tiny", step, (0, 3), 9, math.nan, math.inf, batch, path="x")


def test_replay_round_trip(tmp_path):
    path = replay.path_of(tmp_path, 7)
    a_replay().save(path)
    found = Replay.load(path)
    assert path == tmp_path / "replay" / "7.npz" and os.listdir(path.parent) == ["7.npz"]
    assert (found.model, found.step, found.seed, found.checkpoint) == ("tiny", 7, (0, 3), 9)
    assert math.isnan(found.loss) and found.gradient_norm == math.inf
    for name, array in a_replay().batch["target"].items():
        np.testing.assert_array_equal(found.batch["target"][name], array)
    found.check_model("tiny")
    found.check_shapes(SPECS)


def test_a_full_disk_leaves_the_previous_file_and_no_partial_one(tmp_path, monkeypatch):
    path = replay.path_of(tmp_path, 7)
    a_replay(7).save(path)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        a_replay(8).save(path)
    assert os.listdir(path.parent) == ["7.npz"] and Replay.load(path).step == 7


def cut(path: pathlib.Path):
    path.write_bytes(path.read_bytes()[:-100])


def turn_a_bit(path: pathlib.Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (pathlib.Path.unlink, r"cannot be read \(No such file or directory\)"),
        (cut, "corrupt, or not a batch that training saved"),
        (turn_a_bit, "corrupt, or not a batch that training saved"),
        (lambda path: path.write_text("de\tx\n"), "corrupt, or not a batch that training saved"),
        (lambda path: path.write_bytes(b""), "corrupt, or not a batch that training saved"),
        (lambda path: np.savez(path, weights=np.ones(3)), "corrupt, or not a batch that training saved"),
        (
            lambda path: np.savez(path, about='{"format": "lingvo_moe replay", "version": 2}'),
            "version 2; this program reads",
        ),
        (lambda path: np.savez(path, about='{"format": "lingvo_moe replay", "version": 1}'), "corrupt, or not a batch"),
        (lambda path: np.savez(path, about=np.array({}, dtype=object)), "corrupt, or not a batch that training saved"),
    ],
)
def test_other_files_are_refused(tmp_path, harm, message):
    path = replay.path_of(tmp_path, 7)
    a_replay().save(path)
    harm(path)
    with pytest.raises(UserError, match=f"--batch={path}.*{message}"):
        Replay.load(path)


def test_a_corrupt_byte_is_an_error_or_harmless(tmp_path):
    """One line, whichever byte it is and whatever zipfile makes of it, such as a file that seems to be encrypted."""
    path = replay.path_of(tmp_path, 7)
    a_replay().save(path)
    content = path.read_bytes()
    for position in range(len(content)):
        for flipped in (0x01, 0xFF):
            path.write_bytes(content[:position] + bytes([content[position] ^ flipped]) + content[position + 1 :])
            try:
                found = Replay.load(path)
                found.check_shapes(SPECS)
            except UserError as error:
                assert str(path) in str(error)
            else:
                np.testing.assert_array_equal(found.batch["target"]["ids"], a_replay().batch["target"]["ids"])


def test_batches_of_another_model_or_shape_are_refused():
    with pytest.raises(UserError, match="--batch=x is of tiny, not of other; pass --model=tiny"):
        a_replay().check_model("other")
    longer = {"target": dict.fromkeys(("ids", "labels"), Spec((2, 4), "int32", "BT"))}
    with pytest.raises(UserError, match=r"target/ids is int32\[2, 3\], the model takes int32\[2, 4\]. Pass the --set"):
        a_replay().check_shapes(longer)
    with pytest.raises(UserError, match=r"source/ids is absent, the model takes int32\[2, 3\]"):
        a_replay().check_shapes({"source": {"ids": SPECS["target"]["ids"]}, **SPECS})
