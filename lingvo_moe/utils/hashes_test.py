"""Hashes are those of the standard that package registries and manifests name."""

from __future__ import annotations

from lingvo_moe.utils.hashes import file_sha256


def test_the_hash_of_a_file_is_that_of_its_content(tmp_path):
    """FIPS 180-4's example, `abc`."""
    (tmp_path / "file").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(tmp_path / "file") == file_sha256(str(tmp_path / "file")) == expected
