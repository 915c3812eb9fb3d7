"""The JSON files that the page is made of: each is replaced by a complete one, or stays."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from lingvo_moe.utils import output_files


def save(content: Any, path: pathlib.Path):
    """Writes plain values as JSON."""
    with output_files.atomic_writer(str(path)) as file:
        file.write(f"{json.dumps(content, indent=1)}\n")
