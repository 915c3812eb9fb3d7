"""Readers of translation catalogs: .mo, .po, JSON beside an en.json, TSV, and help pages beside their English pages.

A reader yields the entries of one file. Help pages are read only where a source asks for them (`help_pages.SUFFIXES`).

A .po file is read by polib. A .mo file is two tables of offsets, which are read here and checked against the file's
length: the standard library's gettext would compile the header's Plural-Forms formula to Python and execute it.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

import polib

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import help_pages
from lingvo_moe.errors import UserError

ENGLISH_JSON = "en.json"
_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
# A compiler may store equal texts once; in a crafted file, each of many messages may be most of the file.
_MOST_COPIES = 16
_CONTEXT_END = "\x04"
_FORM_END = "\0"
_INDEX_OF_ONE = re.compile(r"n(?:%10+)?==1(?!\d)[^?:]*\?(\d)")
_PO_STRING = re.compile(rb'\s*+(?:(msg\w+)(?:\[\d+\])?\s+|(?="))(.*)', re.DOTALL)
# Cells without double quotes, or within two and with others doubled. A tab within them is more probably between cells.
_CELL = rb'(?:"(?:[^"\t]++|"")*+"|[^"\t\r\n]*+)'
_QUOTED_TABLE = re.compile(rb"(?:\xef\xbb\xbf)?(?:%s(?:\t|\r?\n))*+%s" % (_CELL, _CELL))
_MOST_NESTED = 20
# {{PLURAL:$1|one|many}}, {{GENDER:$1|he|she}}, {{GRAMMAR:case|word}}; the first form may be written `1=one`.
_CHOICE = re.compile(r"\{\{\s*(?:PLURAL|GENDER|GRAMMAR)\s*:[^{}|]*\|(?:\d+=)?([^{}|]*)(?:\|[^{}]*)?\}\}", re.IGNORECASE)


class Entry(NamedTuple):
    """One message of a catalog, before cleaning.

    Attributes:
      language: a normalised label, see `languages`; None if neither the file's path nor its header names the language.
      english: the English text.
      translation: the text in `language`.
      fuzzy: whether the catalog marks the translation as unreviewed.
    """

    language: str | None
    english: str
    translation: str
    fuzzy: bool = False


def read(path: Path, name: PurePath) -> Iterator[Entry]:
    """Yields the entries of one catalog.

    Args:
      path: of the file.
      name: its path inside its source, which may name the language.

    Raises:
      UserError: the file is corrupt; the message names it (and the line, for text).
    """
    return _READERS[path.suffix](path, name)


def language_by_path(name: PurePath) -> str | None:
    """Returns the language of all entries of a catalog if its path alone decides it, else None.

    Files of other languages than those asked for need not be read.
    """
    if name.suffix == ".json":
        return languages.normalize(name.stem)
    if name.suffix in help_pages.SUFFIXES:
        return help_pages.language(name)
    return languages.from_path(name) if name.parent.name == "LC_MESSAGES" else None


def _read_mo(path: Path, name: PurePath) -> Iterator[Entry]:
    try:
        messages = _mo_messages(path.read_bytes())
    except (struct.error, ValueError, LookupError) as error:
        raise UserError(
            f"{path}: not a readable .mo catalog ({error}). Compile it again (msgfmt), or remove it."
        ) from None
    header = _header_fields(next((translation for english, translation in messages if not english), ""))
    language = languages.from_path(name, header.get("language", ""))
    one = _index_of_one(header.get("plural-forms", ""))
    for english, translation in messages:
        if english:
            forms = translation.split(_FORM_END)
            yield Entry(language, english.rpartition(_CONTEXT_END)[2].partition(_FORM_END)[0], forms[one % len(forms)])


def _mo_messages(data: bytes) -> list[tuple[str, str]]:
    """Returns the (message, translation) pairs of a compiled catalog, with contexts and plural forms."""
    if data[:4] not in _MAGIC:
        raise ValueError("it does not start with a .mo file's magic number")
    order = _MAGIC[data[:4]]
    count, *starts = struct.unpack_from(f"{order}3I", data, 8)
    columns = []
    for start in starts:
        table = struct.unpack_from(f"{order}{2 * count}I", data, start) if start + 8 * count <= len(data) else None
        if table is None or any(length + at > len(data) for length, at in zip(table[::2], table[1::2])):
            raise ValueError("it is truncated: a message lies beyond the end of the file")
        if sum(table[::2]) > _MOST_COPIES * len(data):
            raise ValueError("its messages overlap")
        columns.append([data[at : at + length] for length, at in zip(table[::2], table[1::2])])
    charset = re.search(rb"charset=([\w.:-]+)", dict(zip(*columns)).get(b"", b""))
    encoding = charset[1].decode("ascii") if charset else "utf-8"
    return [(english.decode(encoding), translation.decode(encoding)) for english, translation in zip(*columns)]


def _header_fields(header: str) -> dict[str, str]:
    fields = (line.partition(":") for line in header.splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in fields}


def _index_of_one(plural_forms: str) -> int:
    """Returns the index of the plural form for n = 1. The formula is searched as text and never evaluated.

    Most formulas give form 0 for n = 1; those of Arabic, Latvian or Slovenian may give form 1.
    """
    match = _INDEX_OF_ONE.search("".join(plural_forms.split()))
    return int(match[1]) if match else 0


def open_po(path: Path) -> polib.POFile:
    """Reads a gettext catalog; raises UserError for what is none."""
    try:
        _check_complete(path.read_bytes())
        return polib.pofile(str(path))
    except (OSError, ValueError, LookupError) as error:
        reason = str(error).replace(str(path), "").strip()
        raise UserError(
            f"{path}: not a readable .po catalog ({reason}). Repair it (msgfmt --check shows the error), or remove it."
        ) from None


def _read_po(path: Path, name: PurePath) -> Iterator[Entry]:
    catalog = open_po(path)
    header = {key.lower(): value for key, value in catalog.metadata.items()}
    language = languages.from_path(name, header.get("language", ""))
    one = _index_of_one(header.get("plural-forms", ""))
    for entry in catalog:
        if not entry.obsolete:
            forms = entry.msgstr_plural
            translation = forms.get(one, forms.get(0, "")) if forms else entry.msgstr
            yield Entry(language, entry.msgid, translation, entry.fuzzy)


def _check_complete(text: bytes):
    """Raises ValueError for what polib accepts in a truncated file: a string without a closing quote, and no msgstr."""
    number, keyword = 0, b""
    for number, line in enumerate(text.splitlines(), 1):
        string = _PO_STRING.match(line)
        if string and not re.fullmatch(rb'".*"', string[2].rstrip(), re.DOTALL):
            raise ValueError(f"line {number}: expected a text in double quotes")
        keyword = (string and string[1]) or keyword
    if keyword and keyword != b"msgstr":
        raise ValueError(f"line {number}: the last entry has no msgstr")


def _read_json(path: Path, name: PurePath) -> Iterator[Entry]:
    """Reads `LANG.json`, a tree of texts by key (MediaWiki's, Home Assistant's), and the English `en.json` beside it.

    Other JSON has no entries; `unread` names it.
    """
    language = languages.normalize(path.stem)
    beside = path.with_name(ENGLISH_JSON)
    if language is None or path == beside or lacks_english(path):
        return
    english = _json_messages(beside)
    for key, translation in _json_messages(path).items():
        if key in english:
            yield Entry(language, _first_choice(english[key]), _first_choice(translation))


def lacks_english(path: Path) -> bool:
    """Returns whether a file is named LANG.json, but no en.json beside it has the English texts."""
    beside = path.with_name(ENGLISH_JSON)
    is_catalog = path.suffix == beside.suffix and languages.normalize(path.stem) is not None
    return is_catalog and not (beside.is_file() and _is_beside(beside.resolve(), path))


def _is_beside(resolved: Path, path: Path) -> bool:
    """Returns whether a link leads to a file of the same directory: others may be outside of the source."""
    return resolved.parent == path.parent.resolve()


def _json_messages(path: Path) -> dict[tuple[str, ...], str]:
    """Returns the texts of a JSON file by the path of their keys. A key may be there twice with the same text alone."""
    messages: dict[tuple[str, ...], str] = {}
    try:
        for keys, text in _leaves(json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=tuple), ()):
            if messages.setdefault(keys, text) != text:
                raise ValueError(f"the key {'.'.join(keys)!r} is there twice, with two texts; expected one")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable JSON catalog ({error}). Repair or remove it.") from None
    return messages


def _leaves(node: object, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the path and the text of each leaf that is a text. An object is a tuple of its keys and values."""
    if isinstance(node, str) and keys:
        yield keys, node
    elif isinstance(node, tuple):
        for key, child in node:
            yield from _leaves(child, (*keys, key))


