"""Divides messages in ICU's MessageFormat at their plural and select arguments, which have a text for each form.

`{count, plural, one {# Datei} other {# Dateien}}`: the texts in the inner braces are translated, the rest is copied. A
sentence around the only such argument becomes a part of each of its texts, as languages have other orders of words:
`{n, plural, one {# Datei} other {# Dateien}} löschen?` has the texts `# Datei löschen?` and `# Dateien
löschen?`.
"""

from __future__ import annotations

import itertools
import re

_COMPLEX_ARGUMENT = re.compile(r"\{\s*\w+\s*,\s*(?:plural|selectordinal|select)\s*,(?:\s*offset:\s*\d+)?")
_SELECTOR = re.compile(r"\s*(?:=\d+|[\w-]+)\s*\{")
_END_OF_ARGUMENT = re.compile(r"\s*\}")
# Braces between apostrophes are text.
_BRACE = re.compile(r"'[{}][^']*'|[{}]")
_SIMPLE_ARGUMENT = re.compile(r"\{[^{}]*\}")
_LINE_END = re.compile(r"[\t-\r]|\\[nrt]")


def divide(line: str) -> list[str]:
    """Returns texts and, between them, what is copied: `[text, copied, text, ...]`; a line without arguments is a text.

    So is a line whose braces do not match.
    """
    spans, is_single = [], True
    at = 0
    while argument := _COMPLEX_ARGUMENT.search(line, at):
        found = _syntax(line, argument)
        if not found:
            return [line]
        is_single = is_single and not spans and all(line[end - 1] == "{" for _, end in found[:-1])
        spans += found
        at = found[-1][1]
    if not spans:
        return [line]
    before, after = line[: spans[0][0]], line[spans[-1][1] :]
    if is_single and any(map(str.isalpha, before + after)) and not _LINE_END.search(before + after):
        return _with_sentence_around(line, spans)
    ends = [0, *(edge for span in spans for edge in span), len(line)]
    return [line[start:end] for start, end in itertools.pairwise(ends)]


def _syntax(line: str, argument: re.Match) -> list[tuple[int, int]]:
    """Returns where the syntax of an argument and of those inside of it is; nothing if its braces do not match."""
    spans, start, at = [], argument.start(), argument.end()
    depth, is_text = 1, False  # of arguments; one of their texts is inside of the innermost
    while depth:
        if not is_text:
            if selector := _SELECTOR.match(line, at):
                spans.append((start, at := selector.end()))
                is_text = True
            elif end := _END_OF_ARGUMENT.match(line, at):
                spans.append((start, at := end.end()))
                depth, is_text = depth - 1, True
            else:
                return []
        elif not (brace := _BRACE.search(line, at)):
            return []
        elif brace[0] == "}":
            start, at, is_text = brace.start(), brace.end(), False
        elif brace[0] != "{":
            at = brace.end()
        elif inner := _COMPLEX_ARGUMENT.match(line, brace.start()):
            start, at = inner.span()
            depth, is_text = depth + 1, False
        elif simple := _SIMPLE_ARGUMENT.match(line, brace.start()):
            at = simple.end()
        else:
            return []
    return spans


def _with_sentence_around(line: str, spans: list[tuple[int, int]]) -> list[str]:
    """Returns a message whose texts have the sentence around its argument; white space at the ends stays there."""
    first, last = len(line) - len(line.lstrip()), len(line.rstrip())
    before, after = line[first : spans[0][0]], line[spans[-1][1] : last]
    pieces = [line[:first], line[slice(*spans[0])]]
    for (_, start), (end, after_syntax) in itertools.pairwise(spans):
        pieces += [before + line[start:end] + after, line[end:after_syntax]]
    return [*pieces, line[last:]]
