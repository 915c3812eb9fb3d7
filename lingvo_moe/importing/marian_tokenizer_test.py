"""Marian's two tokenizers have the ids of one vocabulary, with our special ids, and bad files are errors."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import sentencepiece

from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizer, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.importing import marian_tokenizer, tokenizer_files
from lingvo_moe.testing import hugging_face_models

NAME = "--input=model"
VOCABULARY, CONFIG = "vocab.json", "tokenizer_config.json"


@pytest.fixture
def marian(tmp_path):
    return shutil.copytree(hugging_face_models.TOKENIZERS / "marian", tmp_path / "marian")


@pytest.mark.parametrize(
    "texts, expected",
    [
        (["</s>", "<unk>", "a", "b", "c", "d", "<pad>"], [6, 0, 6, 1, 2, 3, 4, 5]),
        (["a", "b", "<unk>", "c", "</s>", "d", "<pad>"], [6, 4, 6, 2, 0, 1, 3, 5]),
    ],
)
def test_rows_are_those_of_our_ids(texts, expected):
    """Padding, with which the decoder begins, end, padding again, unknown, and the pieces, wherever they are."""
    rows = marian_tokenizer.rows_of_ids(texts)
    assert rows.tolist() == expected and np.array_equal(np.unique(rows), np.arange(7))


def convert(directory) -> dict[str, Tokenizer]:
    return marian_tokenizer.convert(directory, marian_tokenizer.read_vocabulary(directory, NAME), NAME)


def test_both_sides_have_the_ids_of_one_vocabulary(marian, tmp_path):
    """Pieces that only one side has keep their text in the other, which decodes them; languages are of texts alone."""
    found = convert(marian)
    tokenizer_files.write(found, tmp_path / "tokenizers", NAME)
    loaded = Tokenizers.load(tmp_path / "tokenizers")
    assert loaded.by_side == found and loaded.is_shared and loaded.source != loaded.target
    vocabulary = json.loads((marian / VOCABULARY).read_text())
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    rows = marian_tokenizer.rows_of_ids(texts).tolist()
    assert list(loaded.source.all_pieces[4:]) == [texts[row] for row in rows[4:]]
    assert loaded.source.pieces(SPECIAL_IDS.values()) == ["<pad>", "</s>", "<s>", "<unk>"]
    only_source = set(texts[2:-1]) - set(pieces_of(marian / "target.spm"))
    longest = max(only_source, key=len)
    assert loaded.target.decode([[loaded.source.all_pieces.index(longest)]]) == [longest.replace("▁", " ").strip()]
    german = loaded.in_languages({"source": "de", "target": ""})
    assert loaded.in_languages({"source": "corpus", "target": "en"}) == german
    assert (german.source.language, german.target.language, german.target.language_id) == ("de", "en", None)
    with pytest.raises(UserError, match="input.source_language is 'fr', but the tokenizer is of 'de' alone; leave it"):
        loaded.in_languages({"source": "fr"})


def pieces_of(path) -> list[str]:
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(number) for number in range(model.vocab_size())]


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"source_lang": 3, "target_lang": "../x"},
        {"source_lang": "de_" + "x" * 10_000, "target_lang": "DE"},
        {"source_lang": "zle", "target_lang": "mul"},  # East Slavic languages, and any
    ],
)
def test_texts_are_of_an_unknown_language_if_nothing_names_it(marian, config):
    """Then lines in English are not copied, as they would be by a model into English."""
    (marian / CONFIG).unlink()
    if config is not None:
        (marian / CONFIG).write_text(json.dumps(config))
    found = convert(marian)
    assert [tokenizer.own_language for tokenizer in found.values()] == ["und", "und"]


def test_a_source_begins_with_the_language_of_its_translation(marian, tmp_path):
    """With the ids of Hugging Face's tokenizer. The target's texts have no language, and no source's own is told."""
    golden = json.loads((hugging_face_models.TOKENIZERS / "marian.json").read_text())["facts"]["with_language"]
    edited(renamed(golden["language"], golden["id"]))(marian)
    edited(renamed(">>pt_BR<<", 7))(marian)
    found = convert(marian)
    assert [(each.own_language, each.names_target) for each in found.values()] == [("de", True), ("und", False)]
    assert found["source"].language_names == ("fra", "pt_BR") and not found["target"].languages
    tokenizer_files.write(found, tmp_path / "tokenizers", NAME)
    loaded = Tokenizers.load(tmp_path / "tokenizers")
    assert loaded.by_side == found and loaded.is_shared
    french = loaded.in_languages({"source": "", "target": "fra"})
    assert (french.source.language, french.target.language, french.target.language_id) == ("de", "fra", None)
    assert loaded.in_languages({"source": "de", "target": golden["language"]}) == french
    rows = marian_tokenizer.rows_of_ids(marian_tokenizer.read_vocabulary(marian, NAME))
    (ids,) = french.source.encode([golden["text"].removeprefix(golden["language"]).strip()])
    assert rows[[*ids, SPECIAL_IDS["eos"]]].tolist() == golden["ids"]
    assert french.source != loaded.in_languages({"source": "", "target": "pt_BR"}).source


