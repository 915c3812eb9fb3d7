"""The texts of Fluent files (.ftl), the message format of Firefox and Thunderbird.

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

import re
from collections.abc import Iterable, Iterator, Mapping

from fluent.runtime import FluentBundle
from fluent.syntax import FluentParser, ast, visitor
from lxml import html  # pyright: ignore[reportAttributeAccessIssue]; it is compiled, without type stubs

_NO_TEXT = re.compile(r"key|key(?:code|shortcut)|style|\w*accesskey\w*", re.IGNORECASE)  # attributes for the program
_MARKUP = re.compile(r"<[A-Za-z/]")


def texts(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns the texts of the Fluent files of one language, by file and by message, `id` or `id.attribute`.

    A message that refers to something that no file has is left out. What is not Fluent in a file is skipped, as the
    applications do.

    Args:
      files: their contents by name. A term may be in another file than the message that uses it.
    """
    parser = FluentParser(with_spans=False)
    resources = {name: parser.parse(content) for name, content in files.items()}
    placeholders = _Placeholders()
    for resource in resources.values():
        placeholders.visit(resource)
    return {
        name: dict(_texts(resource, _bundle([resource, *resources.values()]), placeholders.by_name))
        for name, resource in resources.items()
    }


def _bundle(resources: Iterable[ast.Resource]) -> FluentBundle:
    """Returns what formats messages; of two messages with one id, that of the first resource counts."""
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
    for message in resource.body:
        if isinstance(message, ast.Message):
            attributes = [attribute.id.name for attribute in message.attributes]
            for attribute in ["", *attributes]:
                text = None if _NO_TEXT.fullmatch(attribute) else _format(bundle, message, attribute, placeholders)
                if text is not None:
                    yield f"{message.id.name}.{attribute}".removesuffix("."), _without_markup(text)


def _format(bundle: FluentBundle, message: ast.Message, attribute: str, placeholders: Mapping[str, str]) -> str | None:
    """Returns the text of a message, or of its attribute; None if it has none, or a reference in it leads nowhere."""
    resolved = bundle.get_message(message.id.name)
    pattern = resolved.attributes[attribute] if attribute else resolved.value
    if pattern is None:
        return None
    try:
        text, errors = bundle.format_pattern(pattern, dict(placeholders))
    except RecursionError:  # the message refers to itself
        return None
    return None if errors else str(text)


def _without_markup(text: str) -> str:
    return html.fragment_fromstring(text, create_parent=True).text_content() if _MARKUP.search(text) else text
