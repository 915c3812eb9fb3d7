"""What `translate` reads: lines of a text, or the texts of a gettext catalog."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib

from lingvo_moe.cli import text_lines
from lingvo_moe.cli.run_config import TranslateConfig
from lingvo_moe.errors import UserError
from lingvo_moe.inference.po_catalog import PoCatalog
from lingvo_moe.utils import counts

_logger = logging.getLogger(__name__)
_PO_SUFFIXES = (".po", ".pot")
# Of catalogs, whose lines are no sentences; docs/own_texts.md has commands that convert them.
_OTHER_CATALOGS = (".arb", ".json", ".mo", ".properties", ".resx", ".strings", ".tmx", ".ts", ".xlf", ".xliff", ".xml")


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of a text, each of which becomes a line.

    Attributes:
      sentences: the lines.
    """

    sentences: list[str]

    @property
    def line_numbers(self) -> range:
        """The number of each, from 1."""
        return range(1, len(self.sentences) + 1)


def check(config: TranslateConfig):
    """Raises UserError for an input that is not there or of another format, and flags that do not suit a catalog."""
    path = config.input
    if path == "-":
        return
    text_lines.check_file(path, "one sentence a line, or a .po catalog")
    suffix = pathlib.Path(path).suffix.lower()
    if suffix in _OTHER_CATALOGS:
        raise UserError(
            f"--input={path}: a catalog of this format is not read, and its lines are no sentences. Convert it to .po "
            f"(docs/own_texts.md); to translate each line all the same, pass them on standard input."
        )
    if suffix in _PO_SUFFIXES and (config.n_best > 1 or config.scores):
        raise UserError(
            f"--input={path} is a catalog, which has one translation of each text and no scores; leave --n_best and "
            f"--scores out. --doubtful=FILE lists confidences."
        )


def read(path: str, output: str, language: str = "") -> Lines | PoCatalog:
    """Reads a file, or standard input, to be translated into a language, English if it is empty.

    Args:
      path: the file, `-` for standard input.
      output: where the translations will be written; a catalog there keeps its own, which someone may have reviewed.
      language: of the translations.

    Raises:
      UserError: naming a line that is not text, or a catalog that is none.
    """
    if pathlib.Path(path).suffix.lower() in _PO_SUFFIXES:
        earlier = pathlib.Path(output) if output != "-" and os.path.exists(output) else None
        catalog = PoCatalog(pathlib.Path(path), language, earlier)
        if catalog.other_language:
            _logger.warning(
                "--input=%s has translations into %s, which are kept as they are, beside new ones.",
                path,
                catalog.other_language,
            )
        if catalog.entries_kept:
            _logger.info(
                "--output=%s exists: its translations of %s are kept. Delete it to translate these again.",
                output,
                counts.counted(catalog.entries_kept, "entry", "entries"),
            )
        return catalog
    lines = text_lines.read_lines(path, "sentence")
    if any(line.startswith('msgid "') for line in lines):
        _logger.warning(
            "%s has lines of a gettext catalog, which are translated one by one; to translate its texts, pass it as "
            "--input=FILE.po.",
            "standard input" if path == "-" else f"--input={path}",
        )
    return Lines(lines)
