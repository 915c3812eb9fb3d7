"""MADLAD-400's tokenizer has our special ids, its sources begin with a language, and bad files are errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.importing import madlad_tokenizer, t5_models, tokenizer_files
from lingvo_moe.testing import hugging_face_models

NAME = "--input=model"
MESSAGES: Any = sentencepiece_model_pb2  # protobuf makes its classes when it is imported


@pytest.fixture
def madlad(tmp_path):
    return shutil.copytree(hugging_face_models.TOKENIZERS / "madlad", tmp_path / "madlad")


def test_a_source_begins_with_a_space_and_the_language_of_its_translation(madlad, tmp_path):
    """Texts have no other languages, nor have targets; the directory of tokenizers keeps all of it."""
    found = madlad_tokenizer.convert(madlad, NAME)
    tokenizer_files.write(found, tmp_path / "tokenizers", NAME)
    loaded = Tokenizers.load(tmp_path / "tokenizers")
    assert loaded.by_side == found and loaded.is_shared
    assert loaded.source.language_names == ("en", "fr", "de", "ru", "sw") and not loaded.target.languages
    french = loaded.in_languages({"source": "", "target": "fr"})
    assert french.source.pieces(french.source.prefix) == ["▁", "<2fr>"] and french.target.prefix == ()
    original = sentencepiece.SentencePieceProcessor(model_file=str(madlad / madlad_tokenizer.FILE))
    rows = t5_models.rows_of_ids(madlad_tokenizer.IDS, original.vocab_size())
    assert rows[:5].tolist() == [1, 2, 0, 0, 3]  # padding, end, bos, which stands for unknown, unknown, the first piece
    for text in ("The river is cold.", " Wo  ist 水?", ""):
        assert rows[french.source.encode([text])[0]].tolist()[2:] == original.encode(text)
        assert rows[french.target.encode([text])[0]].tolist() == original.encode(text)
    (ids,) = french.target.encode(["<2de> a"])
    assert "<2de>" not in french.target.pieces(ids) and french.target.decode([ids]) != [""]
    assert loaded.source.pieces(SPECIAL_IDS.values()) == ["<pad>", "</s>", "<s>", "<unk>"]


def test_a_language_may_begin_a_source_without_a_space(madlad):
    """Where the SentencePiece model puts none before a text."""
    changed(madlad, lambda model: setattr(model.normalizer_spec, "add_dummy_prefix", False))
    source = madlad_tokenizer.convert(madlad, NAME)["source"].into_language("fr", "f")
    assert source.before_language == "" and source.pieces(source.prefix) == ["<2fr>"]


def test_tags_of_other_things_are_no_languages(madlad):
    """The published file has tasks, scripts and regions of this form, which no text has here."""
    others = ["<2translate>", "<2Latn>", "<2CA>", "<2en_xx_simple>"]
    languages = ["<2zh_Hant>", "<2fr_CA>", "<2ms_Arab_BN>", "<2fil>"]

    def rename(model: Any):
        for piece, text in zip(model.pieces[20:], [*others, *languages]):
            piece.piece, piece.score = text, 0.0

    changed(madlad, rename)
    found = madlad_tokenizer.convert(madlad, NAME)
    assert found["source"].language_names[5:] == ("zh_Hant", "fr_CA", "ms_Arab_BN", "fil")
    for tokenizer in found.values():
        (ids,) = tokenizer.encode([" ".join(others)])
        assert not set(others) & set(tokenizer.pieces(ids))


def changed(directory, change: Callable[[Any], None]):
    file = directory / madlad_tokenizer.FILE
    model = MESSAGES.ModelProto.FromString(file.read_bytes())
    change(model)
    file.write_bytes(model.SerializeToString())


def without_languages(model: Any):
    for number, piece in enumerate(model.pieces):
        if piece.piece.startswith("<2"):
            piece.piece = f"x{number}"


def unused(model: Any):
    piece = next(piece for piece in model.pieces if piece.piece == "<2de>")
    piece.type = MESSAGES.ModelProto.SentencePiece.UNUSED


def without_space(model: Any):
    next(piece for piece in model.pieces if piece.piece == "▁").piece = "no space"


def replaced(directory, old: bytes, new: bytes):
    file = directory / madlad_tokenizer.FILE
    assert old in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(old, new, 1))  # the piece, not the trainer's settings after the pieces


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda d: (d / madlad_tokenizer.FILE).unlink(),
            "cannot read spiece.model .No such file.*copy the tokenizer's",
        ),
        (
            lambda d: (d / madlad_tokenizer.FILE).write_bytes(b"x"),
            "spiece.model is not a complete SentencePiece model; co",
        ),
        (
            lambda d: shutil.copy(hugging_face_models.TOKENIZERS / "switch" / "spiece.model", d),
            "spiece.model begins with .*; of models of T5's class, only those of MADLAD-400 can be imported",
        ),
        (lambda d: changed(d, without_languages), "spiece.model has no pieces for languages, such as <2de>; of models"),
        (lambda d: changed(d, without_space), "spiece.model reads '▁' before a language, which is none of its pieces"),
        (
            lambda d: replaced(d, b"<2de>", b"<2\xffe>"),
            "spiece.model has the piece b'<2.xffe>', which is no text; copy",
        ),
        (lambda d: changed(d, unused), "spiece.model reads <2de> as the pieces .*; expected one for the language"),
    ],
)
def test_damaged_files_are_errors(madlad, spoil, message):
    """And those of other models of T5's class."""
    spoil(madlad)
    with pytest.raises(UserError, match=f"{NAME}: {message}"):
        madlad_tokenizer.convert(madlad, NAME)


@pytest.mark.parametrize(
    "side, change, message",
    [
        (
            "source",
            {"before_language": "none"},
            "before_language is 'none', which is no piece of a text; copy the direc",
        ),
        (
            "source",
            {"before_language": "<2de>"},
            "before_language is '<2de>', which is no piece of a text; copy the dir",
        ),
        ("source", {"before_language": "\ud800"}, "tokenizer.json is corrupt or not the manifest of a tokenizer"),
        ("target", {"before_language": "▁"}, "tokenizer.json is corrupt or not the manifest of a tokenizer"),
        (
            "source",
            {"before_language": "", "names_target": False},
            "has pieces for languages, but by its manifest text",
        ),
        ("source", {"sha256": None}, "tokenizer.json is corrupt or not the manifest of a tokenizer"),
    ],
)
def test_a_manifest_that_does_not_fit_the_models_is_an_error(madlad, tmp_path, side, change, message):
    """Instead of translations into no language."""
    tokenizer_files.write(madlad_tokenizer.convert(madlad, NAME), tmp_path / "tokenizers", NAME)
    path = tmp_path / "tokenizers" / "tokenizer.json"
    manifest = json.loads(path.read_text())
    manifest[side] = {name: value for name, value in (manifest[side] | change).items() if value is not None}
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message):
        Tokenizers.load(tmp_path / "tokenizers")
