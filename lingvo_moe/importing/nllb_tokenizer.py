"""NLLB-200's tokenizer as one of ours: a SentencePiece model with our special ids and a control piece per language.

Hugging Face's files are the SentencePiece model of the pieces, which lacks padding and languages, and JSON files that
give ids to these. Ids are those of fairseq: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, the pieces of the SentencePiece
model after its first three, shifted by one, the languages, `<mask>`. Ours have the special ids of `data.tokenizer`; all
others are the same.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.data.tokenizer import MANIFEST, SIDES, SPECIAL_IDS, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing.model_directory import read_json
from lingvo_moe.utils.hashes import sha256

FILE = "shared.model"
_PIECES = "sentencepiece.bpe.model"
_FAIRSEQ = {"bos": 0, "pad": 1, "eos": 2, "unk": 3}
_NAMES = {"pad": "<pad>", "eos": "</s>", "bos": "<s>", "unk": "<unk>"}
_MASK = "<mask>"
_SPECIAL_TOKENS = "special_tokens_map.json"
_UNSHIFTED = 3  # pieces of the SentencePiece model that have other ids: unknown, bos and eos
# The rows of fairseq's table with our special ids, in the order of these.
ROWS_OF_SPECIAL_IDS = tuple(_FAIRSEQ[name] for name in sorted(SPECIAL_IDS, key=SPECIAL_IDS.__getitem__))


def convert(directory: pathlib.Path, name: str) -> Tokenizer:
    """Reads the tokenizer of a model's directory.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: a file is missing or corrupt, or it is not the tokenizer of an NLLB model.
    """
    messages: Any = sentencepiece_model_pb2  # protobuf makes its classes when it is imported
    if (directory / "vocab.json").exists():
        raise UserError(
            f"{name}: its tokenizer has a vocab.json, as that of M2M-100; expected one of NLLB-200, which has more "
            f"languages, or of NLLB-MoE."
        )
    model = _read_pieces(directory, name, messages)
    by_id = {_FAIRSEQ["unk"] + number + 1: piece for number, piece in enumerate(model.pieces[_UNSHIFTED:])}
    added = _added(directory, name, first=len(model.pieces) + 1)
    if wrong := sorted(added.keys() & by_id.keys()):
        raise UserError(
            f"{name}: the id {wrong[0]} is that of {added[wrong[0]]!r} and of the piece {by_id[wrong[0]].piece!r}; "
            f"{_PIECES} and the JSON files are not of the same model."
        )
    size, kinds = max([*by_id, *added]) + 1, messages.ModelProto.SentencePiece
    ours = [kinds(piece=_NAMES[special], type=kinds.CONTROL) for special in sorted(SPECIAL_IDS, key=SPECIAL_IDS.get)]
    ours[SPECIAL_IDS["unk"]].type = kinds.UNKNOWN
    for number in range(len(ours), size):
        text = added.get(number, f"<unused {number}>")
        kind = kinds.CONTROL if number in added and text != _MASK else kinds.UNUSED
        ours.append(by_id.get(number) or kinds(piece=text, type=kind))
    del model.pieces[:]
    model.pieces.extend(ours)
    for special, number in SPECIAL_IDS.items():
        setattr(model.trainer_spec, f"{special}_id", number)
        setattr(model.trainer_spec, f"{special}_piece", _NAMES[special])
    model.trainer_spec.vocab_size = size
    tokenizer = Tokenizer(model.SerializeToString(deterministic=True))
    tokenizer.check(directory / _PIECES)
    if not tokenizer.languages:
        raise UserError(f"{name}: its tokenizer has no languages; expected that of NLLB-200 or NLLB-MoE.")
    return tokenizer


def write(tokenizer: Tokenizer, directory: pathlib.Path):
    """Writes the directory of tokenizers that both sides share."""
    directory.mkdir(parents=True)
    (directory / FILE).write_bytes(tokenizer.model)
    entry = {"file": FILE, "sha256": sha256(tokenizer.model), "vocabulary": tokenizer.vocabulary_size}
    manifest = {"ids": SPECIAL_IDS, **dict.fromkeys(SIDES, entry)}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _read_pieces(directory: pathlib.Path, name: str, messages: Any) -> Any:
    """Returns the SentencePiece model as a message."""
    try:
        content = (directory / _PIECES).read_bytes()
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(content)
    except OSError as error:
        raise UserError(f"{name}: cannot read {_PIECES} ({error.strerror}); copy the tokenizer's files, too.") from None
    except RuntimeError:
        raise UserError(f"{name}: {_PIECES} is not a complete SentencePiece model; copy it again.") from None
    model = messages.ModelProto.FromString(content)
    first = [piece.piece for piece in model.pieces[:_UNSHIFTED]]
    if first != ["<unk>", "<s>", "</s>"]:
        raise UserError(f"{name}: {_PIECES} begins with the pieces {first}; expected <unk>, <s> and </s>, as NLLB's.")
    return model


def _added(directory: pathlib.Path, name: str, first: int) -> dict[int, str]:
    """Returns the ids and names of what the SentencePiece model lacks, but for special ids.

    Files of different versions of the library have them: tokenizer.json; tokenizer_config.json; or, in order from the
    id `first` on, special_tokens_map.json.
    """
    own = _optional(directory / "tokenizer_config.json", name).get("added_tokens_decoder")
    try:
        if (directory / "tokenizer.json").exists():
            file, listed = "tokenizer.json", read_json(directory / "tokenizer.json", name)["added_tokens"]
            found = {int(entry["id"]): str(entry["content"]) for entry in listed}
        elif own:
            file, found = "tokenizer_config.json", {int(number): str(entry["content"]) for number, entry in own.items()}
        else:
            file, listed = _SPECIAL_TOKENS, read_json(directory / _SPECIAL_TOKENS, name)["additional_special_tokens"]
            found = {number: _content(entry) for number, entry in enumerate(listed, start=first)}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{name}: {file} does not list the languages as NLLB's does; copy the files again.") from None
    special = set(_FAIRSEQ.values())
    return {number: text for number, text in sorted(found.items()) if number not in special}


def _content(entry: Any) -> str:
    """Returns the text of a token, which is a string or an object that has it."""
    return entry if isinstance(entry, str) else str(entry["content"])


def _optional(path: pathlib.Path, name: str) -> dict[str, Any]:
    return read_json(path, name) if path.exists() else {}
