"""What must be kept is replaced by short addresses and comes back unchanged; other text stays as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.lines.kept_text import ADDRESS, required
from lingvo_moe.inference.lines.short_addresses import is_unambiguous, restore, shorten


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
    assert shorten(text, ADDRESS.finditer(text)) == (shortened, addresses)
    assert restore(shortened, addresses) == text


def test_all_that_is_required_is_shortened():
    text = "<b>%1$s</b>: {name} (https://a.de), 5 %"
    assert shorten(text, required(text)) == (
        "http://1http://2http://3: http://4 (http://5), 5 %",
        ("<b>", "%1$s", "</b>", "{name}", "https://a.de"),
    )


@pytest.mark.parametrize(
    "translation, expected",
    [
        ("http://2 before http://1", "b.de before a.de"),
        ("http://1 http://2 http://12", "a.de b.de http://12"),
        ("http://0", "http://0"),
        ("none", "none"),
    ],
)
def test_short_addresses_without_an_original_stay(translation, expected):
    assert restore(translation, ("a.de", "b.de")) == expected


@pytest.mark.parametrize(
    "inputs, is_cut, expected",
    [
        (["http://1 und", "http://2"], False, True),
        (["http://15 Dateienhttp://2"], False, False),
        (["http://2 http://1"], False, False),
        (["xhttp://1 http://1 http://2"], False, False),
        (["http://1"], False, False),
        (["http://1", "http:/"], True, True),
        (["http://1٥ http://2"], False, False),
    ],
)
def test_short_addresses_that_cannot_be_told_from_the_text_are_found(inputs, is_cut, expected):
    assert is_unambiguous(inputs, ("<b>", "</b>"), is_cut) == expected


def test_a_short_address_that_is_cut_is_not_another_one():
    shortened, originals = shorten("%s " * 12, required("%s " * 12))
    assert is_unambiguous([shortened], originals) and is_unambiguous([shortened[: 9 * 9]], originals, is_cut=True)
    assert not is_unambiguous([shortened.strip()[:-1]], originals, is_cut=True)


_PARTS = "https://a.de/1 www.b.de c@d.de und ( ) . http://1 http:// %s {n} <b> $1 5 12".split()


@given(st.lists(st.sampled_from(_PARTS)), st.sampled_from(["", " "]))
def test_any_text_comes_back(parts, space):
    """Unless a digit follows a short address, or the text has one of its own; spaces between its parts avoid both."""
    text = space.join(parts)
    for found in (list(ADDRESS.finditer(text)), required(text)):
        shortened, originals = shorten(text, found)
        assert [each[0] for each in found] == list(originals)
        if space or is_unambiguous([shortened], originals):
            assert is_unambiguous([shortened], originals)
            assert restore(shortened, originals) == text


def test_a_long_text_takes_no_longer_than_its_length():
    """A regular expression with nested repetitions would take years here."""
    text = "a@" * 20_000 + "www." * 20_000 + "a." * 20_000 + "<a" * 20_000 + "{a" * 20_000 + "%0" * 20_000
    assert shorten(text, required(text)).text
