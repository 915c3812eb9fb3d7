"""Gettext catalogs (.po, and templates, .pot) of a program, whose texts become English or another language.

The msgid of an entry is translated, and its plural form, too. Entries that have a translation keep it, and those that
have one in an earlier catalog get that, as `msgmerge` does it. The header of a catalog says which language its
translations are in and which plural forms that has; for English it is rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import polib

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import catalogs
from lingvo_moe.data.tokenizer import is_english
from lingvo_moe.errors import UserError

_FUZZY = "fuzzy"
_OF_ENCODING = {
    "MIME-Version": "1.0",
    "Content-Type": "text/plain; charset=UTF-8",
    "Content-Transfer-Encoding": "8bit",
}
_FORMS = "Plural-Forms"
_ENGLISH = {"Language": "en", **_OF_ENCODING, _FORMS: "nplurals=2; plural=(n != 1);"}
_ENGLISH_FORMS = 2
_FORMS_COUNT = re.compile(r"\s*nplurals\s*=\s*([1-9])\s*;")


class PoCatalog:
    """A catalog with texts to translate.

    Attributes:
      sentences: the texts, with escapes for line ends and the like, as lines of `translate` have them.
      line_numbers: where the entry of each begins, from 1.
      entries_kept: how many entries have the translation of the earlier catalog.
    """

    def __init__(self, path: Path, language: str = "", earlier: Path | None = None):
        """Reads a file.

        Args:
          path: the file.
          language: of the translations: `fr` or `fra_Latn`; empty for English.
          earlier: a catalog whose translations of the same texts are kept, unless they are fuzzy.

        Raises:
          UserError: it is no catalog, or the earlier one has translations into another language.
        """
        self._catalog, self._language = catalogs.open_po(path), language.strip("_").partition("_")[0]
        self.entries_kept = self._keep(earlier) if earlier else 0
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
        kept: dict[int, dict[int, str]] = {}  # by entry, the plural forms that it has already
        for entry, _ in self._places:
            forms = {} if entry.fuzzy else entry.msgstr_plural
            kept.setdefault(id(entry), {form: text for form, text in forms.items() if text})
            entry.flags = [flag for flag in entry.flags if flag != _FUZZY]
            entry.msgstr_plural = {}
            entry.previous_msgctxt = entry.previous_msgid = entry.previous_msgid_plural = None  # of a fuzzy one
        forms, are_known = self._complete_header()
        for index, ((entry, form), translation) in enumerate(zip(self._places, translations, strict=True)):
            text = polib.unescape(translation)
            if form is None:
                entry.msgstr = text
            else:  # the last one, of the plural, stands for all further forms
                entry.msgstr_plural |= dict.fromkeys(range(min(form, forms - 1), forms), text) | kept[id(entry)]
            needs_forms = form is not None and not (are_known and forms == _ENGLISH_FORMS)
            if (index in doubtful or needs_forms) and _FUZZY not in entry.flags:
                entry.flags.append(_FUZZY)
        return str(self._catalog)

    def _keep(self, path: Path) -> int:
        """Gives entries without a translation that of an earlier catalog; returns how many got one."""
        earlier = catalogs.open_po(path)
        theirs = languages.normalize(earlier.metadata.get("Language", ""))
        ours = "en" if is_english(self._language) else self._catalog.metadata.get("Language") or self._language
        if theirs and theirs.partition("_")[0] != (languages.normalize(ours) or "").partition("_")[0]:
            raise UserError(
                f"{path} exists and has translations into {theirs}, not {ours}, which would be lost. Name another "
                f"file, or delete it."
            )
        translated = {_key(entry): entry for entry in earlier if entry.translated()}
        kept = 0
        for entry in self._catalog:
            found = translated.get(_key(entry))
            if found and not entry.obsolete and not entry.translated():
                entry.msgstr, entry.msgstr_plural = found.msgstr, found.msgstr_plural
                entry.tcomment = found.tcomment or entry.tcomment
                entry.flags = [flag for flag in entry.flags if flag != _FUZZY]
                entry.previous_msgctxt = entry.previous_msgid = entry.previous_msgid_plural = None
                kept += 1
        return kept

    def _complete_header(self) -> tuple[int, bool]:
        """Completes the header, of another language with what it lacks.

        Returns:
          (the number of plural forms, whether it is known; if not, that of English).
        """
        header = self._catalog.metadata
        self._catalog.metadata_is_fuzzy = False
        if is_english(self._language):
            header.update(_ENGLISH)
            return _ENGLISH_FORMS, True
        header.update(_OF_ENCODING)
        header["Language"] = header.get("Language") or self._language
        found = _FORMS_COUNT.match(header.get(_FORMS, ""))
        if not found:  # none, or the words that xgettext writes into a template
            header[_FORMS] = _ENGLISH[_FORMS]
        return (int(found[1]), True) if found else (_ENGLISH_FORMS, False)


def _key(entry: polib.POEntry) -> tuple[str | None, str, str]:
    """Returns what an entry translates."""
    return entry.msgctxt, entry.msgid, entry.msgid_plural
