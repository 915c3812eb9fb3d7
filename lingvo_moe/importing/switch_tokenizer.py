"""The tokenizer of Switch Transformers, which is T5's, as ours.

Hugging Face's file is spiece.model, whose pieces have the ids of the model: `<pad>` 0, `</s>` 1, `<unk>` 2, and then
the others. After them come the sentinels, which stand for gaps of a text, from `<extra_id_99>` to `<extra_id_0>`. The
decoder's input begins with `<pad>`, here, too. Ours have the ids of `t5_models.rows_of_ids`.

A sentinel is one together with the space before it, as there.
"""

from __future__ import annotations

import pathlib

from lingvo_moe.data.tokenizer import SIDES, UNKNOWN_LANGUAGE, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing import sentencepiece_models
from lingvo_moe.importing.model_directory import read_json
from lingvo_moe.importing.sentencepiece_models import piece

FILE = "spiece.model"
IDS = {"pad": 0, "eos": 1, "unk": 2}
_FIRST = ("<pad>", "</s>", "<unk>")
_CONFIG, _SENTINELS, _MOST_SENTINELS = "tokenizer_config.json", 100, 1000


def convert(directory: pathlib.Path, name: str) -> dict[str, Tokenizer]:
    """Reads the tokenizer of both sides, by side.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: a file is missing or corrupt, or the tokenizer is that of another model.
    """
    file = directory / FILE
    model = sentencepiece_models.read(file, name, _FIRST)
    pieces = sentencepiece_models.pieces_of(model, file, name, _FIRST).values()
    special = sentencepiece_models.special_pieces()
    count = _sentinels(directory, name)
    sentinels = [piece(f"\u2581<extra_id_{number}>", "USER_DEFINED") for number in reversed(range(count))]
    ours = [*(special[number] for number in sorted(special)), *pieces, *sentinels]
    content = sentencepiece_models.with_pieces(model, ours, file, name)
    tokenizer = Tokenizer(content, own_language=UNKNOWN_LANGUAGE)
    tokenizer.check(file)
    return dict.fromkeys(SIDES, tokenizer)


def _sentinels(directory: pathlib.Path, name: str) -> int:
    """Returns how many sentinels there are."""
    config = read_json(directory / _CONFIG, name) if (directory / _CONFIG).exists() else {}
    count = config.get("extra_ids", _SENTINELS)
    if type(count) is not int or not 0 <= count <= _MOST_SENTINELS:
        raise UserError(
            f"{name}: {_CONFIG} has extra_ids {count!r}; expected a whole number from 0 to {_MOST_SENTINELS}."
        )
    return count
