"""How files go wrong: bytes lost, turned around or replaced; JSON that is well formed and says something else; no file at all."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

Bytes = Callable[[bytes, random.Random], bytes]
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


def _cut(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.randrange(len(data) + 1)]


def _flip(data: bytes, generator: random.Random) -> bytes:
    if not data:
        return b"\1"
    at = generator.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]


def _insert(data: bytes, generator: random.Random) -> bytes:
    at = generator.randrange(len(data) + 1)
    new = generator.choice(
        [
            b"\0",
            b"\xff\xfe",
            b"\xc3",
            b"\r",
            b"\t",
            b"\n\n",
            b'"',
            b"\\",
            b"{{PLURAL:{{",
            b"\xef\xbb\xbf",
            generator.randbytes(20),
        ]
    )
    return data[:at] + new + data[at:]


def _drop(data: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(data) + 1)
    return data[:start] + data[start + generator.randint(1, 64) :]


def _repeat(data: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(data) + 1)
    return data[:start] + data[start : start + 200] + data[start:]


def _zero(data: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(data) + 1)
    length = min(len(data) - start, generator.randint(1, 512))
    return data[:start] + bytes(length) + data[start + length :]


def _replace(data: bytes, generator: random.Random) -> bytes:
    return generator.choice(
        [
            b"",
            b"\n",
            b"{}",
            b"[]",
            b"null",
            b"[" * 100_000,
            b"\x1f\x8b",
            b"PK\x03\x04",
            b"1e999",
            generator.randbytes(len(data)),
        ]
    )


def _line_ends(data: bytes, generator: random.Random) -> bytes:
    return data.replace(b"\n", b"\r\n") if generator.random() < 0.5 else data.replace(b"\t", b" ")


BYTES: tuple[Bytes, ...] = (_cut, _cut, _flip, _flip, _insert, _insert, _drop, _repeat, _zero, _replace, _line_ends)


def change_json(data: bytes, generator: random.Random) -> bytes:
    """One entry, at any depth, is dropped, replaced or renamed; data that is no JSON is cut."""
    try:
        content = json.loads(data)
    except ValueError:
        return _cut(data, generator)
    places = list(_places(content))
    if not places:
        return json.dumps(generator.choice(_VALUES)).encode()
    holder, key = generator.choice(places)
    how = generator.random()
    if how < 0.3:
        del holder[key]
    elif how < 0.9 or isinstance(holder, list):
        holder[key] = generator.choice(_VALUES)
    else:
        holder[f"{key}x"] = holder.pop(key)
    return json.dumps(content, indent=1).encode()


def _places(content: Any):
    """Every (dict or list, key or index) below."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from _places(content[key])


def damage(path: pathlib.Path, generator: random.Random):
    """Does one thing to a file that is there."""
    how = generator.random()
    if how < 0.06:
        path.unlink()
    elif how < 0.1:
        path.unlink()
        path.mkdir()
    elif how < 0.13:
        path.unlink()
        path.symlink_to("nowhere")
    elif path.suffix == ".json" and how < 0.65:
        path.write_bytes(change_json(path.read_bytes(), generator))
    else:
        path.write_bytes(generator.choice(BYTES)(path.read_bytes(), generator))


def any_file(directory: pathlib.Path, generator: random.Random) -> pathlib.Path:
    """One of the files below a directory."""
    return generator.choice(sorted(path for path in directory.rglob("*") if path.is_file()))
