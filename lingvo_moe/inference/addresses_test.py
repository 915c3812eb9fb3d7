"""Addresses are replaced by short ones and come back unchanged; other text with dots and slashes is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.addresses import restore, shorten
from lingvo_moe.inference.kept_text import ADDRESS


@pytest.mark.parametrize(
    "text, shortened, addresses",
    [
        ("Siehe https://a.de/b?c=1&d=2.", "Siehe http://1.", ("https://a.de/b?c=1&d=2",)),
        ("[hier](http://a.de/b_c) (www.a.de)", "[hier](http://1) (http://2)", ("http://a.de/b_c", "www.a.de")),
        ('<a href="https://a.de/">hier</a>', '<a href="http://1">hier</a>', ("https://a.de/",)),
        ("An max.muster+x@mail.beispiel.de!", "An http://1!", ("max.muster+x@mail.beispiel.de",)),
        ("FTP://A.DE UND HTTP://B.DE", "http://1 UND http://2", ("FTP://A.DE", "HTTP://B.DE")),
        ("参见 https://a.de/foo。谢谢", "参见 http://1。谢谢", ("https://a.de/foo",)),
        ("詳細はhttps://a.jp/を", "詳細はhttp://1を", ("https://a.jp/",)),
        ("a@b.de로", "http://1로", ("a@b.de",)),
        ("https://ru.a.org/wiki/Линукс,", "http://1,", ("https://ru.a.org/wiki/Линукс",)),
        ("%s@example.com", "%s@example.com", ()),
        ("http://1 und http://1", "http://1 und http://2", ("http://1", "http://1")),
        ("Benutzer @admin in /etc/hosts: 3.14", "Benutzer @admin in /etc/hosts: 3.14", ()),
        ("https:// und www.", "https:// und www.", ()),
        ("", "", ()),
    ],
)
def test_addresses_are_shortened_and_restored(text, shortened, addresses):
    assert shorten(text) == (shortened, addresses)
    assert restore(shortened, addresses) == (text, True)


@pytest.mark.parametrize(
    "translation, expected",
    [
        ("http://2 before http://1", ("b.de before a.de", True)),
        ("only http://1", ("only a.de", False)),
        ("http://1 http://2 http://2", ("a.de b.de b.de", False)),
        ("http://1 http://2 http://12", ("a.de b.de http://12", False)),
        ("none", ("none", False)),
    ],
)
def test_a_translation_that_lacks_an_address_is_incomplete(translation, expected):
    assert restore(translation, ("a.de", "b.de")) == expected


@given(st.lists(st.sampled_from(["https://a.de/1", "www.b.de", "c@d.de", "und", "(", ")", ".", "http://1", "http://"])))
def test_any_text_comes_back(parts):
    """And has no address of its own while it is shortened."""
    text = " ".join(parts)
    shortened, addresses = shorten(text)
    assert restore(shortened, addresses) == (text, True)
    assert [found[0] for found in ADDRESS.finditer(text)] == list(addresses)


def test_a_long_text_takes_no_longer_than_its_length():
    """A regular expression with nested repetitions would take years here."""
    assert shorten("a@" * 20_000 + "www." * 20_000 + "a." * 20_000).text
