"""A corpus is replaced as a whole or not at all, and its fingerprint depends on its content alone."""

from __future__ import annotations

import collections
import errno
import os
import pathlib

import pytest

from lingvo_moe.data.corpora.corpus_writer import OutputDirectory, Writer, prepare_output_directory
from lingvo_moe.data.corpus import MANIFEST, Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.utils.hashes import file_sha256

NONE = collections.Counter()
# What the report needs besides.
FACTS = {
    "preset": "none",
    "inputs": [],
    "missing_packages": [],
    "english_keys": collections.defaultdict(int, all=1),
    "english_labels": {},
    "unlabelled": {},
    "skipped_links": {},
}


def write(
    output: pathlib.Path, english: str = "a house", files: tuple[tuple[str, bytes], ...] = (), identity: str = "x"
) -> str:
    """Writes a corpus of one pair; returns its fingerprint."""
    with OutputDirectory(output, identity).atomic_writer(force=True) as writer:
        for name, data in files:
            writer.add_file(name, data)
        writer.add("de", {"train": [("ein Haus", english)], "valid": [], "test": []}, 1, NONE)
        writer.finish(FACTS | {"inputs_identity": identity})
    return Corpus.open(output).fingerprint


def test_fingerprint_is_that_of_the_content(tmp_path):
    """Another directory has the same one; another text, or another file beside the texts, changes it."""
    first = write(tmp_path / "first")
    assert first == write(tmp_path / "second", identity="y")
    changed = [
        write(tmp_path / "text", "the house"),
        write(tmp_path / "file", files=(("notes.bin", b"1"),)),
        write(tmp_path / "other", files=(("notes.bin", b"2"),)),
    ]
    assert len({first, *changed}) == 4


def test_the_manifest_has_the_hash_of_every_file_of_pairs(tmp_path):
    """It tells a file from another of the same size."""
    write(tmp_path / "corpus")
    train = Corpus.open(tmp_path / "corpus").manifest["languages"]["de"]["train"]
    assert train["sha256"] == file_sha256(tmp_path / "corpus" / "train" / "de.tsv")
    assert not list((tmp_path / "corpus" / "test").iterdir()), "a language without pairs has no file"


def test_the_old_corpus_returns_where_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    """The second of two renames fails: nothing of the old corpus is lost, and nothing is left beside it."""
    output = tmp_path / "corpus"
    old = write(output)
    rename = pathlib.Path.rename

    def refuse(self, target):
        if ".partial-" in self.parent.name:
            raise OSError(errno.EACCES, "Permission denied", str(target))
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", refuse)
    with pytest.raises(OSError, match="Permission denied"):
        write(output, "the house")
    assert Corpus.open(output).fingerprint == old
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_build_that_was_killed_between_two_renames_is_undone(tmp_path):
    """The old corpus would stay under a name that nobody looks for."""
    old = write(tmp_path / "corpus")
    (tmp_path / "corpus").rename(tmp_path / ".corpus.replaced")
    prepare_output_directory(tmp_path / "corpus")
    assert Corpus.open(tmp_path / "corpus").fingerprint == old
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_another_build_of_the_same_name_is_left_alone(tmp_path):
    """Two containers that share a volume may both have the process id 1."""
    theirs = tmp_path / f".corpus.partial-{os.getpid()}" / "train"
    theirs.mkdir(parents=True)
    write(tmp_path / "corpus")
    assert theirs.exists()


def test_only_a_complete_corpus_of_the_same_inputs_is_up_to_date(tmp_path):
    """A build that is skipped wrongly trains on old data."""
    output = tmp_path / "corpus"
    assert not OutputDirectory(output, "x").is_up_to_date()
    write(output)
    assert OutputDirectory(output, "x").is_up_to_date() and not OutputDirectory(output, "y").is_up_to_date()
    (output / MANIFEST).write_text("{")
    assert not OutputDirectory(output, "x").is_up_to_date()


def test_a_link_is_not_followed(tmp_path):
    """Its target, perhaps another corpus, would be replaced; one to nothing would be replaced by a directory."""
    write(tmp_path / "corpus")
    for name, target in (("link", tmp_path / "corpus"), ("dangling", tmp_path / "nowhere")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(UserError, match="is a file or a link"):
            prepare_output_directory(tmp_path / name)


@pytest.mark.parametrize("label", ["../de", "a/b", ""])
def test_a_language_cannot_name_a_path(tmp_path, label):
    """Labels come from file names of packages."""
    with pytest.raises(UserError):
        Writer(tmp_path).add(label, {"train": [("x", "y")], "valid": [], "test": []}, 1, NONE)
    assert not list(tmp_path.rglob("*.tsv"))


@pytest.mark.parametrize(
    "facts, split, message",
    [
        ({}, "test", "no train pairs: of all the pairs read, only 0 valid, 1 test pairs remain"),
        ({"unseen_by": "other"}, "train", "no test pairs: of all the pairs read, only 1 train, 0 valid pairs remain"),
    ],
)
def test_a_corpus_without_the_pairs_that_it_is_for_is_refused(tmp_path, facts, split, message):
    """Training or evaluation would find out much later; no manifest makes it look complete."""
    writer = Writer(tmp_path)
    writer.add("de", {"train": [], "valid": [], "test": [], split: [("ein Haus", "a house")]}, 1, NONE)
    with pytest.raises(UserError, match=message):
        writer.finish(facts)
    assert not (tmp_path / MANIFEST).exists()
