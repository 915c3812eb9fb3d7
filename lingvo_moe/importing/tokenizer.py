"""The tokenizers of M2M-100 and NLLB-200 as ours: a SentencePiece model with our special ids and a piece per language.

Hugging Face's files are a SentencePiece model of the pieces, which lacks padding and languages, and JSON files. Ids are
those of fairseq: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the pieces, then the languages. NLLB-200's pieces are in
the order of the SentencePiece model; M2M-100's have the ids of vocab.json. Ours have the special ids of
`data.tokenizer`; all others are the same.

vocab.json may lack pieces of the SentencePiece model. Hugging Face reads these as unknown. Here they are unused pieces,
which SentencePiece splits into smaller ones; single characters are unknown.
"""

from __future__ import annotations

import collections
import json
import pathlib
import re
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.data.tokenizer import MANIFEST, SIDES, SPECIAL_IDS, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing.model_directory import read_json
from lingvo_moe.utils import output_files
from lingvo_moe.utils.hashes import sha256

FILE = "shared.model"
_PIECES = "sentencepiece.bpe.model"
_FAIRSEQ = {"bos": 0, "pad": 1, "eos": 2, "unk": 3}
_NAMES = {"pad": "<pad>", "eos": "</s>", "bos": "<s>", "unk": "<unk>"}
_MASK = "<mask>"
_VOCABULARY = "vocab.json"
_NOT_IN_PIECES = re.compile("[\0\ud800-\udfff]")
_MOST_UNUSED = 1024  # ids between those of pieces and languages; of a corrupt file
_FIRST = ["<unk>", "<s>", "</s>"]  # of the SentencePiece model
# The rows of fairseq's table with our special ids, in the order of these.
ROWS_OF_SPECIAL_IDS = tuple(_FAIRSEQ[name] for name in sorted(SPECIAL_IDS, key=SPECIAL_IDS.__getitem__))


def convert(directory: pathlib.Path, name: str) -> Tokenizer:
    """Reads the tokenizer of a model's directory.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: a file is missing or corrupt, or it is the tokenizer of a model of another kind.
    """
    model = _read_pieces(directory, name)
    pieces = {piece.piece: piece for piece in model.pieces[len(_FIRST) :]}
    by_id, missing = _pieces_by_id(pieces, directory, name)
    added = _added(directory, name, first=max(by_id) + 1)
    _check_ids(added, by_id, name)
    by_id |= {number: _piece(text, "UNUSED" if text == _MASK else "CONTROL") for number, text in added.items()}
    by_id |= {number: _piece(_NAMES[special], "CONTROL") for special, number in SPECIAL_IDS.items()}
    by_id[SPECIAL_IDS["unk"]] = _piece(_NAMES["unk"], "UNKNOWN")
    ours = [by_id.get(number) or _piece(f"<unused {number}>", "UNUSED") for number in range(max(by_id) + 1)] + missing
    if twice := [text for text, count in collections.Counter(piece.piece for piece in ours).items() if count > 1]:
        raise UserError(f"{name}: {twice[0]!r} is a piece of {_PIECES} and a token of the JSON files; copy them again.")
    tokenizer = Tokenizer(_with_pieces(model, ours))
    tokenizer.check(directory / _PIECES)
    if not tokenizer.languages:
        raise UserError(f"{name}: its tokenizer has no languages; expected that of M2M-100, NLLB-200 or NLLB-MoE.")
    return tokenizer


def _pieces_by_id(pieces: dict[str, Any], directory: pathlib.Path, name: str) -> tuple[dict[int, Any], list[Any]]:
    """Returns the pieces by id, and unused ones for those without an id."""
    if not pieces:
        raise UserError(f"{name}: {_PIECES} has no pieces besides {_FIRST}; copy it again.")
    if not (directory / _VOCABULARY).exists():
        return dict(enumerate(pieces.values(), start=_FAIRSEQ["unk"] + 1)), []
    ids = _read_vocabulary(directory, name)
    by_id = {number: pieces.get(text) or _piece(text, "UNUSED") for text, number in ids.items()}
    without = [text for text in pieces if text not in ids and len(text) > 1]
    return by_id, [_piece(text, "UNUSED", pieces[text].score) for text in without]


def _check_ids(added: dict[int, str], by_id: dict[int, Any], name: str):
    """Raises UserError for tokens with ids of pieces, or far from these."""
    if wrong := sorted(added.keys() & by_id.keys()):
        raise UserError(
            f"{name}: the id {wrong[0]} is that of {added[wrong[0]]!r} and of the piece {by_id[wrong[0]].piece!r}; "
            f"{_PIECES} and the JSON files are not of the same model."
        )
    least, most = min([*by_id, *added]), max([*by_id, *added])
    if least < 0 or most > len(by_id) + len(added) + _MOST_UNUSED:
        raise UserError(f"{name}: the JSON files have ids from {least} to {most}; copy them again.")


def _with_pieces(model: Any, pieces: list[Any]) -> bytes:
    """Returns the SentencePiece model with other pieces, which begin with ours of special ids."""
    del model.pieces[:]
    model.pieces.extend(pieces)
    for special, number in SPECIAL_IDS.items():
        setattr(model.trainer_spec, f"{special}_id", number)
        setattr(model.trainer_spec, f"{special}_piece", _NAMES[special])
    model.trainer_spec.vocab_size = len(pieces)
    return model.SerializeToString(deterministic=True)


