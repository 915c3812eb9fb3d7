"""The directory of tokenizers of an imported model, as `tools.train_tokenizer` writes one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from lingvo_moe.data.tokenizer import MANIFEST, SIDES, SPECIAL_IDS, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files
from lingvo_moe.utils.hashes import sha256

_SHARED = "shared.model"
_OF_SIDES: dict[str, str] = {side: f"{side}.model" for side in SIDES}


def write(tokenizers: Mapping[str, Tokenizer], directory: pathlib.Path, name: str):
    """Writes the directory of the tokenizers of both sides, or completes one that an interrupted import began.

    Raises:
      UserError: which begins with `name`; the directory has other files, or nothing can be written there.
    """
    is_shared = tokenizers["source"] == tokenizers["target"]
    named = {side: _SHARED if is_shared else file for side, file in _OF_SIDES.items()}
    entries = {side: _entry(named[side], tokenizer) for side, tokenizer in tokenizers.items()}
    manifest = json.dumps({"ids": SPECIAL_IDS, **entries}, indent=1) + "\n"
    models = {directory / file: tokenizers[side].model for side, file in named.items()}
    files = {**models, directory / MANIFEST: manifest.encode()}
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
    return file.partition(".partial-")[0] in (_SHARED, *_OF_SIDES.values(), MANIFEST)


def _entry(file: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what the manifest says of one side."""
    entry = {"file": file, "sha256": sha256(tokenizer.model), "vocabulary_size": tokenizer.vocabulary_size}
    others = {
        "language": tokenizer.own_language,
        "names_target": tokenizer.names_target,
        "before_language": tokenizer.before_language,
    }
    return entry | {name: value for name, value in others.items() if value}