@pytest.mark.parametrize(
    "target, message",
    [
        ("", "input.target_language is empty, but the tokenizers have 1 language, of which each source begins with on"),
        ("fr", "input.target_language is 'fr', but the tokenizers have 1 language: fra.*Did you mean fra"),
        ("corpus", "input.target_language is corpus, .* but the texts are of no corpus. Pass --target_language=NAME w"),
    ],
)
def test_a_translation_needs_a_language_of_the_model(marian, tmp_path, target, message):
    edited(renamed(">>fra<<"))(marian)
    tokenizer_files.write(convert(marian), tmp_path / "tokenizers", NAME)
    loaded = Tokenizers.load(tmp_path / "tokenizers")
    with pytest.raises(UserError, match=message):
        loaded.in_languages({"source": "", "target": target})
    if target != "corpus":
        with pytest.raises(UserError, match=message):
            loaded.check_languages({"source": "", "target": target})


def edited(change):
    def spoil(directory):
        ids = json.loads((directory / VOCABULARY).read_text())
        change(ids)
        (directory / VOCABULARY).write_text(json.dumps(ids))

    return spoil


def renamed(text: str, number: int = 5):
    def change(ids: dict[str, int]):
        ids[text] = ids.pop(next(each for each, other in ids.items() if other == number))

    return change


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda d: (d / "source.spm").unlink(), "cannot read source.spm .No such file.*copy the tokenizer's files, to"),
        (lambda d: (d / "target.spm").write_bytes(b"x"), "target.spm is not a complete SentencePiece model; copy it a"),
        (lambda d: (d / VOCABULARY).unlink(), "cannot read vocab.json"),
        (lambda d: (d / VOCABULARY).write_text("[]"), "vocab.json is a list; expected an object"),
        (edited(lambda ids: ids.update({"x": ids.pop("</s>")})), "vocab.json does not number </s>, <unk>, <pad> and"),
        (edited(lambda ids: ids.update(extra=10**9)), "vocab.json does not number </s>, <unk>, <pad> and pieces from"),
        (edited(lambda ids: ids.update({"</s>": "0"})), "vocab.json does not number </s>, <unk>, <pad> and"),
        (lambda d: (d / VOCABULARY).write_text('{"</s>": 0, "<unk>": 1, "<pad>": 2}'), "vocab.json does not number"),
        (edited(renamed("a\0b")), "vocab.json has the piece 'a.x00b', which is no text; copy it again"),
        (
            edited(renamed("x" * 100_000)),
            "source.spm with the pieces of the JSON files is no SentencePiece model .*; copy the files again",
        ),
    ],
)
def test_damaged_files_are_errors(marian, spoil, message):
    spoil(marian)
    with pytest.raises(UserError, match=f"{NAME}: {message}"):
        convert(marian)
