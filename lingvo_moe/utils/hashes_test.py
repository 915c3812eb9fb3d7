"""Hashes are those of the standard that package registries and manifests name."""

from __future__ import annotations

import hashlib

from lingvo_moe.utils.hashes import file_sha256, sha256

# FIPS 180-4's example, `abc`.
_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_hash_of_bytes_and_of_a_text():
    assert sha256(b"abc") == sha256("abc") == _ABC
    assert sha256("ö") == hashlib.sha256(b"\xc3\xb6").hexdigest()


def test_the_hash_of_a_file_is_that_of_its_content(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert file_sha256(tmp_path / "file") == file_sha256(str(tmp_path / "file")) == _ABC
