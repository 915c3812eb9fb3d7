"""What stays of an earlier catalog when the texts of its program are translated again, as `msgmerge` does it."""

from __future__ import annotations

import copy
from pathlib import Path

import polib

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import catalogs
from lingvo_moe.errors import UserError

FUZZY = "fuzzy"
# Fields of a header that describe the texts; the others describe their translations.
_OF_TEXTS = ("Project-Id-Version", "Report-Msgid-Bugs-To", "POT-Creation-Date")


class EarlierCatalog:
    """A catalog whose translations someone may have reviewed."""

    def __init__(self, path: Path, language: str):
        """Reads a file.

        Args:
          path: the file.
          language: of the translations that will be written to it.

        Raises:
          UserError: it is no catalog, or has translations into another language.
        """
        self._catalog = catalogs.open_po(path)
        theirs = languages.normalize(self._catalog.metadata.get("Language", ""))
        if theirs and not is_same_language(theirs, language):
            raise UserError(
                f"{path} exists and has translations into {theirs}, not {language}, which would be lost. Name another "
                f"file, or delete it."
            )

    def keep(self, catalog: polib.POFile) -> int:
        """Gives entries of a catalog the translations that are there and not fuzzy, also if they have others.

        It keeps the comments of translators and, as obsolete ones, entries whose texts the catalog does not have.

        Returns:
          How many entries have a complete translation of the earlier catalog.
        """
        ours, kept = {_key(entry) for entry in catalog}, 0
        theirs = {_key(entry): entry for entry in self._catalog}
        for entry in catalog:
            found = theirs.get(_key(entry))
            if found is None or entry.obsolete:
                continue
            entry.tcomment = found.tcomment or entry.tcomment
            if not found.fuzzy and _has_translation(found):
                entry.msgstr = found.msgstr
                entry.msgstr_plural |= {form: text for form, text in found.msgstr_plural.items() if text}
                if _is_complete(found):
                    unmark(entry)
                    kept += 1
        for key, entry in theirs.items():
            if key not in ours and not entry.fuzzy and _has_translation(entry):
                obsolete = copy.copy(entry)
                obsolete.obsolete, obsolete.occurrences = True, []
                catalog.append(obsolete)
        return kept

    def keep_header(self, catalog: polib.POFile):
        """Gives a catalog the fields of the header that describe translations, and the comment above it."""
        described = {name: text for name, text in self._catalog.metadata.items() if name not in _OF_TEXTS}
        catalog.metadata = {**catalog.metadata, **described}
        catalog.header = self._catalog.header or catalog.header


def is_same_language(first: str, second: str) -> bool:
    """Returns whether two labels are of one language: `en` and `en_GB`."""
    bases = [(languages.normalize(label) or label).partition("_")[0] for label in (first, second)]
    return bases[0] == bases[1]


def unmark(entry: polib.POEntry):
    """Removes the mark of a fuzzy entry, and the texts that it was for."""
    entry.flags = [flag for flag in entry.flags if flag != FUZZY]
    entry.previous_msgctxt = entry.previous_msgid = entry.previous_msgid_plural = None


def _has_translation(entry: polib.POEntry) -> bool:
    return bool(entry.msgstr or any(entry.msgstr_plural.values()))


def _is_complete(entry: polib.POEntry) -> bool:
    """Returns whether an entry, which may be obsolete, has all forms."""
    return bool(entry.msgstr or (entry.msgstr_plural and all(entry.msgstr_plural.values())))


def _key(entry: polib.POEntry) -> tuple[str | None, str, str]:
    """Returns what an entry translates."""
    return entry.msgctxt, entry.msgid, entry.msgid_plural
