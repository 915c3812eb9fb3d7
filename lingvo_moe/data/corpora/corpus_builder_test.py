"""Protects the corpus builder: reproducible bytes, every entry counted, no leaks, no loss of a user's files."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
from pathlib import Path

import polib
import pytest

from lingvo_moe.data.corpora import corpus_builder, corpus_report, corpus_writer, sources, splitting
from lingvo_moe.data.corpora.rejection import Rejection
from lingvo_moe.data.corpora.splitting import english_key
from lingvo_moe.data.corpus import SPLITS, Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.utils import temporary_directories

_WORDS = "red green blue old new big small warm cold good bad long short deep flat loud calm dark".split()


def _sentences(count: int) -> list[str]:
    """Different sentences of six words, few of them alike."""
    generator = random.Random(1)
    made = {" ".join(generator.choices(_WORDS, k=6)): None for _ in range(count)}
    return list(made)


@pytest.fixture
def texts(tmp_path) -> Path:
    """1500 sentences in de and ru, half of them in fr, in three formats."""
    folder, sentences = tmp_path / "texts", _sentences(1500)
    folder.mkdir()
    _write_tsv(folder / "de.tsv", [(f"wort {sentence}", sentence) for sentence in sentences])
    rows = "".join(f"ru\tслово {sentence}\t{sentence}\n" for sentence in sentences)
    (folder / "more.tsv").write_text(rows, encoding="utf-8")
    catalog = polib.POFile()
    catalog.extend(polib.POEntry(msgid=sentence, msgstr=f"mot {sentence}") for sentence in sentences[::2])
    catalog.save(str(folder / "fr.po"))
    return folder


def _write_tsv(path: Path, pairs: list[tuple[str, str]]):
    path.write_text("".join(f"{source}\t{english}\n" for source, english in pairs), encoding="utf-8")


def _build(texts: Path, output: Path, **options) -> Corpus:
    return corpus_builder.build("none", [texts], output, **options)[0]


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_no_held_out_sentence_is_trained_on_in_any_language(texts, tmp_path):
    """Neither by the same English key nor by a near-duplicate."""
    built = _build(texts, tmp_path / "corpus")
    keys = {
        split: {
            english_key(english)
            for language in built.languages_of(split)
            for _, english in built.pairs(split, language)
        }
        for split in SPLITS
    }
    assert len(keys["test"]) >= 40 and len(keys["valid"]) >= 20 and len(keys["train"]) > 1000
    assert not keys["test"] & keys["valid"]
    assert not splitting.near_duplicates(keys["train"], keys["test"] | keys["valid"])
    assert built.languages_of("test") == ("de", "fr", "ru")


def _held_out_files(directory: Path, count: int, words: str = "") -> tuple[Path, list[tuple[str, str]]]:
    """Writes a file of German sentences, which also have some of `words`, and returns it with its pairs."""
    pairs = [(f"prüf {sentence}{words}", f"{sentence}{words}") for sentence in _sentences(count)]
    _write_tsv(directory / "de.tsv", pairs)
    return directory / "de.tsv", pairs


@pytest.mark.parametrize("split", ["test", "valid"])
def test_a_split_that_is_given_is_that_split_and_is_not_trained_on(texts, tmp_path, split):
    """In any language; the other held-out split is chosen by hash, and every entry is counted."""
    (tmp_path / "own").mkdir()
    file, pairs = _held_out_files(tmp_path / "own", 30)
    _write_tsv(file, [*pairs, ("nur kurz", "short only"), ("gut", "%s")])
    built = _build(texts, tmp_path / "corpus", held_out={split: [file]})
    assert sorted(built.pairs(split, "de")) == sorted([*pairs, ("nur kurz", "short only")])
    assert built.languages_of(split) == ("de",)
    other = "valid" if split == "test" else "test"
    keys = {
        name: {english_key(e) for language in built.languages_of(name) for _, e in built.pairs(name, language)}
        for name in SPLITS
    }
    assert len(keys[other]) >= 20 and not keys[other] & keys[split]
    long = {key for key in keys[split] if key.count(" ") >= 3}
    assert len(keys["train"]) > 1000 and not splitting.near_duplicates(keys["train"], long)
    assert not keys["train"] & keys[split]
    for language, facts in built.manifest["languages"].items():
        assert facts["read"] == sum(built.count(s, language) for s in SPLITS) + sum(facts["rejected"].values())
    assert built.manifest["languages"]["ru"]["rejected"][Rejection.GIVEN] == 30
    assert f"{split} split: {file.name}" in (tmp_path / "corpus" / "report.txt").read_text(encoding="utf-8")


def test_both_splits_are_given(texts, tmp_path):
    """Nothing else is held out, and other files are another corpus."""
    (tmp_path / "valid").mkdir()
    (tmp_path / "test").mkdir()
    valid, _ = _held_out_files(tmp_path / "valid", 5, " of one")
    test, pairs = _held_out_files(tmp_path / "test", 5, " of two")
    files = {"valid": [valid], "test": [test]}
    built = _build(texts, tmp_path / "corpus", held_out=files)
    assert (built.count("valid"), built.count("test")) == (5, 5)
    assert not corpus_builder.build("none", [texts], tmp_path / "corpus", held_out=files)[1]
    both = _build(texts, tmp_path / "both", held_out={"valid": [valid], "test": [test, valid]})
    assert "5 English sentences are in both --valid_input and --test_input." in corpus_report.warnings(both.manifest)
    _write_tsv(test, pairs[1:])
    with pytest.raises(UserError, match="has a corpus of other inputs"):
        _build(texts, tmp_path / "corpus", held_out=files)


def test_near_duplicates_of_long_given_sentences_are_not_trained_on(texts, tmp_path):
    """Sentences that are chosen by hash have at most 40 words; a user's may have more."""
    long = " ".join(_WORDS * 3)
    (tmp_path / "own").mkdir()
    _write_tsv(tmp_path / "own" / "de.tsv", [(f"lang {long}", long)])
    _write_tsv(texts / "de.tsv", [(f"fast {long}", f"{long} more"), ("kurz", "a short one")])
    built = _build(texts, tmp_path / "corpus", held_out={"test": [tmp_path / "own"]})
    assert len(long.split()) > 41 and list(built.pairs("train", "de")) == [("kurz", "a short one")]


