"""Protects the corpus on disk: it reads as written; corrupt files and unsafe names are errors that name them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies

from lingvo_moe.data import corpus
from lingvo_moe.data.corpus import Corpus, Pairs
from lingvo_moe.errors import UserError
from lingvo_moe.utils.hashes import file_sha256

_TEXT = strategies.text(strategies.characters(exclude_characters="\t\n\r\0", exclude_categories=["Cs"]), min_size=1)


@pytest.fixture
def directory(tmp_path) -> Path:
    """Two languages; French has no test pair."""
    return write_corpus(
        tmp_path / "corpus",
        {
            "train": {"de": "ja\tyes\nnein\tno\n", "fr": "oui\tyes\n"},
            "valid": {"de": "gut\tgood\n", "fr": "bon\tgood\n"},
            "test": {"de": "schlecht\tbad\n"},
        },
    )


def write_corpus(directory: Path, texts: dict[str, dict[str, str]]) -> Path:
    languages: dict[str, dict[str, Any]] = {
        language: {"read": 0, "rejected": {}, **{split: {"pairs": 0, "bytes": 0} for split in corpus.SPLITS}}
        for language in texts["train"]
    }
    for split, by_language in texts.items():
        (directory / split).mkdir(parents=True)
        for language, text in by_language.items():
            (directory / split / f"{language}.tsv").write_text(text, encoding="utf-8")
            languages[language][split] = {"pairs": text.count("\n"), "bytes": len(text.encode())}
    (directory / corpus.MANIFEST).write_text(json.dumps(_manifest(languages)))
    return directory


def _manifest(languages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A manifest without hashes, as those of earlier versions."""
    return {
        "format": corpus.FORMAT,
        "version": corpus.VERSION,
        "fingerprint": "f",
        "preset": "none",
        **{field: [] for field in ("inputs", "missing_packages")},
        "english_keys": dict.fromkeys(("all", "eligible", "test", "valid"), 0),
        **{field: {} for field in ("english_labels", "unlabelled", "skipped_links", "languages_without_pairs")},
        "languages": languages,
    }


def test_languages_counts_and_pairs(directory):
    """The manifest's counts and the files' pairs; a file is read once."""
    opened = Corpus.open(directory)
    assert opened.languages == ("de", "fr")
    assert opened.languages_of("test") == ("de",)
    assert (opened.count("train"), opened.count("train", "de"), opened.count("test", "fr")) == (3, 2, 0)
    assert list(opened.pairs("train", "de")) == [("ja", "yes"), ("nein", "no")]
    assert opened.pairs("train", "de") is opened.pairs("train", "de")


@given(strategies.lists(strategies.tuples(_TEXT, _TEXT), min_size=1), strategies.booleans())
def test_pairs_round_trip(tmp_path_factory, expected, ends_in_newline):
    """Property: any texts without tabs and line ends are read back, by index and by iteration."""
    path = tmp_path_factory.mktemp("pairs") / "de.tsv"
    text = "\n".join(map("\t".join, expected)) + "\n" * ends_in_newline
    path.write_bytes(text.encode())
    pairs = Pairs(path)
    assert len(pairs) == len(expected)
    assert list(pairs) == expected
    assert [pairs[i] for i in range(-len(expected), 0)] == expected
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            pairs[index]


@pytest.mark.parametrize(
    "data, message",
    [
        (b"ja\tyes\nno\t\0x\n", r"de\.tsv:2: byte 10: a NUL byte; this is a binary file"),
        (b"ja\tyes\nn\xe9in\tno\n", r"de\.tsv:2: byte 8: not UTF-8 \(byte 0xe9\)"),
        (b"ja\tyes\r\nne\tno\n", r"de\.tsv:1: byte 6: a carriage return"),
        (b"ja\tyes\nnein no\n", r"de\.tsv:2: 0 tabs; expected exactly one"),
        (b"ja\tyes\tx\nnein\tno\n", r"de\.tsv:1: 2 tabs"),
        (b"ja\tyes\n\nnein\tno\n", r"de\.tsv:2: 0 tabs"),
        (b"", r"de\.tsv: the file is empty"),
    ],
)
def test_malformed_file_is_an_error_with_its_line(tmp_path, data, message):
    """The error names the file, the line and the byte."""
    (tmp_path / "de.tsv").write_bytes(data)
    with pytest.raises(UserError, match=message):
        Pairs(tmp_path / "de.tsv")


def test_what_cannot_be_read_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=rf"{tmp_path}: cannot be read \(Is a directory\)"):
        Pairs(tmp_path)


