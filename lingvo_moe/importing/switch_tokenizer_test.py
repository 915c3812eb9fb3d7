"""The tokenizer of Switch Transformers has our special ids and sentinels, and bad files are errors."""

from __future__ import annotations

import json
import shutil

import pytest

from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.importing import switch_tokenizer, t5_models, tokenizer_files
from lingvo_moe.testing import hugging_face_models

NAME, CONFIG = "--input=model", "tokenizer_config.json"


@pytest.fixture
def switch(tmp_path):
    return shutil.copytree(hugging_face_models.TOKENIZERS / "switch", tmp_path / "switch")


def test_rows_are_those_of_our_ids():
    """Padding, end, bos, which is not used and stands for unknown, unknown, and the pieces."""
    assert t5_models.rows_of_ids(switch_tokenizer.IDS, 6).tolist() == [0, 1, 2, 2, 3, 4, 5]


def test_both_sides_have_sentinels(switch, tmp_path):
    """Texts come back as they were written; the languages of both sides are unknown."""
    found = switch_tokenizer.convert(switch, NAME)
    tokenizer_files.write(found, tmp_path / "tokenizers", NAME)
    loaded = Tokenizers.load(tmp_path / "tokenizers")
    assert loaded.by_side == found and loaded.is_shared and loaded.source.vocabulary_size == 311
    assert (loaded.source.own_language, loaded.source.languages) == ("und", ())
    assert loaded.source.pieces(SPECIAL_IDS.values()) == ["<pad>", "</s>", "<s>", "<unk>"]
    texts = ["<extra_id_0> read the <extra_id_9>.", "The <extra_id_1>", "<extra_id_0><extra_id_1>"]
    ids = loaded.target.encode(texts)
    assert [(row == 310).sum() for row in ids] == [1, 0, 1] and (ids[0] == 301).sum() == 1
    assert loaded.target.decode(ids)[:2] == texts[:2]


@pytest.mark.parametrize("config, count", [(None, 100), ({}, 100), ({"extra_ids": 0}, 0), ({"extra_ids": 3}, 3)])
def test_there_are_as_many_sentinels_as_the_configuration_says(switch, config, count):
    """T5's hundred, where it says nothing."""
    (switch / CONFIG).unlink()
    if config is not None:
        (switch / CONFIG).write_text(json.dumps(config))
    assert switch_tokenizer.convert(switch, NAME)["source"].vocabulary_size == 301 + count


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda d: (d / "spiece.model").unlink(), "cannot read spiece.model .No such file.*copy the tokenizer's files"),
        (lambda d: (d / "spiece.model").write_bytes(b"x"), "spiece.model is not a complete SentencePiece model; copy"),
        (lambda d: (d / CONFIG).write_text("[]"), "tokenizer_config.json is a list; expected an object"),
        (lambda d: (d / CONFIG).write_text('{"extra_ids": "3"}'), "extra_ids '3'; expected a whole number from 0 to"),
        (lambda d: (d / CONFIG).write_text('{"extra_ids": 100000}'), "extra_ids 100000; expected a whole number from"),
        (
            lambda d: shutil.copy(hugging_face_models.TOKENIZERS / "madlad" / "spiece.model", d),
            "spiece.model begins with the pieces .'<unk>', '<s>', '</s>'.; expected .'<pad>', '</s>', '<unk>'.; copy",
        ),
    ],
)
def test_damaged_files_are_errors(switch, spoil, message):
    spoil(switch)
    with pytest.raises(UserError, match=f"{NAME}: .*{message}"):
        switch_tokenizer.convert(switch, NAME)
