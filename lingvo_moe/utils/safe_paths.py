"""Checks names that come from a manifest or an archive before they become paths of this machine.

A manifest or an archive may come from an untrusted source. A name from one is joined to a directory only after it has
passed `check_file_name` or `check_relative_path`, so it cannot name a file outside of that directory.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from lingvo_moe.errors import UserError

_DRIVE = re.compile(r"[A-Za-z]:")
_MAX_COMPONENT_BYTES = 255  # what common file systems allow


def check_file_name(name: object, origin: str) -> str:
    """Returns `name` if it is a plain file name, without any directory.

    Args:
      name: the value as the manifest has it; any JSON value.
      origin: what the value comes from, for the error: the manifest's path and the field.

    Raises:
      UserError: it is not a string, or it is not the name of a file inside one directory.
    """
    path = check_relative_path(name, origin)
    if len(path.parts) != 1:
        raise UserError(f"{origin}: {name!r} is not a plain file name; expected a name without a directory.")
    return path.name


def check_relative_path(path: object, origin: str) -> PurePosixPath:
    """Returns `path` if it leads to a file below the directory that it is relative to.

    Refused are absolute paths, `..`, `.` and empty components, backslashes (separators on Windows), drive letters, NUL
    and other control characters, and components that are too long for a file system.

    Args:
      path: the value as the manifest or archive has it; any JSON value.
      origin: what the value comes from, for the error: the manifest's or archive's path, and the field.

    Raises:
      UserError: it is not a string or not such a path; the message names the origin, the value and the reason.
    """
    if not isinstance(path, str):
        raise UserError(f"{origin}: {path!r} is not a path; expected a string.")
    reason = _unsafe(path)
    if reason:
        raise UserError(
            f"{origin}: the path {path!r} is refused: {reason}. Expected a relative path inside of the directory; "
            "the file may have been altered; get a new copy from a source that you trust."
        )
    return PurePosixPath(path)


def _unsafe(path: str) -> str | None:
    """Returns why `path` is refused, or None."""
    if path.startswith("/"):
        return "it is absolute"
    if "\\" in path:
        return "it has a backslash"
    if _DRIVE.match(path):
        return "it has a drive letter"
    if any(ord(character) < 32 or ord(character) == 127 or "\ud800" <= character <= "\udfff" for character in path):
        return "it has a control character or is not UTF-8"
    for component in path.split("/"):
        if component in ("", ".", ".."):
            return f"it has the component {component!r}"
        if len(component.encode()) > _MAX_COMPONENT_BYTES:
            return f"a component is longer than {_MAX_COMPONENT_BYTES} bytes"
    return None
