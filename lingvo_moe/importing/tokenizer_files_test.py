"""Files of tokenizers are completed after an interruption, and never replace or join others."""

from __future__ import annotations

import pytest

from lingvo_moe.data.tokenizer import SIDES, Tokenizer, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.importing import fairseq_tokenizer, marian_tokenizer, tokenizer_files
from lingvo_moe.testing import hugging_face_models

NAME = "--input=model"


def imported(model: str) -> dict[str, Tokenizer]:
    directory = hugging_face_models.TOKENIZERS / model
    if model == "marian":
        return marian_tokenizer.convert(directory, marian_tokenizer.read_vocabulary(directory, NAME), NAME)
    return dict.fromkeys(SIDES, fairseq_tokenizer.convert(directory, NAME))


@pytest.mark.parametrize("model, file", [("nllb", "shared.model"), ("marian", "source.model")])
def test_an_interrupted_import_is_continued(model, file, tmp_path):
    """Its files are completed; those of others are never replaced."""
    found, directory = imported(model), tmp_path / "tokenizers"
    directory.mkdir()
    (directory / f"{file}.partial-17").write_bytes(found["source"].model[:100])
    tokenizer_files.write(found, directory, NAME)
    tokenizer_files.write(found, directory, NAME)
    assert Tokenizers.load(directory).by_side == found
    (directory / file).write_bytes(b"another")
    with pytest.raises(UserError, match=f"--input=model: there is another tokenizers/{file} already; name a new"):
        tokenizer_files.write(found, directory, NAME)
    assert (directory / file).read_bytes() == b"another"
    (directory / "other.model").touch()
    with pytest.raises(UserError, match="--input=model: there is a tokenizers/other.model already; name a new dir"):
        tokenizer_files.check_new(directory, NAME)