def test_a_held_out_file_without_pairs_is_an_error(texts, tmp_path):
    (tmp_path / "own").mkdir()
    _write_tsv(tmp_path / "own" / "de.tsv", [("1", "2")])
    with pytest.raises(UserError, match="no pairs to hold out: 1 entry read, all of them rejected .no letters"):
        _build(texts, tmp_path / "corpus", held_out={"test": [tmp_path / "own"]})
    with pytest.raises(UserError, match="--valid_input=nowhere: no such file"):
        _build(texts, tmp_path / "corpus", held_out={"valid": ["nowhere"]})


def test_every_entry_is_a_pair_or_is_rejected_with_a_reason(texts, tmp_path):
    """The manifest's counts add up."""
    _write_tsv(texts / "more-de.tsv", [("OK", "OK"), ("wort " + _sentences(1)[0], _sentences(1)[0]), ("", "empty one")])
    built = _build(texts, tmp_path / "corpus")
    for language, facts in built.manifest["languages"].items():
        pairs = sum(built.count(split, language) for split in SPLITS)
        assert facts["read"] == pairs + sum(facts["rejected"].values())
    rejected = built.manifest["languages"]["de"]["rejected"]
    assert rejected[Rejection.IDENTICAL] == rejected[Rejection.EMPTY] == rejected[Rejection.DUPLICATE] == 1


def test_same_files_give_the_same_bytes_in_any_directory_order(texts, tmp_path, monkeypatch):
    """The order of a directory listing depends on the file system."""
    first = _build(texts, tmp_path / "first")
    walk = os.walk

    def backwards(root, **options):
        return ((top, folders, names[::-1]) for top, folders, names in walk(root, **options))

    monkeypatch.setattr(os, "walk", backwards)
    second = _build(texts, tmp_path / "second")
    assert first.fingerprint == second.fingerprint
    assert _files(tmp_path / "first") == _files(tmp_path / "second")


