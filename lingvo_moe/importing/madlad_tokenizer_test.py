"""MADLAD-400's tokenizer has our special ids, its sources begin with a language, and bad files are errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.importing import madlad_tokenizer, tokenizer_files
from lingvo_moe.testing import hugging_face_models

NAME = "--input=model"
MESSAGES: Any = sentencepiece_model_pb2  # protobuf makes its classes when it is imported


@pytest.fixture
def madlad(tmp_path):
    return shutil.copytree(hugging_face_models.TOKENIZERS / "madlad", tmp_path / "madlad")


def test_rows_are_those_of_our_ids():
    """Padding, end, bos, which is not used and stands for unknown, unknown, and the pieces."""
    assert madlad_tokenizer.rows_of_ids(6).tolist() == [1, 2, 0, 0, 3, 4, 5]


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
    rows = madlad_tokenizer.rows_of_ids(original.vocab_size())
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
        (lambda d: changed(d, without_languages), "spiece.model has no pieces for languages, such as <2de>; of models"),
        (lambda d: changed(d, unused), "spiece.model reads <2de> as the pieces .*; expected one for the language"),
    ],
)
def test_damaged_files_are_errors(madlad, spoil, message):
    """And those of other models of T5's class."""
    spoil(madlad)
    with pytest.raises(UserError, match=f"{NAME}: {message}"):
        madlad_tokenizer.convert(madlad, NAME)


def test_a_missing_piece_before_the_language_is_an_error(madlad, tmp_path):
    """A manifest that belongs to another model."""
    tokenizer_files.write(madlad_tokenizer.convert(madlad, NAME), tmp_path / "tokenizers", NAME)
    manifest = tmp_path / "tokenizers" / "tokenizer.json"
    assert manifest.read_text().count(r'"before_language": "\u2581"') == 1
    manifest.write_text(manifest.read_text().replace(r'"before_language": "\u2581"', '"before_language": "none"'))
    with pytest.raises(UserError, match="source.model has no piece 'none', as its manifest says; copy both again"):
        Tokenizers.load(tmp_path / "tokenizers")
