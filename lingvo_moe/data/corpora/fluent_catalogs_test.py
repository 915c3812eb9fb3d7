"""Protects the texts of Fluent files: what a user of the application would read, with the names of its values."""

from __future__ import annotations

import pytest

from lingvo_moe.data.corpora import fluent_catalogs

_BRANDS = """\
-brand-name = { $case ->
   *[nominative] Firefox
    [genitive] Firefoxu
}
"""


def _text(message: str) -> str | None:
    """The text of the message `a` in a file beside that of the brands, None if it has none."""
    return fluent_catalogs.texts({"brand.ftl": _BRANDS, "app/a.ftl": message})["app/a.ftl"].get("a")


@pytest.mark.parametrize(
    "message, text",
    [
        ("a = Close it", "Close it"),
        ("a =\n    One line\n    and another", "One line\nand another"),
        ("a = About { -brand-name }", "About Firefox"),
        ('a = Okno { -brand-name(case: "genitive") }', "Okno Firefoxu"),
        ("a = { $count } of { $total }", "{$count} of {$total}"),
        ("a = { $n ->\n    [one] a tab\n   *[other] { $n } tabs\n }", "{$n} tabs"),
        ("a = { PLATFORM() ->\n    [macos] Preferences\n   *[other] Settings\n }", "Settings"),
        ('a = On { DATETIME($date, month: "long") }, { NUMBER($size) } MB', "On {$date}, {$size} MB"),
        ("a = See { b }, { b.label }\nb = this\n    .label = that", "See this, that"),
        ('a = { "{" }x{ "}" }', "{x}"),
        ('a = Read <a data-l10n-name="x">our <b>terms</b></a> &amp; more', "Read our terms & more"),
        ("a = One<br>Two<p>Three", "One Two Three"),
        ("a = &lt;name&gt; &amp; more", "<name> & more"),
        ("a = Ended by <xsl:message>, <Ctrl+K>", "Ended by <xsl:message>, <Ctrl+K>"),
        ("a = 3 < 4", "3 < 4"),
        ("a = See { nothing }", None),
        ("a = See { -nothing }", None),
        ("a = { a }", None),
        ("a = { $no end", None),
    ],
)
def test_text_of_a_message(message, text):
    """References are resolved, choices are made, markup is gone; a message that cannot be completed has no text."""
    assert _text(message) == text


def test_attributes_are_texts_unless_the_program_reads_them():
    """Keys and styles differ between languages, but they are no translations."""
    first = "a = File\n    .label = Open\n    .accesskey = O\n    .buttonaccesskeyaccept = K\n    .style = width: 3em\n"
    more = "    .key = o\n    .keycode = VK_F1\n    .searchkeywords = find\nb =\n    .aria-label = Close\n"
    keys = "    .acceltext = F1\nc-accesskey = C\nd-access-key = D\nkeyboard = Keyboard\ne =\n    .keylabel = E\n"
    read = fluent_catalogs.texts({"a.ftl": first + more + keys + "    .keyshortcut = e"})["a.ftl"]
    texts = {"a": "File", "a.label": "Open", "a.searchkeywords": "find", "b.aria-label": "Close"}
    assert read == {**texts, "keyboard": "Keyboard"}


def test_message_of_another_file_with_the_same_id():
    """Each file has its own; of two in one file the first counts, as in the applications."""
    read = fluent_catalogs.texts(
        {"a.ftl": "a = One\na = Two\n    .label = Three", "b.ftl": "a = { -name }\n-name = Four"}
    )
    assert read == {"a.ftl": {"a": "One"}, "b.ftl": {"a": "Four"}}


def test_the_rest_of_a_damaged_file_is_read():
    """As the applications do: they show the messages that they understand."""
    read = fluent_catalogs.texts({"a.ftl": "a = One\nb c = { \nd = Two\n"})
    assert read == {"a.ftl": {"a": "One", "d": "Two"}}
