"""What a program reads in a line, and a translation must keep as it is: placeholders, tags, addresses, codes, numbers.

Codes are names of files and identifiers, paths, hexadecimal numbers, comments, and what is between backticks.
"""

from __future__ import annotations

import collections
import re
import string
import unicodedata

from lingvo_moe.data.corpora.cleaning import ENTITY, PLACEHOLDER

# The letters of scripts that have spaces between words: in `https://a.de/를` the address ends before the Korean letter.
LETTER = "A-Za-z0-9À-ɏͰ-ϿЀ-ԯ"
_IN_ADDRESS = rf"[{LETTER}%&#@~$+=/_:?!.,;*'-]"
_AT_ITS_END = rf"[{LETTER}%&#@~$+=/-]"
_BEFORE = r"(?<![A-Za-z0-9.+%_-])"
ADDRESS = re.compile(
    rf"{_BEFORE}(?i:https?://|ftp://|www\.){_IN_ADDRESS}*{_AT_ITS_END}"
    rf"|{_BEFORE}[A-Za-z0-9_+-][A-Za-z0-9._+-]*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+"
)
_TAG = r"</?[A-Za-z][^<>]*>"
_ESCAPE = r"\\[abfnrtv\"'\\]"
_VARIABLE = r"@\w+@"
# ICU's `{n, number, percent}`, and the beginning of a message that `icu_messages` cannot divide, for instance because
# of a keyword that ICU lacks: `{n, plurall, one {`.
_ICU_ARGUMENT = (
    r"\{\s*\w+\s*,\s*(?:number|date|time|spellout|ordinal|duration)\s*(?:,[^{}]*)?\}"
    r"|\{\s*\w+\s*,\s*\w+\s*,(?=[^{}]*\{)"
)
# Fluent's `{ $name }`, `{ -brand-name }` and `{ NUMBER($n) }`; `{% if x %}` of Jinja and Django.
_PLACEABLE = r"\{\s*(?:\$[\w-]+|-[a-z][\w-]*|[A-Z]+\([^{}()]*\))\s*\}|\{%[^{}]*%\}"
# Go's `%[1]d`, Ruby's `%<name>s` and Pascal's `%0:s`.
_INDEXED_FORMAT = r"%(?:\[\d+\]|<\w+>|\d+:)[-+#0]*+\d*+(?:\.\d+)?[A-Za-z]"
# Before those of corpora, where `$1` ends at the next space: in `$1に移動` the letters are no part of it.
_VALUE = rf"{_ICU_ARGUMENT}|{_PLACEABLE}|{_INDEXED_FORMAT}|\$\d+|\$[A-Za-z_][A-Za-z0-9_]*|{PLACEHOLDER.pattern}"

