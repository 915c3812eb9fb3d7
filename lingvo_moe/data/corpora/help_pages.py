"""Reads help pages: the paragraphs of a translated page, paired with those of the English page.

LibreOffice's HTML gives a paragraph the same id in all languages. A GNOME page (Mallard, XML) and a KDE manual (the
HTML of all its pages, in one compressed file) are translated paragraph by paragraph, so all languages have the same
elements in the same order; where a page, or a section of a manual, differs, it is of another version and has no pairs.

    libreoffice/help/de/text/shared/main0108.html   beside libreoffice/help/en-US/text/shared/main0108.html
    share/help/de/gedit/index.page                  beside share/help/C/gedit/index.page
    share/doc/HTML/de/kate/index.cache.bz2          beside share/doc/HTML/en/kate/index.cache.bz2
"""

from __future__ import annotations

import bz2
import collections
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from lxml import etree, html  # pyright: ignore[reportAttributeAccessIssue]; it is compiled, without type stubs

from lingvo_moe.data import languages
from lingvo_moe.errors import UserError

_MANUAL = "index.cache.bz2"
_ENGLISH = {".html": "en-US", ".page": "C", ".bz2": "en"}
SUFFIXES = frozenset(_ENGLISH)
_HTML_BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5", "h6")
_MANUAL_PAGE = re.compile(r'<FILENAME filename="([^"]*)">')
# Anchors that DocBook's style sheets number themselves: in another language they are elsewhere.
_NUMBERED_ANCHOR = re.compile(r"id[mp]?\d|ftn\.")
_MALLARD = "{http://projectmallard.org/1.0/}"
# What a reader of the page sees between the elements of a path through menus, and between keys pressed together.
_SEPARATORS = {"guiseq": " > ", "keyseq": "+"}
_MALLARD_BLOCKS = tuple(_MALLARD + tag for tag in ("p", "title", "desc"))
# Where one text is so much longer, the texts are not translations of one another: of Chinese and English, 4 is usual.
_MAX_LENGTH_RATIO = 8
_SHORT_TEXT = 40  # characters
_NO_TEXT = re.compile(r"author|copyright|toc|list-of-.*")  # classes of blocks in a manual, and of those around them
_NUMBER = re.compile(r"\d+")


def language(name: PurePath) -> str | None:
    """Returns the language of a page by its path inside its source, or None."""
    folder = _language_folder(name)
    return None if folder is None else languages.normalize(name.parts[folder])


def pairs(path: Path, name: PurePath) -> Iterator[tuple[str, str]]:
    """Yields (English, translation) for each paragraph of a page that its English page has too.

    Args:
      path: of the page. An English page has no pairs, nor has one without an English page.
      name: its path inside its source, which names the language.

    Raises:
      UserError: one of the two pages is not a readable document.
    """
    folder = _language_folder(name)
    if folder is None:
        return
    from_end = len(name.parts) - folder
    parts = list(path.parts)
    parts[-from_end] = _ENGLISH[path.suffix]
    beside = Path(*parts)
    root = path.parents[len(name.parts) - 1].resolve()
    if path == beside or not beside.is_file() or not beside.resolve().is_relative_to(root):
        return
    if path.suffix == ".html":
        yield from _with_equal_ids(_html_paragraphs(beside), _html_paragraphs(path))
    elif path.suffix == ".page":
        yield from _in_equal_order(_mallard_paragraphs(beside), _mallard_paragraphs(path))
    else:
        english, translated = _manual_sections(beside), _manual_sections(path)
        for section, paragraphs in english.items():
            texts = _in_equal_order(paragraphs, translated.get(section, []))
            # Numbers of chapters and figures depend on the version; addresses are those of people.
            yield from (pair for pair in texts if _have_equal_numbers(*pair) and "@" not in "".join(pair))


def _language_folder(name: PurePath) -> int | None:
    """Returns the index of the folder that is named after the language, the one below `help` or (manuals) `HTML`."""
    folders = name.parts[:-1]
    above = "HTML" if name.name == _MANUAL else "help"
    return folders.index(above) + 1 if above in folders[:-1] else None


def _with_equal_ids(
    english: dict[tuple[str, int], str], translation: dict[tuple[str, int], str]
) -> Iterator[tuple[str, str]]:
    for key, text in english.items():
        if key in translation:
            yield text, translation[key]


