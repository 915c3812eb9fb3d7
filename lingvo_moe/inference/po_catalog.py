"""Gettext catalogs (.po, and templates, .pot) of a program, whose texts become English or another language.

The msgid of an entry is translated, and its plural form, too. Entries that have a translation keep it, unless an
earlier catalog has another one. The header of a catalog says which language its translations are in and which plural
forms that has; for English it is rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import polib

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import catalogs
from lingvo_moe.data.tokenizer import is_english
from lingvo_moe.inference.earlier_catalog import FUZZY, EarlierCatalog, is_same_language, unmark

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
      other_language: the language of the translations that the file itself has, by its header, if that is not the one
        translated into; empty otherwise.
    """

    def __init__(self, path: Path, language: str = "", earlier: Path | None = None):
        """Reads a file.

        Args:
          path: the file.
          language: of the translations: `fr` or `fra_Latn`; empty for English.
          earlier: a catalog whose translations are kept, see `EarlierCatalog`.

        Raises:
          UserError: it is no catalog, or the earlier one has translations into another language.
        """
        self._catalog, self._language = catalogs.open_po(path), language.strip("_").partition("_")[0]
        self._earlier, written = earlier, self._written_language
        own = languages.normalize(self._catalog.metadata.get("Language", "")) or written
        has_other = any(entry.translated() for entry in self._catalog) and not is_same_language(own, written)
        self.other_language = own if has_other else ""
        self.entries_kept = 0
        if earlier:
            reviewed = EarlierCatalog(earlier, written)
            reviewed.keep_header(self._catalog)
            self.entries_kept = reviewed.keep(self._catalog)
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

        What someone has reviewed in the earlier catalog meanwhile is kept, too.

        Args:
          translations: as many as `sentences`.
          doubtful: indices of those whose entries are marked as fuzzy: gettext does not use them until someone has read
            them and removed the mark.

        Raises:
          UserError: the earlier catalog cannot be read any more.
        """
        kept: dict[int, dict[int, str]] = {}  # by entry, the plural forms that it has already
        for entry, _ in self._places:
            forms = {} if entry.fuzzy else entry.msgstr_plural
            kept.setdefault(id(entry), {form: text for form, text in forms.items() if text})
            entry.msgstr_plural = {}
            unmark(entry)
        forms, are_known = self._complete_header()
        for index, ((entry, form), translation) in enumerate(zip(self._places, translations, strict=True)):
            text = polib.unescape(translation)
            if form is None:
                entry.msgstr = text
            else:  # the last one, of the plural, stands for all further forms
                entry.msgstr_plural |= dict.fromkeys(range(min(form, forms - 1), forms), text) | kept[id(entry)]
            needs_forms = form is not None and not (are_known and forms == _ENGLISH_FORMS)
            if (index in doubtful or needs_forms) and FUZZY not in entry.flags:
                entry.flags.append(FUZZY)
        if is_english(self._language):
            self._check_english_forms()
        if self._earlier and self._earlier.exists():
            EarlierCatalog(self._earlier, self._written_language).keep(self._catalog)
        return str(self._catalog)

    def _check_english_forms(self):
        """Removes the plural forms that English lacks, and marks new entries whose two forms are equal as fuzzy.

        A language without plural forms has one text for both, whose translation is that of one thing.
        """
        for entry in self._catalog:
            for form in [form for form in entry.msgstr_plural if form >= _ENGLISH_FORMS]:
                del entry.msgstr_plural[form]
        for entry, form in self._places:
            if form and len(set(entry.msgstr_plural.values())) == 1 and FUZZY not in entry.flags:
                entry.flags.append(FUZZY)

    @property
    def _written_language(self) -> str:
        """The language of the catalog that is written."""
        return "en" if is_english(self._language) else self._catalog.metadata.get("Language") or self._language

    def _complete_header(self) -> tuple[int, bool]:
        """Completes the header, of another language with what it lacks.

        Returns:
          (the number of plural forms, whether it is known; if not, that of English).
        """
        header = self._catalog.metadata
        self._catalog.metadata_is_fuzzy = False
        if is_english(self._language):
            own = {"Language": header["Language"]} if is_same_language(header.get("Language", ""), "en") else {}
            header.update(_ENGLISH | own)
            return _ENGLISH_FORMS, True
        header.update(_OF_ENCODING)
        header["Language"] = header.get("Language") or self._language
        found = _FORMS_COUNT.match(header.get(_FORMS, ""))
        if not found:  # none, or the words that xgettext writes into a template
            header[_FORMS] = _ENGLISH[_FORMS]
        return (int(found[1]), True) if found else (_ENGLISH_FORMS, False)