_IN_NAME = rf"[{LETTER}_.+~-]"
_END_OF_NAME = rf"[{LETTER}_]"
# Of Windows, after a drive, a host, a variable or a name in capitals (`HKEY_USERS\x`, `DOMAIN\name`), and of Unix, with
# two slashes or one after `~` or points; `km/h` and `/Nein` are none. And commands of TeX.
_WINDOWS_START = (
    rf"(?<![{LETTER}])[A-Za-z]:\\|(?<!\\)\\\\(?=[{LETTER}])|%\w+%\\"
    rf"|(?<![{LETTER}_])[A-Z][A-Z0-9_-]+\\(?![nrt](?:[A-Z]|\b))(?=[{LETTER}_])"
)
_PATH = (
    rf"(?:{_WINDOWS_START})(?:{_IN_NAME}+(?: {_IN_NAME}+)*+\\)*+(?:{_IN_NAME}*{_END_OF_NAME})?"
    rf"|(?<![{LETTER}_.:~/<-])(?:~|\.\.?|/{_IN_NAME}*{_END_OF_NAME})(?:/{_IN_NAME}*{_END_OF_NAME})+/?"
    r"|(?<!\\)\\[a-z]{2,}(?=\{)"
)
_BACKTICKS = r"`[^`'\s][^`']*`"
_COMMENT = r"<!--[^<>]*-->"
# Hexadecimal numbers, UUIDs, MAC addresses and hashes.
_HEXADECIMAL = (
    r"\b0[xX][0-9A-Fa-f]+\b"
    r"|\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b"
    r"|\b[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}\b"
    r"|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b|\b(?=[A-F]*\d)(?=\d*[A-F])[0-9A-F]{8,}\b"
)
# `report.pdf`, `db.example.com:80`; words with other ends after a point are abbreviations (`Tel.nr.`), forms of words
# (`Nutzer.in`) or two sentences.
_EXTENSION = (
    "7z|apk|app|avi|bak|bash|bat|bin|bmp|bz2|cc|cer|cfg|com|conf|cpp|crt|css|csv|db|deb|desktop|dev|dll|dmg|doc|docx|"
    "edu|epub|exe|flac|gif|gov|gpg|gz|hpp|htm|html|ico|img|info|ini|io|iso|jar|java|jpeg|jpg|js|json|key|lan|local|log|"
    "lua|md|mkv|mo|mov|mp3|mp4|net|odp|ods|odt|ogg|org|otf|pdf|pem|php|pl|png|po|ppt|pptx|ps|py|rar|rb|rpm|rst|rtf|"
    "service|sh|sig|so|socket|sql|sqlite|svg|swf|tar|tgz|tif|tiff|tmp|toml|ts|tsv|ttf|txt|wav|webm|webp|whl|woff|woff2|"
    "xls|xlsx|xml|xz|yaml|yml|zip"
)
_WITHOUT_DIGIT = r"[A-Za-zÀ-ɏͰ-ϿЀ-ԯ+-]"
_FILE = (
    rf"(?<![{LETTER}_.@+-])(?:[{LETTER}_]{{2}}[{LETTER}_+-]*(?:\.[{LETTER}_+-]+)*\.(?:{_EXTENSION})"
    rf"|{_WITHOUT_DIGIT}*+[0-9_][{LETTER}_+-]*+\.[a-z][a-z0-9]{{1,4}})(?::\d+)?(?![{LETTER}_]|\.[{LETTER}])"
)
# In capitals and digits with hyphens: `UTF-8`, `AB12-CD34`.
_HYPHENATED = r"(?<![\w-])(?=[A-Z-]*\d)(?=[\d-]*[A-Z])[A-Z0-9]+(?:-[A-Z0-9]+)+(?!\w)"
# In capitals, with a digit, or with more than one `_`: a single one may be the mark of an accelerator. And `__name__`;
# one word of Markdown's bold text is required likewise, as the model writes `__` badly.
_IDENTIFIER = (
    rf"(?<![{LETTER}_])(?:[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+){{2,}}"
    r"|__[A-Za-z0-9]+(?:_[A-Za-z0-9]+)*+__"
    rf"|[A-Za-z]+\d[A-Za-z0-9]*_[A-Za-z0-9]+|[A-Za-z]+_\d[A-Za-z0-9]*)(?![{LETTER}_])"
)
_OPTION = rf"(?<![\w-])--[{LETTER}]+(?:-[{LETTER}]+)*"  # of a command
# Without identifiers, of which `accelerators` and `capitals` have rules of their own.
KEPT = re.compile(
    "|".join(
        [
            _TAG,
            ENTITY.pattern,
            ADDRESS.pattern,
            _PATH,
            _ESCAPE,
            _VARIABLE,
            _VALUE,
            _BACKTICKS,
            _COMMENT,
            _HEXADECIMAL,
            _FILE,
            _OPTION,
        ]
    )
)

# With separators inside, and with the letters beside it: `1.234,5`, `10:30`, `2024-12-31`, `H264`, `10MB`. That of a
# month may become its name: `12月`, `tháng 12`.
_DATE = r"\d{4}-\d{2}-\d{2}"
_GROUPED = r"\d{1,3}(?:[ \u00a0\u202f]\d{3})++(?!\d)(?:[.,٫]\d+)?"
_SEPARATED = r"\d++(?:[.,:/'’٫٬]\d++)*+"
_NUMBER = (
    rf"(?<![Tt]háng )(?:(?<![A-Za-z])[A-Za-z]++)?(?<!\d)(?:{_DATE}|{_GROUPED}|{_SEPARATED})(?!\d)[A-Za-z]*+"
    r"(?!\s?[月월])"
)
# Signs and units that few texts of corpora have, with the number beside them: `£15`, `5 ₽`, `±3°`, `§ 7`, `20 µs`.
_CURRENCIES = "£¥￥₽₹₩₺₴₪₫¢"
_SIGNS = f"{_CURRENCIES}±§√∞≠≥≤≈≡∑∏∫∂∆"
_SIMPLE_NUMBER = r"(?<![\d.,])\d++(?:[.,]\d++)*+"
_MICRO = r"[µμ](?:Sv|Pa|[smgFAVWHlLJ])(?![A-Za-z])"
_SIGNED = (
    rf"[{_SIGNS}]\s?\d++(?:[.,]\d++)*+|{_SIMPLE_NUMBER}\s?(?:[{_CURRENCIES}]|{_MICRO})|[{_SIGNS}]"
    rf"|(?<![{LETTER}µ]){_MICRO}"
)
_SIGN = re.compile(rf"[{_SIGNS}]|{_MICRO}")
# Groups of three digits with one separator, and a fraction after another one, which may be a group of three, too.
# `1.234.50` is a version.
_DECIMAL = re.compile(
    r"(\d{1,3}(?:(?P<separator>[ .,'’\u00a0\u202f])\d{3}(?:(?P=separator)\d{3})*)?|\d+)(?:(?!(?P=separator))[.,](\d+))?"
)
_GROUP, _MOST_GROUPS_IN_DOUBT = 3, 2
_OTHER_SEPARATOR = re.compile("[:/'’]")
# A comma before other than three digits, with points between groups before it.
_DECIMAL_COMMA = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+|\d+),(\d{1,2}|\d{4,})(?![\d.,]*\d)")
_BRACKETS = ("()", "[]", "{}")  # of a point or an interval
_ARABIC_SEPARATORS = {"٫": ".", "٬": ","}
_ARABIC_SEPARATOR = re.compile(r"(?<=\d)[٫٬](?=\d)")
_FEWEST_DIGITS = 2  # one digit may become a word
_UNIT = (
    r"(?<![\d.,])\d[\d.,]*+\s?"
    r"(?:[kKMGTP]?i?B|[kMG]?bit|[kMG]?Hz|[kcmµn]?m|[kmµ]?g|[kM]?W|[kmM]?V|m?A|m?s|min|p[xt]|dpi|dB|°[CF])\b"
)

