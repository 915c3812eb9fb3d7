"""Strategies that corrupt files: lost, flipped and replaced bytes, other JSON content, missing files."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

Edit = Callable[[bytes], bytes]
Corruption = Callable[[pathlib.Path], None]

# Taken modulo the length of a file, so that a strategy does not depend on the file's content.
_POSITIONS = st.integers(0, 2**24)
_INSERTED = (b"\0", b"\xff\xfe", b"\xc3", b"\r", b"\t", b"\n\n", b'"', b"\\", b"{{PLURAL:{{", b"\xef\xbb\xbf")
_CONTENTS = (b"", b"\n", b"{}", b"[]", b"null", b"[" * 100_000, b"\x1f\x8b", b"PK\x03\x04", b"1e999")
_VALUES = (
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../etc/passwd",
    "\0",
    [],
    [1],
    {},
    {"a": 1},
    [[[]]],
    "é" * 50,
)


def _truncate(data: bytes, at: int) -> bytes:
    return data[: at % (len(data) + 1)]


def _flip(data: bytes, at: int, bit: int) -> bytes:
    if not data:
        return b"\1"
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _insert(data: bytes, at: int, new: bytes) -> bytes:
    at %= len(data) + 1
    return data[:at] + new + data[at:]


def _drop(data: bytes, at: int, length: int) -> bytes:
    at %= len(data) + 1
    return data[:at] + data[at + length :]


def _repeat(data: bytes, at: int) -> bytes:
    at %= len(data) + 1
    return data[:at] + data[at : at + 200] + data[at:]


def _zero(data: bytes, at: int, length: int) -> bytes:
    at %= len(data) + 1
    length = min(len(data) - at, length)
    return data[:at] + bytes(length) + data[at + length :]


def _replace(data: bytes, new: bytes) -> bytes:
    del data
    return new


def _substitute(data: bytes, old: bytes, new: bytes) -> bytes:
    return data.replace(old, new)


# Each edit of bytes with strategies of its parameters; how often each is drawn.
_EDITS: tuple[tuple[Callable[..., bytes], Mapping[str, st.SearchStrategy], int], ...] = (
    (_truncate, {"at": _POSITIONS}, 2),
    (_flip, {"at": _POSITIONS, "bit": st.integers(0, 7)}, 2),
    (_insert, {"at": _POSITIONS, "new": st.sampled_from(_INSERTED) | st.binary(max_size=20)}, 2),
    (_drop, {"at": _POSITIONS, "length": st.integers(1, 64)}, 1),
    (_repeat, {"at": _POSITIONS}, 1),
    (_zero, {"at": _POSITIONS, "length": st.integers(1, 512)}, 1),
    (_replace, {"new": st.sampled_from(_CONTENTS) | st.binary(max_size=1000)}, 1),
    (_substitute, {"old": st.just(b"\n"), "new": st.just(b"\r\n")}, 1),
    (_substitute, {"old": st.just(b"\t"), "new": st.just(b" ")}, 1),
)


def weighted(strategies: Mapping[Any, int]) -> st.SearchStrategy:
    """Returns a strategy that draws from each strategy as often as its weight says."""
    return st.sampled_from([strategy for strategy, weight in strategies.items() for _ in range(weight)]).flatmap(
        lambda strategy: strategy
    )


def byte_edits() -> st.SearchStrategy[Edit]:
    """Draws one edit of a file's bytes."""
    return weighted(
        {st.builds(functools.partial, st.just(edit), **parameters): weight for edit, parameters, weight in _EDITS}
    )


def json_edits() -> st.SearchStrategy[Edit]:
    """Draws the removal, replacement or renaming of one entry of a JSON document, at any depth."""
    how = st.sampled_from(("remove",) * 3 + ("replace",) * 6 + ("rename",))
    return st.builds(functools.partial, st.just(edit_json), at=_POSITIONS, how=how, value=st.sampled_from(_VALUES))


def edit_json(data: bytes, at: int, how: str, value: Any) -> bytes:
    """Edits one entry of a JSON document; truncates data that is not JSON."""
    try:
        content = json.loads(data)
    except ValueError:
        return _truncate(data, at)
    entries = list(_entries(content))
    if not entries:
        return json.dumps(value).encode()
    holder, key = entries[at % len(entries)]
    if how == "remove":
        del holder[key]
    elif how == "replace" or isinstance(holder, list):
        holder[key] = value
    else:
        holder[f"{key}x"] = holder.pop(key)
    return json.dumps(content, indent=1).encode()


def _entries(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every (dict or list, key or index) below."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from _entries(content[key])


@st.composite
def corruptions(draw: st.DrawFn, is_json: bool) -> Corruption:
    """Draws one corruption of an existing file."""
    how = draw(st.sampled_from(("edit",) * 17 + ("remove", "directory", "link")))
    if how != "edit":
        return functools.partial(_replace_file, how=how)
    edits = weighted({json_edits(): 3, byte_edits(): 2}) if is_json else byte_edits()
    return functools.partial(_rewrite, edit=draw(edits))


def _rewrite(path: pathlib.Path, edit: Edit):
    path.write_bytes(edit(path.read_bytes()))


def _replace_file(path: pathlib.Path, how: str):
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "link":
        path.symlink_to("nowhere")