def test_corpus_of_the_same_inputs_is_not_rebuilt(texts, tmp_path):
    """Only --force builds it again."""
    output = tmp_path / "corpus"
    _build(texts, output)
    inode = output.stat().st_ino
    assert corpus_builder.build("none", [texts], output)[1] is False
    assert corpus_builder.build("none", [texts], output, force=True)[1] is True
    assert output.stat().st_ino != inode


def test_corpus_of_other_inputs_is_replaced_only_by_force(texts, tmp_path):
    """A typing error in --output does not cost a corpus."""
    output = tmp_path / "corpus"
    _build(texts, output)
    before = _files(output)
    _write_tsv(texts / "it.tsv", [("parola", "word")])
    with pytest.raises(UserError, match="has a corpus of other inputs.*--force"):
        _build(texts, output)
    assert _files(output) == before
    assert "it" in _build(texts, output, force=True).languages
    assert sorted(os.listdir(tmp_path)) == ["corpus", "texts"]


def test_corrupt_corpus_is_rebuilt_by_force(texts, tmp_path):
    """Without it the error explains why not."""
    output = tmp_path / "corpus"
    fingerprint = _build(texts, output).fingerprint
    (output / "corpus.json").write_text("{")
    with pytest.raises(UserError, match="or a corrupt one"):
        _build(texts, output)
    assert _build(texts, output, force=True).fingerprint == fingerprint


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("names", [["thesis.doc"], ["corpus.json", "thesis.doc"], ["train"]])
def test_directory_of_other_files_is_never_replaced(texts, tmp_path, names, force):
    """Not even with --force."""
    output = tmp_path / "corpus"
    output.mkdir()
    for name in names:
        (output / name).write_text("precious")
    with pytest.raises(UserError, match="files that are not of a corpus and is left unchanged"):
        _build(texts, output, force=force)
    assert sorted(os.listdir(output)) == sorted(names)


def test_file_is_never_replaced_and_an_empty_directory_is_used(texts, tmp_path):
    """--output may be a directory that was just made."""
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="is a file or a link"):
        _build(texts, tmp_path / "file", force=True)
    (tmp_path / "empty").mkdir()
    assert _build(texts, tmp_path / "empty").count("train")


def test_interrupted_build_leaves_the_old_corpus_and_nothing_else(texts, tmp_path, monkeypatch):
    """A corpus is replaced by one rename."""
    output = tmp_path / "corpus"
    _build(texts, output)
    before, calls = _files(output), itertools.count()
    write = corpus_writer.write

    def interrupted(path, data):
        if next(calls) == 3:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(corpus_writer, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _build(texts, output, force=True)
    assert _files(output) == before
    assert sorted(os.listdir(tmp_path)) == ["corpus", "texts"]


def test_full_disk_is_an_error_that_names_the_file(texts, tmp_path, monkeypatch):
    """And leaves nothing behind."""

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError) as caught:
        _build(texts, tmp_path / "corpus")
    assert caught.value.filename.endswith("train/de.tsv")
    assert os.listdir(tmp_path) == ["texts"]


def test_catalogs_of_one_language_are_merged_and_english_ones_counted(texts, tmp_path):
    """Spellings of a label are one language."""
    _write_tsv(texts / "pt-br.tsv", [("olá mundo", "hello world")])
    _write_tsv(texts / "x-pt_BR.tsv", [("adeus mundo", "goodbye world")])
    _write_tsv(texts / "en-gb.tsv", [("colour", "color")])
    built = _build(texts, tmp_path / "corpus")
    assert list(built.pairs("train", "pt_BR")) == [("adeus mundo", "goodbye world"), ("olá mundo", "hello world")]
    assert built.manifest["english_labels"] == {"en_GB": 1}


def test_pairs_in_a_foreign_script_are_rejected(texts, tmp_path):
    """Untranslated entries in a Cyrillic catalog are Latin."""
    _write_tsv(texts / "uk.tsv", [("так", "yes"), ("ні", "no"), ("можливо", "perhaps"), ("maybe not", "perhaps not")])
    facts = _build(texts, tmp_path / "corpus").manifest["languages"]["uk"]
    assert facts["rejected"] == {Rejection.WRONG_SCRIPT: 1}