def write(tokenizer: Tokenizer, directory: pathlib.Path, name: str):
    """Writes the directory of tokenizers that both sides share, or completes one that an interrupted import began.

    Raises:
      UserError: which begins with `name`; the directory has other files, or nothing can be written there.
    """
    entry = {"file": FILE, "sha256": sha256(tokenizer.model), "vocabulary_size": tokenizer.vocabulary_size}
    manifest = json.dumps({"ids": SPECIAL_IDS, **dict.fromkeys(SIDES, entry)}, indent=1) + "\n"
    files = {directory / FILE: tokenizer.model, directory / MANIFEST: manifest.encode()}
    check_new(directory, name)
    for path, content in files.items():
        if path.exists() and path.read_bytes() != content:
            raise UserError(f"{name}: there is another {directory.name}/{path.name} already; name a new directory.")
    directory.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        with output_files.atomic_path(path, sync=True) as partial:
            partial.write_bytes(content)


def check_new(directory: pathlib.Path, name: str):
    """Raises UserError, which begins with `name`, if `write` would mix its files with others in the directory."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{name}: {directory.name} there is a file; name a new directory.")
    others = [path.name for path in directory.iterdir() if not _is_own(path.name)] if directory.exists() else []
    if others:
        raise UserError(f"{name}: there is a {directory.name}/{min(others)} already; name a new directory.")


def _is_own(file: str) -> bool:
    """Returns whether `write` makes such a file, which it names otherwise until it is complete."""
    return file.partition(".partial-")[0] in (FILE, MANIFEST)


def _piece(text: str, kind: str, score: float = 0.0) -> Any:
    """Returns a piece of a SentencePiece model as a message."""
    messages: Any = sentencepiece_model_pb2  # protobuf makes its classes when it is imported
    pieces = messages.ModelProto.SentencePiece
    return pieces(piece=text, type=pieces.Type.Value(kind), score=score)


def _read_vocabulary(directory: pathlib.Path, name: str) -> dict[str, int]:
    """Returns the ids of pieces in vocab.json, without special ids."""
    ids = read_json(directory / _VOCABULARY, name)
    special = {text: _FAIRSEQ[each] for each, text in _NAMES.items()}
    others = {text: number for text, number in ids.items() if text not in special}
    numbers, first = list(others.values()), len(special)
    is_complete = all(type(number) is int for number in numbers) and sorted(numbers) == list(
        range(first, first + len(numbers))
    )
    if wrong := [text for text in others if not text or _NOT_IN_PIECES.search(text)]:
        raise UserError(f"{name}: {_VOCABULARY} has the piece {wrong[0]!r}, which is no text; copy it again.")
    if {text: ids.get(text) for text in special} != special or not is_complete:
        raise UserError(
            f"{name}: {_VOCABULARY} does not number {', '.join(special)} and then all pieces, as M2M-100's does; "
            f"copy it again."
        )
    return others


def _read_pieces(directory: pathlib.Path, name: str) -> Any:
    """Returns the SentencePiece model as a message."""
    messages: Any = sentencepiece_model_pb2
    try:
        content = (directory / _PIECES).read_bytes()
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(content)
    except OSError as error:
        raise UserError(f"{name}: cannot read {_PIECES} ({error.strerror}); copy the tokenizer's files, too.") from None
    except RuntimeError:
        raise UserError(f"{name}: {_PIECES} is not a complete SentencePiece model; copy it again.") from None
    model = messages.ModelProto.FromString(content)
    if (first := [piece.piece for piece in model.pieces[: len(_FIRST)]]) != _FIRST:
        raise UserError(
            f"{name}: {_PIECES} begins with the pieces {first}; expected {_FIRST}, as fairseq's; copy it again."
        )
    return model


def _added(directory: pathlib.Path, name: str, first: int) -> dict[int, str]:
    """Returns the ids and names of what the SentencePiece model lacks, but for special ids.

    Files of different versions of the library have them: tokenizer.json; tokenizer_config.json; or, in order from the
    id `first` on, special_tokens_map.json.
    """
    readers = {
        "tokenizer.json": lambda content: {
            int(entry["id"]): _text(entry["content"]) for entry in content.get("added_tokens", [])
        },
        "tokenizer_config.json": lambda content: {
            int(number): _text(entry["content"]) for number, entry in content.get("added_tokens_decoder", {}).items()
        },
        "special_tokens_map.json": lambda content: {
            number: _text(entry if isinstance(entry, str) else entry["content"])
            for number, entry in enumerate(content.get("additional_special_tokens", []), start=first)
        },
    }
    special = {*_FAIRSEQ.values()}
    for file, read in readers.items():
        content = read_json(directory / file, name) if (directory / file).exists() else {}
        try:
            found = {number: text for number, text in sorted(read(content).items()) if number not in special}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise UserError(f"{name}: {file} does not list tokens as it should; copy the files again.") from None
        if {*found.values()} - {_MASK}:
            return found
    return {}


def _text(content: Any) -> str:
    """Returns the name of a token; raises ValueError if it is none."""
    if not isinstance(content, str) or not content or not content.isprintable():
        raise ValueError(f"{content!r} is not the name of a token")
    return content