def test_missing_corpus_is_an_error_with_the_command_to_build_one(tmp_path):
    """A new user learns which tool to run."""
    with pytest.raises(UserError, match=r"nowhere does not exist\. Build one: python -m tools\.build_corpus .*nowhere"):
        Corpus.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is not a corpus \(it has no corpus\.json\)\. Build one: .*--preset=PRESET"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize(
    "name, reason", [("texts", "it has other files, and no corpus.json"), ("de.tsv", "it is a file")]
)
def test_a_users_own_texts_in_place_of_a_corpus_are_to_be_its_input(tmp_path, name, reason):
    """The advice was to build a corpus in the directory of these texts, which is refused, as it is not empty."""
    (tmp_path / "texts").mkdir()
    for path in (tmp_path / "de.tsv", tmp_path / "texts" / "de.tsv"):
        path.write_text("ja\tyes\n", encoding="utf-8")
    own = tmp_path / name
    expected = f"is not a corpus ({reason}). If these are your own texts, build a corpus of them and name that: "
    command = f"python -m tools.build_corpus --preset=none --input={own} --output=NEW_DIRECTORY."
    with pytest.raises(UserError, match=re.escape(f"the corpus {own} {expected}{command}")):
        Corpus.open(own)


def test_sample_is_spread_over_the_file(tmp_path):
    """The first pairs of a sorted file begin with the same word."""
    rows = "".join(f"wort {number}\tword {number}\n" for number in range(10))
    opened = Corpus.open(write_corpus(tmp_path / "corpus", {"train": {"de": rows}}))
    assert [source for source, _ in opened.sample("train", "de", 4)] == ["wort 0", "wort 2", "wort 5", "wort 7"]
    assert (
        list(opened.sample("train", "de"))
        == list(opened.sample("train", "de", 99))
        == list(opened.pairs("train", "de"))
    )


def test_corpus_without_training_pairs_is_refused(tmp_path):
    """Training would wait for ever. A corpus for testing alone can be opened to test."""
    with pytest.raises(UserError, match="the corpus has no pair"):
        Corpus.open(write_corpus(tmp_path / "corpus", {"train": {"de": ""}}))
    for_testing = write_corpus(tmp_path / "tests", {"train": {"de": ""}, "test": {"de": "ja\tyes\n"}})
    assert Corpus.open(for_testing).count("test") == 1
    with pytest.raises(UserError, match="no training pair; it is for testing alone"):
        Corpus.open_to_train(for_testing)


def test_manifest_truncated_anywhere_is_an_error(directory):
    """A partly copied manifest is never used."""
    path = directory / corpus.MANIFEST
    data = path.read_bytes()
    for length in range(0, len(data), 9):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match="truncated or corrupt"):
            Corpus.open(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"languages": []},
        {"languages": {"de": {"train": {"pairs": "2"}}}},
        {
            "languages": {
                "de": {"read": 1, "rejected": {}, **{split: {"pairs": "1", "bytes": 1} for split in corpus.SPLITS}}
            }
        },
        {"files": {"audio/de.wav": "1"}},
        {"fingerprint": 1},
        {"preset": 1},
        {"inputs": "de"},
        {"missing_packages": [1]},
        {"held_out_inputs": {"test": "de.tsv"}},
        {"held_out_twice": "1"},
        {"english_keys": {"all": 1, "eligible": 1, "test": "1", "valid": 1}},
        {"skipped_links": {"de": "1"}},
        {"languages_without_pairs": {"it": {"read": 1, "rejected": []}}},
    ],
)
def test_manifest_of_another_shape_is_an_error(directory, changes):
    """Valid JSON with wrong types."""
    manifest = json.loads((directory / corpus.MANIFEST).read_text())
    (directory / corpus.MANIFEST).write_text(json.dumps(manifest | changes))
    with pytest.raises(UserError, match=r"corpus\.json: truncated or corrupt .*Build the corpus again"):
        Corpus.open(directory)


def test_manifest_without_a_field_is_an_error(directory):
    """Whoever reads it may rely on every field, those of the report included."""
    complete = (directory / corpus.MANIFEST).read_text()

    def without(tree: Any, path: tuple[str, ...]) -> Any:
        rest = {name: value for name, value in tree.items() if name != path[0]}
        return rest | {path[0]: without(tree[path[0]], path[1:])} if path[1:] else rest

    fields = [(name,) for name in json.loads(complete)]
    fields += [("languages", "de", name) for name in ("read", "rejected", *corpus.SPLITS)]
    fields += [("english_keys", name) for name in ("all", "eligible", "test", "valid")]
    for field in fields:
        (directory / corpus.MANIFEST).write_text(json.dumps(without(json.loads(complete), field)))
        with pytest.raises(
            UserError, match=rf"corpus\.json: truncated or corrupt .*{field[-1]}.*Build the corpus again"
        ):
            Corpus.open(directory)


