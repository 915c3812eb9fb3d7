"""Imported tokenizers have our special ids and a piece per language, and bad files are errors that name them."""

from __future__ import annotations

import json
import shutil

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.data.tokenizer import SIDES, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.importing import fairseq_tokenizer, tokenizer_files
from lingvo_moe.testing import hugging_face_models

NAME = "--input=model"
PIECES, TOKENIZER, VOCABULARY = "sentencepiece.bpe.model", "tokenizer.json", "vocab.json"


@pytest.fixture
def nllb(tmp_path):
    return shutil.copytree(hugging_face_models.TOKENIZERS / "nllb", tmp_path / "nllb")


@pytest.fixture
def m2m(tmp_path):
    return shutil.copytree(hugging_face_models.TOKENIZERS / "m2m", tmp_path / "m2m")


def keep_three_pieces(directory):
    model = sentencepiece_model_pb2.ModelProto.FromString((directory / PIECES).read_bytes())
    del model.pieces[3:]
    (directory / PIECES).write_bytes(model.SerializeToString())


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_it_is_read_like_one_of_ours(nllb, tmp_path):
    """Special ids are ours, other ids those of fairseq; `<mask>` is no language, and is not counted."""
    found = fairseq_tokenizer.convert(nllb, NAME)
    tokenizer_files.write(dict.fromkeys(SIDES, found), tmp_path / "tokenizers", NAME)
    loaded = Tokenizers.load(tmp_path / "tokenizers")
    assert loaded.is_shared and loaded.source == found and len(found.languages) == 202
    assert found.pieces(range(4)) == ["<pad>", "</s>", "<s>", "<unk>"] and found.vocabulary_size == 503
    original = sentencepiece.SentencePieceProcessor(model_file=str(nllb / PIECES))
    assert found.pieces(range(4, 301)) == [original.id_to_piece(number - 1) for number in range(4, 301)]
    english = found.in_language("eng_Latn", "f")
    assert english.language_id == 347 and english.decode(english.encode(["The river is cold."])) == [
        "The river is cold."
    ]


@pytest.mark.parametrize("file", [TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"])
def test_languages_are_found_in_files_of_any_version(nllb, file):
    """Each alone has them, with the same ids."""
    expected = fairseq_tokenizer.convert(nllb, NAME).in_language("zul_Latn", "f").language_id
    for other in (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if other != file:
            (nllb / other).unlink()
    assert fairseq_tokenizer.convert(nllb, NAME).in_language("zul_Latn", "f").language_id == expected == 502


def test_pieces_that_the_vocabulary_lacks_are_read_in_smaller_ones(m2m):
    """vocab.json gives the ids, and no text has one beyond them; a single character is unknown."""
    whole = fairseq_tokenizer.convert(m2m, NAME)
    text = "The children are playing in the garden"
    long = max(whole.pieces(whole.encode([text])[0]), key=len)
    ids = json.loads((m2m / VOCABULARY).read_text())
    last = max(ids, key=ids.get)
    ids[last], missing = ids[long], ids.pop(long)  # no gap in the ids
    assert len(long) > 2 and missing == ids[last]
    (m2m / VOCABULARY).write_text(json.dumps(ids))
    for file in ("tokenizer_config.json", "added_tokens.json"):
        (m2m / file).unlink()
    found = fairseq_tokenizer.convert(m2m, NAME)
    encoded = found.encode([text])[0].tolist()
    assert long not in found.pieces(encoded) and max(encoded) < len(ids) and 3 not in encoded
    assert found.decode([encoded]) == [text] and found.vocabulary_size == whole.vocabulary_size - 1
    assert 3 in found.encode(["z"])[0] and "z" not in ids


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda d: (d / PIECES).unlink(), "cannot read sentencepiece.bpe.model .No such file.*; copy the tokenizer's"),
        (lambda d: (d / PIECES).write_bytes(b"no model"), "bpe.model is not a complete SentencePiece model; copy it"),
        (lambda d: (d / TOKENIZER).write_text("{"), "tokenizer.json is not JSON"),
        (
            lambda d: (d / TOKENIZER).write_text('{"added_tokens": 3}'),
            "tokenizer.json does not list tokens as it should",
        ),
        (
            lambda d: edit(d / TOKENIZER, lambda c: c["added_tokens"].append({"id": 10**12, "content": "x"})),
            "the JSON files have ids from 4 to 1000000000000; copy them again",
        ),
        (
            lambda d: edit(d / TOKENIZER, lambda c: c["added_tokens"].append({"id": -1, "content": "x"})),
            "the JSON files have ids from -1 to",
        ),
        (
            lambda d: edit(d / TOKENIZER, lambda c: c["added_tokens"].append({"id": 9, "content": "x"})),
            "the id 9 is that of 'x' and of the piece",
        ),
        (
            lambda d: edit(d / TOKENIZER, lambda c: c["added_tokens"].append({"id": 510, "content": "eng_Latn"})),
            "'eng_Latn' is a piece of .* and a token of the JSON files",
        ),
        *(
            (
                lambda d, wrong=wrong: edit(d / TOKENIZER, lambda c: c["added_tokens"].append(wrong)),
                "tokenizer.json does not list tokens as it should",
            )
            for wrong in (
                {"id": float("inf"), "content": "x"},
                *({"id": 510, "content": content} for content in ("", "\ud800", "a\nb", ["x"])),
            )
        ),
        (keep_three_pieces, "sentencepiece.bpe.model has no pieces besides"),
        (
            lambda d: [(d / file).unlink() for file in (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")],
            "its tokenizer has no languages; expected that of M2M-100, NLLB-200 or NLLB-MoE",
        ),
    ],
)
def test_damaged_files_are_errors(nllb, spoil, message):
    spoil(nllb)
    with pytest.raises(UserError, match=f"--input=model: .*{message}|--input=model: {message}"):
        fairseq_tokenizer.convert(nllb, NAME)


@pytest.mark.parametrize(
    "change", [lambda c: c.update({"<s>": 7}), lambda c: c.update(extra=10**9), lambda c: c.update(extra="5")]
)
def test_a_vocabulary_that_does_not_number_all_pieces_is_an_error(m2m, change):
    edit(m2m / VOCABULARY, change)
    with pytest.raises(UserError, match="vocab.json does not number <pad>, </s>, <s>, <unk> and then all pieces"):
        fairseq_tokenizer.convert(m2m, NAME)


@pytest.mark.parametrize("text", ["", "a\0b", "\ud800"])
def test_a_piece_that_is_no_text_is_an_error(m2m, text):
    edit(m2m / VOCABULARY, lambda ids: ids.update({text: len(ids)}))
    with pytest.raises(UserError, match="--input=model: vocab.json has the piece .*, which is no text; copy it again"):
        fairseq_tokenizer.convert(m2m, NAME)