_REQUIRED = re.compile(
    rf"(?P<tag>{_TAG})|{ENTITY.pattern}|(?P<address>{ADDRESS.pattern})|(?P<path>{_PATH})|{_ESCAPE}"
    rf"|(?P<placeholder>{_VARIABLE}|{_VALUE})|(?P<code>{_BACKTICKS}|{_COMMENT}|{_HEXADECIMAL}|{_FILE}|{_IDENTIFIER}|{_HYPHENATED}|{_OPTION})"
    rf"|(?P<number>{_SIGNED}|{_NUMBER})"
)
_WITHOUT_WORDS = re.compile(f"{ENTITY.pattern}|{_ESCAPE}|{_UNIT}")
_NUMBERED = re.compile(r"%(\d{1,2})")
_NAME = re.compile(r"</?\s*([A-Za-z][\w:.-]*)")
_WITHOUT_END = ("br", "hr", "img", "li", "p")


def required(text: str) -> list[re.Match]:
    """Finds what a translation has to have exactly as often: placeholders, addresses, tags of markup, codes, numbers.

    Entities are not among them, which stand for characters of a language (`&nbsp;:`); neither are names between angle
    brackets that are translated (`<Datei>`), and numbers of one digit, see `single_digits`. Of percentages (`%50`,
    `100%ig`) the number is. `%%` is a percent sign that a program formats; it would read the `%` of a translation as a
    placeholder.

    Returns:
      The matches, whose `lastgroup` is `tag`, `address`, `path`, `placeholder`, `code` or `number`.
    """
    found = [each for each in _REQUIRED.finditer(text) if each.lastgroup]
    ended = {name[1].lower() for each in found if each[0].startswith("</") and (name := _NAME.match(each[0]))}
    numbers = {int(number[1]) for each in found if (number := _NUMBERED.fullmatch(each[0]))}
    is_numbered = numbers == set(range(1, len(numbers) + 1))
    kept, end = [], 0
    for each in found:
        if _is_percentage(text, each, end, is_numbered):
            kept.append(_REQUIRED.match(text, each.start() + 1))  # of `%50`, the number
            continue
        kept.append(each)
        if each.lastgroup != "number":
            end = each.end()
    return [each for each in kept if each and _is_required(each, ended)]


def has_words(text: str) -> bool:
    """Returns whether a text has letters outside of entities, escapes, units and what is `required` but for codes."""
    text, parts, end = _WITHOUT_WORDS.sub(" ", text), [], 0
    for each in required(text):
        if each.lastgroup != "code":  # which may be a word with an accelerator's mark
            parts.append(text[end : each.start()])
            end = each.end()
    return any(map(str.isalpha, "".join([*parts, text[end:]])))


def count_required(text: str) -> collections.Counter[str]:
    """Returns how often a translation has to have each text that is `required`; equal numbers are written alike."""
    return collections.Counter(_number(each[0]) if each.lastgroup == "number" else each[0] for each in required(text))