def _first_choice(text: str) -> str:
    """Replaces every choice by its first form, innermost first: `$1 {{PLURAL:$1|page|pages}}` -> `$1 page`.

    Braces of choices that are nested deeper than any text stay: a crafted one would take time with its length's square.
    """
    for _ in range(_MOST_NESTED):
        previous, text = text, _CHOICE.sub(r"\1", text)
        if text == previous:
            break
    return text


def _read_tsv(path: Path, name: PurePath) -> Iterator[Entry]:
    """Reads `LANG.tsv` of source<TAB>English, or a .tsv of language<TAB>source<TAB>English; name and line 1 decide."""
    rows = table_rows(path)
    first = next(rows, (0, []))
    if not first[1]:
        raise UserError(f"{path}: the file is empty; expected a pair source<TAB>English a line. Fill or remove it.")
    columns = len(first[1])
    language = _language_of_tsv(path, name, first[1])
    for number, fields in itertools.chain([first], rows):
        if len(fields) != columns:
            raise UserError(
                f"{path}:{number}: {len(fields)} columns where the first line has {columns}. "
                "Tabs may only separate the columns."
            )
        if columns == 3:
            language = languages.normalize(fields[0].strip())
            if language is None:
                raise UserError(f"{path}:{number}: {fields[0]!r} is not a language label such as de or pt_BR.")
        yield Entry(language, fields[-1], fields[-2])


