"""Gettext catalogs (.po, and templates, .pot) of a program in another language, whose texts become English.

The msgid of an entry is translated, and its plural form, too. Entries that have a translation keep it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import polib

from lingvo_moe.data.corpora import catalogs

_FUZZY = "fuzzy"
_METADATA = {
    "Language": "en",
    "MIME-Version": "1.0",
    "Content-Type": "text/plain; charset=UTF-8",
    "Content-Transfer-Encoding": "8bit",
    "Plural-Forms": "nplurals=2; plural=(n != 1);",
}


class PoCatalog:
    """A catalog with texts to translate.

    Attributes:
      sentences: the texts, with escapes for line ends and the like, as lines of `translate` have them.
      line_numbers: where the entry of each begins, from 1.
    """

    def __init__(self, path: Path):
        """Reads a file; raises UserError if it is no catalog."""
        self._catalog = catalogs.open_po(path)
        # The entry of each sentence, and which of its plural forms, if it has these.
        self._places: list[tuple[polib.POEntry, int | None]] = []
        self.sentences: list[str] = []
        for entry in self._catalog:
            if not entry.obsolete and not entry.translated():
                texts = [(None, entry.msgid)]
                if entry.msgid_plural:
                    texts = list(enumerate((entry.msgid, entry.msgid_plural)))
                self._places += [(entry, form) for form, _ in texts]
                self.sentences += [polib.escape(text) for _, text in texts]
        self.line_numbers = [entry.linenum or 1 for entry, _ in self._places]  # polib has 0 for what begins a file

    def filled(self, translations: Sequence[str], doubtful: Collection[int]) -> str:
        """Returns the text of the catalog with the translation of each sentence.

        Args:
          translations: as many as `sentences`.
          doubtful: indices of those whose entries are marked as fuzzy: gettext does not use them until someone has read
            them and removed the mark.
        """
        for entry, _ in self._places:
            entry.flags = [flag for flag in entry.flags if flag != _FUZZY]
            entry.msgstr_plural = {}
            entry.previous_msgctxt = entry.previous_msgid = entry.previous_msgid_plural = None  # of a fuzzy one
        for index, ((entry, form), translation) in enumerate(zip(self._places, translations, strict=True)):
            text = polib.unescape(translation)
            if form is None:
                entry.msgstr = text
            else:
                entry.msgstr_plural[form] = text
            if index in doubtful and _FUZZY not in entry.flags:
                entry.flags.append(_FUZZY)
        self._catalog.metadata.update(_METADATA)
        self._catalog.metadata_is_fuzzy = False
        return str(self._catalog)