def test_held_out_splits_are_capped_per_language(texts, tmp_path, monkeypatch):
    """The cap rejects held-out pairs, and changes no training pair."""
    uncapped = _build(texts, tmp_path / "uncapped")
    monkeypatch.setattr(corpus_builder, "HELD_OUT_CAP", 10)
    capped = _build(texts, tmp_path / "capped")
    assert capped.count("test", "de") == capped.count("valid", "de") == 10
    assert set(capped.pairs("test", "de")) < set(uncapped.pairs("test", "de"))
    assert list(capped.pairs("train", "de")) == list(uncapped.pairs("train", "de"))
    assert capped.manifest["languages"]["de"]["rejected"][Rejection.OVER_CAP] > 0


def test_report_counts_the_held_out_sentences_that_are_written(texts, tmp_path, monkeypatch):
    """Not those that the cap rejects: of French alone, 10 pairs have 10 sentences."""
    monkeypatch.setattr(corpus_builder, "HELD_OUT_CAP", 10)
    for name, selected in (("fr", ["fr"]), ("all", [])):
        built = _build(texts, tmp_path / name, selected=selected)
        counts = {
            split: len({english_key(e) for language in built.languages for _, e in built.pairs(split, language)})
            for split in ("test", "valid")
        }
        assert (counts == {"test": 10, "valid": 10}) == (name == "fr")
        report = (tmp_path / name / "report.txt").read_text(encoding="utf-8")
        assert f"; {counts['test']} are in the test and {counts['valid']} in the validation split" in report


def test_links_that_are_skipped_are_reported_of_every_input(texts, tmp_path):
    """Of two directories with the same name, and of held-out ones."""
    (tmp_path / "secret.tsv").write_text("ja\tyes\n", encoding="utf-8")
    for number, place in enumerate(("one", "two", "own"), 1):
        folder = tmp_path / place / ("test" if place == "own" else "po")
        folder.mkdir(parents=True)
        _write_tsv(folder / "de.tsv", [(f"etwas in {place}", f"something in {place}")])
        for link in range(number):
            (folder / f"link{link}-de.tsv").symlink_to(tmp_path / "secret.tsv")
    inputs, held_out = [texts, tmp_path / "one" / "po", tmp_path / "two" / "po"], [tmp_path / "own" / "test"]
    built = corpus_builder.build("none", inputs, tmp_path / "corpus", held_out={"test": held_out})[0]
    assert built.manifest["skipped_links"] == {"po": 3, "test": 3}
    report = (tmp_path / "corpus" / "report.txt").read_text(encoding="utf-8")
    assert "skipped links that lead out of their input: po 3, test 3" in report


def test_an_output_that_cannot_be_made_is_an_error_before_downloads(texts, tmp_path):
    """Not after the hours that they may take. A mistyped input is found before them, too, and leaves nothing behind."""
    (tmp_path / "file").write_text("precious")
    with sources.PRESETS.isolated():

        @sources.register_source("never_read")
        def never_read(cache, selected):
            pytest.fail("the preset was read")

        with pytest.raises(UserError, match="--output=.*/file/corpus: cannot be made .*; name another directory"):
            corpus_builder.build("never_read", [texts], tmp_path / "file" / "corpus")
        with pytest.raises(UserError, match="--input=nowhere: no such file"):
            corpus_builder.build("never_read", ["nowhere"], tmp_path / "new" / "corpus")
    assert sorted(os.listdir(tmp_path)) == ["file", "texts"]


def test_an_up_to_date_corpus_may_be_in_a_directory_that_cannot_be_written(texts, tmp_path, monkeypatch):
    """It is used as it is; only --force would write there."""
    _build(texts, tmp_path / "corpus")

    def refuse(prefix, parent):
        raise PermissionError(13, "Permission denied", str(parent))

    monkeypatch.setattr(temporary_directories, "make", refuse)
    assert corpus_builder.build("none", [texts], tmp_path / "corpus")[1] is False
    with pytest.raises(UserError, match="--output=.*/corpus: cannot be made .Permission denied"):
        _build(texts, tmp_path / "corpus", force=True)