def table_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of its last line and the columns of each row of a .tsv file that is not blank.

    Cells are verbatim, unless each one with a double quote is quoted as spreadsheets do it: `"say ""yes"" now"`.

    Raises:
      UserError: the file is not UTF-8, or binary.
    """
    if not _is_quoted(path):
        yield from ((number, text.split("\t")) for number, text in _lines(path) if text)
        return
    rows = csv.reader((f"{text}\n" for _, text in _lines(path)), delimiter="\t")
    try:
        yield from ((rows.line_num, row) for row in rows if row)
    except csv.Error as error:  # a cell above the module's limit
        raise UserError(f"{path}:{rows.line_num}: {error}. Divide the text, or remove the line.") from None


def _is_quoted(path: Path) -> bool:
    """Returns whether a file has double quotes, and a spreadsheet may have written them all."""
    data = path.read_bytes()
    return b'"' in data and _QUOTED_TABLE.fullmatch(data) is not None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each line."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line, "
                    f"0x{raw[error.start]:02x}). Convert it: iconv -f ITS_ENCODING -t UTF-8."
                ) from None
            if "\0" in text:
                raise UserError(f"{path}:{number}: a NUL byte; this is a binary file, not text.")
            yield number, text


def _language_of_tsv(path: Path, name: PurePath, first: list[str]) -> str | None:
    """Returns the language that the name of a .tsv file states, or None if its first column has the language.

    Args:
      path: of the file.
      name: its path inside its source.
      first: the columns of its first line.

    Raises:
      UserError: the name and the number of columns are those of neither format.
    """
    language = languages.from_path(PurePath(name.name))
    if len(first) == 2 and language:
        return language
    named = languages.normalize(name.stem)
    if named != language:
        named = None  # as `news-de`, or two letters that are no language
    if len(first) == 3 and (named is None or _may_state(first[0], named)):
        return None
    columns = f"{len(first)} column{'s' * (len(first) != 1)}"
    if named:
        raise UserError(
            f"{path}:1: {columns} in a file named {name.name}; expected source<TAB>English. Remove the other columns, "
            "or give a file of language<TAB>source<TAB>English another name, such as texts.tsv."
        )
    if len(first) != 2:
        raise UserError(
            f"{path}:1: {columns}; expected source<TAB>English in a file named LANG.tsv, or "
            "language<TAB>source<TAB>English."
        )
    raise UserError(
        f"{path}: the file's name is not a language label. Name a file of source<TAB>English after its "
        "language, such as de.tsv, or give every line three columns: language<TAB>source<TAB>English."
    )


def _may_state(field: str, named: str) -> bool:
    """Returns whether a field is a language label, in a file whose name is the label `named`.

    Short words look like labels, too: German `ja` is Japanese. So it must be the language of the name, unless that has
    three letters, as in `all.tsv` and `own.tsv`.
    """
    stated = languages.normalize(field.strip())
    return stated is not None and (_base(stated) == _base(named) or len(_base(named)) == 3)


def _base(label: str) -> str:
    """Returns a label's language without script, region and the like: `pt_BR` -> `pt`."""
    return re.split("[_@]", label)[0]


def _read_page(path: Path, name: PurePath) -> Iterator[Entry]:
    language = help_pages.language(name)
    for english, translation in help_pages.pairs(path, name):
        yield Entry(language, english, translation)


_CATALOG_READERS = {".mo": _read_mo, ".po": _read_po, ".json": _read_json, ".tsv": _read_tsv}
SUFFIXES = frozenset(_CATALOG_READERS)
_READERS = {**_CATALOG_READERS, **dict.fromkeys(help_pages.SUFFIXES, _read_page)}