def breaks_a_pair(text: str, translation: str) -> bool:
    """Returns whether a translation has an unpaired `"` and the text has none, or other numbers of braces and signs.

    Those are `**`, `|` and `^`, and a `_` that the text does not have. `"%s" fehlt` becomes `%s" is missing`;
    `{ LEN($x) } Dateien` becomes `LEN($x) } files`.
    """
    text = unicodedata.normalize("NFKC", text)  # as tokenizers read wide braces
    is_unpaired = text.count('"') % 2 == 0 and translation.count('"') % 2 == 1
    is_code = "_" in translation and "_" not in text
    return (
        is_unpaired
        or is_code
        or any(text.count(mark) != translation.count(mark) for mark in ("{", "}", "**", "|", "^"))
    )


def in_english(text: str) -> str:
    """Returns the text with the digits and separators of English: `١٢` and `1.234,5` become `12` and `1,234.5`.

    Those are decimal commas, with the points before them, and the Arabic separators. `[0,1]` are two numbers.
    """
    digits = "".join(str(unicodedata.digit(each)) if each.isdecimal() else each for each in text)
    points = _DECIMAL_COMMA.sub(_with_point, digits)
    return _ARABIC_SEPARATOR.sub(lambda found: _ARABIC_SEPARATORS[found[0]], points)


def with_english_numbers(text: str, translation: str) -> str:
    """Returns a translation with the unambiguous numbers of its text in English: `1 299,00` and `%50` are changed."""
    for each in required(text):
        if each.lastgroup != "number":
            continue
        written = re.escape(each[0])
        if (groups := _groups(each[0], text)) is not None:
            whole, fraction = groups
            pattern = "[ .,'’\u00a0\u202f]?".join(whole) + (f"[.,]{fraction}" if fraction else "")
            number = ",".join(whole) + (f".{fraction}" if fraction else "")
            translation = re.sub(rf"(?<![\d.,]){pattern}(?![\d.,]*\d)", number, translation)
        if text[each.start() - 1 : each.start()] == "%":
            translation = re.sub(rf"(?<![\d%])%{written}(?![\d%])", f"{each[0]}%", translation)
    return translation


def _groups(number: str, text: str) -> tuple[list[str], str] | None:
    """Returns the groups of three digits of a number, and its fraction; None where these are in doubt.

    There is no doubt with three groups or a fraction, nor about a comma in Chinese, Japanese or Korean, which write
    numbers as English does.
    """
    found = _DECIMAL.fullmatch(number)
    if found is None or not found["separator"]:
        return None
    whole, fraction = found[1].split(found["separator"]), found[3] or ""
    is_english = found["separator"] == "," and any(unicodedata.east_asian_width(each) in "WF" for each in text)
    return (whole, fraction) if len(whole) > _MOST_GROUPS_IN_DOUBT or fraction or is_english else None


def _with_point(found: re.Match) -> str:
    around = found.string[max(found.start() - 1, 0) : found.start()] + found.string[found.end() : found.end() + 1]
    if around in _BRACKETS and "." not in found[1]:
        return found[0]
    return found[1].replace(".", ",") + "." + found[2]


def _number(text: str) -> str:
    """Returns a number as all languages write it: digits, and a point before a fraction and in a version or date."""
    if signs := _SIGN.findall(text := unicodedata.normalize("NFKC", text)):
        return " ".join([*signs, _number(_SIGN.sub("", text).strip())])
    number = in_english(text).strip(string.ascii_letters)
    if decimal := _DECIMAL.fullmatch(number):
        whole, fraction = decimal[1], decimal[3] or ""
        is_group = len(fraction) == _GROUP  # 7,500, and 1234,567, which another language may write as 1,234.567
        return _digits(whole) + ("" if is_group or not fraction else ".") + fraction
    return _OTHER_SEPARATOR.sub(".", number)


def _digits(text: str) -> str:
    return "".join(filter(str.isdecimal, text))


def _is_percentage(text: str, found: re.Match, end: int, is_numbered: bool) -> bool:
    """Returns whether a percent sign belongs to a number: before it, but not to what ends at `end`, or after it."""
    if found[0] == "%%":
        return False
    start = found.start()
    is_after_digit = start > end and text[start - 1].isdigit()
    return found[0][0] == "%" and (is_after_digit or (not is_numbered and bool(_NUMBERED.fullmatch(found[0]))))


def _is_required(found: re.Match, ended: set[str]) -> bool:
    if found.lastgroup == "number":
        return len(_digits(found[0])) >= _FEWEST_DIGITS or bool(_SIGN.search(found[0]))
    if found.lastgroup == "tag":
        return _is_markup(found[0], ended)
    return found.lastgroup is not None


def _is_markup(tag: str, ended: set[str]) -> bool:
    """Returns whether a tag ends something, has attributes or no end, or is among those that are `ended`."""
    name = _NAME.match(tag)
    return bool(name) and (tag.endswith("/>") or '="' in tag or name[1].lower() in ended | set(_WITHOUT_END))