def test_held_out_source_with_another_english_is_not_trained_on():
    """The source text alone would teach the held-out translation."""
    split = splitting.KeySplit(frozenset(["it is all right now"]), *[frozenset()] * 3, eligible=2, all=2)
    rejected = collections.Counter()
    pairs = [("alles gut", "it is all right now"), ("alles gut", "everything is quite fine"), ("nichts", "nothing")]
    assert corpus_builder.split_pairs(pairs, split, rejected) == {
        "train": [("nichts", "nothing")],
        "valid": [],
        "test": [("alles gut", "it is all right now")],
    }
    assert +rejected == {Rejection.SOURCE_HELD_OUT: 1}


def test_report_warns_of_a_corpus_too_small_to_split(tmp_path):
    """Scores on empty splits mean nothing."""
    _write_tsv(tmp_path / "de.tsv", [("ja", "yes"), ("nein", "no")])
    built = _build(tmp_path / "de.tsv", tmp_path / "corpus")
    assert built.count("train") == 2 and built.count("test") == 0
    report = (tmp_path / "corpus" / "report.txt").read_text()
    assert "WARNING: the test split has 0 English sentences" in report
    assert ["de", "2", "2", "0", "0", "0", "0"] in [line.split() for line in report.splitlines()]


def test_manifest_is_json_without_machine_paths(texts, tmp_path):
    """A published corpus has no information about the machine."""
    _build(texts, tmp_path / "corpus")
    text = (tmp_path / "corpus" / "corpus.json").read_text(encoding="utf-8")
    assert json.loads(text)["inputs"] == ["texts"] and str(tmp_path) not in text


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("de.tsv", "OK\tOK\n", r"1 entry read, all of them rejected \(identical to the English 1\)"),
        ("messages.po", 'msgid "a"\nmsgstr "b"\n', "do not contain their language: .*messages.po"),
        ("en.tsv", "colour\tcolor\n", "no translations into a language other than English"),
    ],
)
def test_empty_result_is_an_error_with_the_reason(tmp_path, name, content, message):
    """Rejected, unlabelled or English entries."""
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        _build(tmp_path / name, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_only_the_selected_languages_are_read(texts, tmp_path):
    """Of the others nothing is counted; a language that no source has is an error."""
    built = _build(texts, tmp_path / "corpus", selected=["de", "fr"])
    assert built.languages == ("de", "fr")
    all_languages = _build(texts, tmp_path / "all")
    assert all_languages.languages == ("de", "fr", "ru")
    assert list(built.pairs("test", "fr")) == list(all_languages.pairs("test", "fr"))
    with pytest.raises(UserError, match="--languages=rn: the sources of this corpus have no entries"):
        _build(texts, tmp_path / "other", selected=["de", "rn"])
    with pytest.raises(UserError, match="--languages=rn: the sources of this corpus have no entries"):
        _build(texts, tmp_path / "other", selected=["rn"])


def test_test_corpus_has_what_the_training_corpus_has_not_seen(texts, tmp_path):
    """Every eligible sentence is tested on, unless the other corpus trains on it, on nearly it, or on its source."""
    (tmp_path / "trained").mkdir()
    sentences = _sentences(1500)
    seen = [sentences[0], sentences[1] + " indeed", "quite another long sentence"]
    sources = ["gleich", "ähnlich", f"wort {sentences[2]}"]
    _write_tsv(tmp_path / "trained" / "de.tsv", list(zip(sources, seen)))
    trained = _build(tmp_path / "trained", tmp_path / "trained_corpus")
    _write_tsv(texts / "it.tsv", [("breve", "short"), ("testo %s", "open the file %s again and again")])
    unseen = _build(texts, tmp_path / "unseen", selected=["de", "fr", "it", "ru"], unseen_by=trained)
    assert unseen.count("train") == unseen.count("valid") == 0
    assert unseen.languages_of("test") == ("de", "fr", "ru")
    tested = {english for _, english in unseen.pairs("test", "de")}
    near = splitting.near_duplicates(set(sentences), set(seen))
    assert sentences[0] not in tested and sentences[1] in near and not tested & near and sentences[2] not in tested
    rejected = unseen.manifest["languages"]["de"]["rejected"]
    assert unseen.count("test", "de") == min(1000, 1500 - len(near | {sentences[0], sentences[2]}))
    assert rejected[Rejection.SEEN] == len(near | {sentences[0], sentences[2]})
    assert unseen.manifest["languages_without_pairs"]["it"]["rejected"] == {Rejection.NOT_ELIGIBLE: 2}
    assert unseen.manifest["unseen_by"] == trained.fingerprint
    with pytest.raises(UserError, match="no training pair; it is for testing alone"):
        Corpus.open_to_train(tmp_path / "unseen")


def test_test_corpus_has_the_languages_of_the_training_corpus(texts, tmp_path):
    """A model is not tested on languages that it has not learnt, unless they are selected."""
    trained = _build(texts, tmp_path / "corpus", selected=["fr", "ru"])
    _write_tsv(texts / "fr.tsv", [("encore une longue phrase", "one more long sentence")])
    assert _build(texts, tmp_path / "unseen", unseen_by=trained).languages == ("fr", "ru")


def test_an_output_apart_from_what_is_read(texts, tmp_path):
    """It would replace the corpus that a model is trained on, or be an input of the next build."""
    trained = _build(texts, tmp_path / "corpus")
    files = _files(tmp_path / "corpus")
    for output in (tmp_path / "corpus", tmp_path / "corpus" / "unseen", tmp_path):
        with pytest.raises(UserError, match=f"--output={output} and --unseen_by=.*Name another --output"):
            corpus_builder.build("none", [], output, unseen_by=trained, force=True)
    with pytest.raises(UserError, match=f"and --input={texts}: they are the same, or one is inside"):
        _build(texts, texts / "corpus")
    with pytest.raises(UserError, match=f"and --test_input={texts}/de.tsv: they are the same, or one is"):
        corpus_builder.build("django", [], texts, held_out={"test": [texts / "de.tsv"]})
    assert _files(tmp_path / "corpus") == files


def test_a_loop_of_links_is_named(texts, tmp_path):
    """It has no place to write to, and no file to read."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="--output=.*/loop"):
        _build(texts, tmp_path / "loop")
    with pytest.raises(UserError, match="--input=.*/loop: no such file"):
        _build(tmp_path / "loop", tmp_path / "corpus")


def test_a_corpus_that_another_process_has_built_meanwhile_is_kept(texts, tmp_path, monkeypatch):
    """Both began when there was none; the second to end is refused."""
    other, split_keys = tmp_path / "others", splitting.split_keys
    other.mkdir()
    (texts / "fr.po").rename(other / "fr.po")

    def split_and_let_another_build(*arguments):
        monkeypatch.undo()
        _build(other, tmp_path / "corpus")
        return split_keys(*arguments)

    monkeypatch.setattr(splitting, "split_keys", split_and_let_another_build)
    with pytest.raises(UserError, match="has a corpus of other inputs"):
        _build(texts, tmp_path / "corpus")
    assert Corpus.open(tmp_path / "corpus").languages == ("fr",)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_two_builds_of_the_same_inputs_may_run_at_the_same_time(texts, tmp_path, monkeypatch):
    """Each of them succeeds, as one after the other."""
    split_keys = splitting.split_keys

    def split_and_let_another_build(*arguments):
        monkeypatch.undo()
        _build(texts, tmp_path / "corpus")
        return split_keys(*arguments)

    monkeypatch.setattr(splitting, "split_keys", split_and_let_another_build)
    built = _build(texts, tmp_path / "corpus")
    assert built.fingerprint == _build(texts, tmp_path / "alone").fingerprint


def test_half_a_character_of_a_json_catalog_is_left_out(tmp_path):
    """JSON may have one half of a pair of surrogates, which no text in UTF-8 has."""
    (tmp_path / "texts").mkdir()
    for name, text in (("en", "a long road"), ("de", "ein langer Weg")):
        content = {str(number): f"{text} {number} \ud83d" for number in range(200)}
        (tmp_path / "texts" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    assert ("ein langer Weg 3", "a long road 3") in [*_build(tmp_path / "texts", tmp_path / "c").pairs("train", "de")]


def test_unknown_preset_and_missing_input_are_errors():
    """With the nearest preset, and the flag to use."""
    with pytest.raises(UserError, match="preset 'debain' is unknown. Did you mean debian"):
        corpus_builder.build("debain", [], "x")
    with pytest.raises(UserError, match="nothing to build a corpus from: name your files with --input"):
        corpus_builder.build("none", [], "x")