@pytest.mark.parametrize("version", [1, 99])
def test_manifest_of_another_version_is_an_error_with_the_remedy(directory, version):
    """Version 1 had other keys; the remedy is to build the corpus again."""
    manifest = json.loads((directory / corpus.MANIFEST).read_text())
    (directory / corpus.MANIFEST).write_text(json.dumps(manifest | {"version": version}))
    message = f"version {version}; this program reads 'lingvo_moe corpus' version 2. Build the corpus again"
    with pytest.raises(UserError, match=message):
        Corpus.open(directory)


_UNSAFE = ["../../etc/passwd", "/etc/passwd", "de/x", "de\\x", "c:de", "de\0", "..", ".", "", "de.tsv", "DE", "deutsch"]


@given(strategies.sampled_from(_UNSAFE) | strategies.text(max_size=12))
def test_language_of_a_manifest_is_checked_before_it_becomes_a_path(tmp_path_factory, language):
    """Property: an altered manifest cannot make the program open a file outside of the corpus; the error names both."""
    directory = tmp_path_factory.mktemp("corpus")
    counts = {split: {"pairs": 1, "bytes": 3} for split in corpus.SPLITS}
    (directory / corpus.MANIFEST).write_text(
        json.dumps(_manifest({language: {"read": 3, "rejected": {}, **counts}})),
    )
    with pytest.raises(UserError) as raised:
        Corpus.open(directory)
    if language in _UNSAFE:
        assert f"corpus.json, field languages: {language!r} is not a language label" in str(raised.value)
    else:  # a safe label: its file is missing
        assert "is not a language label" in str(raised.value) or f"/train/{language}.tsv: missing" in str(raised.value)


def test_files_that_do_not_match_the_manifest_are_errors(directory):
    """Sizes are checked on opening, counts on reading."""
    path = directory / "train" / "de.tsv"
    data = path.read_bytes()
    path.write_bytes(data + b"gut\tgood\n")
    with pytest.raises(UserError, match=r"de\.tsv: 24 bytes, but corpus\.json lists 15"):
        Corpus.open(directory)
    path.write_bytes(data.replace(b"\n", b" ", 1).replace(b"\t", b" ", 1))
    with pytest.raises(UserError, match=r"de\.tsv: 1 pairs, but corpus\.json lists 2"):
        Corpus.open(directory).pairs("train", "de")
    path.unlink()
    with pytest.raises(UserError, match=r"de\.tsv: missing, but corpus\.json lists 2 pairs"):
        Corpus.open(directory)


def test_a_file_replaced_by_another_of_equal_size_is_an_error(directory):
    """Training would go on with other text. A manifest of an earlier version has no hashes, and its files are read."""
    path, manifest = directory / "train" / "de.tsv", json.loads((directory / corpus.MANIFEST).read_text())
    digest = file_sha256(path)
    path.write_text("no\tyes\nnein\tja\n")
    assert list(Corpus.open(directory).pairs("train", "de")) == [("no", "yes"), ("nein", "ja")]
    manifest["languages"]["de"]["train"]["sha256"] = digest
    (directory / corpus.MANIFEST).write_text(json.dumps(manifest))
    message = rf"train/de\.tsv: altered or replaced.*corpus\.json lists {digest[:12]}.*Build the corpus again"
    with pytest.raises(UserError, match=message):
        Corpus.open(directory).pairs("train", "de")
    path.write_text("ja\tyes\nnein\tno\n")
    assert len(Corpus.open(directory).pairs("train", "de")) == 2
    manifest["languages"]["de"]["train"]["sha256"] = 1
    (directory / corpus.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="truncated or corrupt .*the train hash of de is not a string"):
        Corpus.open(directory)


def test_unknown_language_or_split_is_an_error(directory):
    """With the known ones, and the nearest."""
    opened = Corpus.open(directory)
    with pytest.raises(UserError, match="no language 'de_DE' among the corpus's 2. Did you mean de?"):
        opened.pairs("train", "de_DE")
    with pytest.raises(UserError, match="fr has no test pairs; these have: de"):
        opened.pairs("test", "fr")
    with pytest.raises(UserError, match="no split 'dev'; the splits are train, valid, test"):
        opened.count("dev")
