"""The texts of Fluent files (.ftl, Project Fluent's syntax 1.0), the message format of Firefox and Thunderbird.

    -brand-name = Firefox
    close-tabs = { $count ->
        [one] Close the tab of { -brand-name }
       *[other] Close { $count } tabs of { -brand-name }
    }
        .label = <b>Close</b>
        .accesskey = C

has the texts `Close {$count} tabs of Firefox` and `Close`: terms are put in, of a choice the default form is read,
variables are placeholders, and there is no markup.
"""

from __future__ import annotations

import collections
import html
import re
from collections.abc import Iterable, Iterator, Mapping

from fluent.runtime import FluentBundle
from fluent.syntax import FluentParser, ast, visitor
from lxml.html import defs  # pyright: ignore[reportAttributeAccessIssue]; it is compiled, without type stubs

# Messages and attributes that are no texts: keys, combinations of keys, and styles.
_NO_TEXT = re.compile(r".*access-?key\w*|.*[-.](?:key(?:code|shortcut|label\w*)?|acceltext|style)", re.IGNORECASE)
_TAG = re.compile(r"</?([A-Za-z][\w:.+-]*)[^<>]*>")


def texts(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns the texts of the Fluent files of one language, by file and by message, `id` or `id.attribute`.

    A message that refers to something that no file has is left out. What is not Fluent in a file is skipped, as the
    applications do.

    Args:
      files: their contents by name. A term may be in another file than the message that uses it.

    Raises:
      RecursionError: the expressions of a file are nested hundreds of levels deep.
    """
    parser = FluentParser(with_spans=False)
    resources = {name: parser.parse(content) for name, content in files.items()}
    placeholders = _Placeholders()
    for resource in resources.values():
        placeholders.visit(resource)
    count = collections.Counter(message.id.name for resource in resources.values() for message in _messages(resource))
    bundle_of_all = _bundle(resources.values())
    found = {}
    for name, resource in resources.items():
        # Of messages with one id, a bundle has the first.
        is_unique = all(count[message.id.name] == 1 for message in _messages(resource))
        bundle = bundle_of_all if is_unique else _bundle([resource, *resources.values()])
        found[name] = dict(_texts(resource, bundle, placeholders.by_name))
    return found


def _messages(resource: ast.Resource) -> Iterator[ast.Message]:
    return (entry for entry in resource.body if isinstance(entry, ast.Message))


def _bundle(resources: Iterable[ast.Resource]) -> FluentBundle:
    """Returns what formats the messages of files."""
    # A locale would only decide how a number written in a message is formatted. Values are not known here: a function
    # of one gives its placeholder.
    functions = {"PLATFORM": lambda: "other", "NUMBER": _first, "DATETIME": _first}
    bundle = FluentBundle(["en"], functions, use_isolating=False)
    for resource in resources:
        bundle.add_resource(resource)
    return bundle


class _Placeholders(visitor.Visitor):
    """Collects the variables of the visited files, each with a placeholder for its value."""

    def __init__(self):
        self.by_name: dict[str, str] = {}

    def visit_VariableReference(self, node: ast.VariableReference):
        self.by_name[node.id.name] = f"{{${node.id.name}}}"


def _first(value: object, **options: object) -> object:
    del options
    return value


def _texts(resource: ast.Resource, bundle: FluentBundle, placeholders: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for message in _messages(resource):
        for attribute in ["", *(attribute.id.name for attribute in message.attributes)]:
            key = f"{message.id.name}.{attribute}".removesuffix(".")
            text = None if _NO_TEXT.fullmatch(key) else _format(bundle, message, attribute, placeholders)
            if text is not None:
                yield key, _without_markup(text)


def _format(bundle: FluentBundle, message: ast.Message, attribute: str, placeholders: Mapping[str, str]) -> str | None:
    """Returns the text of a message, or of its attribute; None if it has none, or a reference in it leads nowhere."""
    resolved = bundle.get_message(message.id.name)
    pattern = resolved.attributes.get(attribute) if attribute else resolved.value
    if pattern is None:
        return None
    try:
        text, errors = bundle.format_pattern(pattern, dict(placeholders))
    except RecursionError:  # the message refers to itself
        return None
    return None if errors else str(text)


def _without_markup(text: str) -> str:
    """Removes the tags of HTML, and no other words in angle brackets; replaces entities."""
    return html.unescape(_TAG.sub(_replacement, text))


def _replacement(tag: re.Match[str]) -> str:
    name = tag[1].lower()
    if name not in defs.tags:
        return tag[0]
    return " " if name == "br" or name in defs.block_tags else ""