def _in_equal_order(english: list[tuple[str, str]], translation: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Pairs the texts of two lists of (tag, text), unless they differ in tags, or by much in the length of a text."""
    if [tag for tag, _ in english] != [tag for tag, _ in translation]:
        return
    texts = [(text, translated) for (_, text), (_, translated) in zip(english, translation)]
    if not any(map(_is_shifted, texts)):
        yield from texts


def _is_shifted(pair: tuple[str, str]) -> bool:
    shorter, longer = sorted(len(text.strip()) for text in pair)
    return longer > max(_MAX_LENGTH_RATIO * shorter, _SHORT_TEXT)


def _html_paragraphs(path: Path) -> dict[tuple[str, int], str]:
    """Returns the text of the paragraphs and headings of a page of LibreOffice's help, by id and occurrence of it."""
    try:
        page = html.parse(str(path), parser=html.HTMLParser(encoding="utf-8", no_network=True)).getroot()
    except (OSError, etree.LxmlError) as error:
        raise _unreadable(path, error) from None
    if page is None:
        raise _unreadable(path, "it is empty")
    _keep_defaults(page)
    for line_end in page.iter("br"):
        line_end.tail = f" {line_end.tail or ''}"
    texts, seen = {}, collections.Counter()
    for block in page.iter(*_HTML_BLOCKS):
        key = block.get("id", "")
        if key.startswith(("par_", "hd_")):
            texts[key, seen[key]] = block.text_content()
            seen[key] += 1
    return texts


def _keep_defaults(page: html.HtmlElement):
    """Removes the texts for macOS or for one application where a page has another one; its script would choose."""
    for switch in page.xpath('//span[@class="switchinline"]'):
        alternatives = list(switch)
        default = next((one for one in alternatives if one.get("id", "").startswith("default")), None)
        for other in alternatives:
            if default is not None and other is not default:
                other.drop_tree()  # the text after it stays


def _mallard_paragraphs(path: Path) -> list[tuple[str, str]]:
    """Returns the tags and texts of the paragraphs and titles of a Mallard page."""
    try:
        parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True)
        page = etree.parse(str(path), parser=parser).getroot()
    except (OSError, etree.LxmlError) as error:
        raise _unreadable(path, error) from None
    for tag, separator in _SEPARATORS.items():
        for sequence in page.iter(_MALLARD + tag):
            for child in sequence[:-1]:
                child.tail = separator
    return [(block.tag, "".join(block.itertext())) for block in page.iter(*_MALLARD_BLOCKS)]


def _manual_sections(path: Path) -> dict[tuple[str, bool], list[tuple[str, str]]]:
    """Returns the tags and texts of the paragraphs, headings and terms of a KDE manual.

    Their keys are the anchor before them, or the one in a heading or term, and whether it is in it: a heading has
    pairs although its section differs.
    """
    try:
        pages = _MANUAL_PAGE.split(bz2.decompress(path.read_bytes()).decode())[1:]
        roots = [html.document_fromstring(page, parser=html.HTMLParser(no_network=True)) for page in pages[1::2]]
    except (OSError, ValueError, etree.LxmlError) as error:
        raise _unreadable(path, error) from None
    sections = collections.defaultdict(list)
    for page, root in zip(pages[::2], roots):
        section = page
        for element in root.iter("a", "dt", *_HTML_BLOCKS):
            if element.tag == "a":
                section = _anchor(element) or section
            elif _is_text(element):
                own = next(filter(None, map(_anchor, element.iter("a"))), None)
                sections[own or section, own is not None].append((element.tag, element.text_content()))
    return sections


def _anchor(element: html.HtmlElement) -> str | None:
    """Returns the name that a link's element gives to its place, if all languages have it."""
    name = element.get("name")
    return name if name and not _NUMBERED_ANCHOR.match(name) else None


def _is_text(block: html.HtmlElement) -> bool:
    """Returns whether a block of a manual is neither an author's name nor a line of a list of contents."""
    above = {element.get("class", "") for element in block.iterancestors()}
    return not any(map(_NO_TEXT.fullmatch, {block.get("class", ""), *above})) and not (
        block.tag == "dt" and "qandaset" in above
    )


def _have_equal_numbers(text: str, translated: str) -> bool:
    return sorted(_NUMBER.findall(text)) == sorted(_NUMBER.findall(translated))


def _unreadable(path: Path, error: Exception | str) -> UserError:
    return UserError(f"{path}: not a readable help page ({error}). Get a new copy, or remove it.")
