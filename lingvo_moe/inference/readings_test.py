"""The ways to read a line, and the choice among their translations."""

from __future__ import annotations

import numpy as np

from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.readings import Line, LineReader, Reading
from lingvo_moe.inference.translation import Translation
from lingvo_moe.inference.unknown_symbols import Framed


class _Tokenizer(Tokenizer):
    """A piece for each capital and for each word without one; knows everything but a snowman."""

    def encode(self, texts):
        sizes = (sum(max(1, sum(map(str.isupper, word))) for word in text.split()) for text in texts)
        return [np.zeros(size, np.int32) for size in sizes]

    def has_pieces_for(self, text):
        return "\u2603" not in text


def _readings(line: str, limit: int = 12) -> list[Reading]:
    (found,) = LineReader(_Tokenizer(b""), limit).lines([line])
    return found.readings


def test_a_plain_line_is_read_as_it_is():
    (line,) = LineReader(_Tokenizer(b""), 12).lines(["\u2603 \u2068neerg\u2069  der"])
    assert line == Line(Framed("\u2603 ", "neerg der", ""), [Reading(["neerg der"])])


def test_capitals_and_addresses_have_readings_of_their_own():
    assert _readings("NEERG DER") == [Reading(["NEERG DER"]), Reading(["Neerg der"])]
    short, plain = Reading(["neerg http://1"], ("a@b.de",)), Reading(["neerg a@b.de"])
    assert _readings("neerg a@b.de") == [short, plain]
    assert [reading.parts for reading in _readings("NEERG A@B.DE")] == [
        ["NEERG http://1"],
        ["Neerg http://1"],
        ["NEERG A@B.DE"],
        ["Neerg A@B.DE"],
    ]


def test_capitals_that_do_not_fit_are_read_in_lower_case_alone(caplog):
    """Nothing is lost then, so nobody is warned."""
    assert _readings("NEERG DER EULB") == [Reading(["NEERG DER EULB"]), Reading(["Neerg der eulb"])]
    assert _readings("NEERG DER EULB", limit=4) == [Reading(["Neerg der eulb"])]
    assert _readings("NEERG DER. EULB.", limit=2) == [Reading(["Neerg der.", "Eulb."])] and not caplog.text


def test_the_line_with_a_sentence_that_is_too_long_is_named(caplog):
    """Whatever its readings; lines are counted from the first one of the input."""
    lines = ["der", "NEERG DER EULB", "neerg der www.a.de"]
    read = LineReader(_Tokenizer(b""), 2).lines(lines, first=5)
    assert caplog.messages[0].startswith("lines 6, 7: a sentence has more than 2 tokens; its end is not translated")
    assert [reading.parts for reading in read[1].readings] == [["Neerg der"]]


def test_the_more_confident_translation_of_a_line_in_capitals_is_in_capitals():
    """Within its frame, whichever reading it is of; a placeholder keeps its case."""
    known = {}
    for confidence, expected in ((0.4, "\u2603 B %s"), (0.6, "\u2603 AS IT IS %s")):
        known["A %s"] = [Translation("as it is %s", -1.0, confidence=confidence)]
        known["a %s"] = [Translation("b %s", -2.0, confidence=0.5)]
        line = Line(Framed("\u2603 ", "A %s", ""), [Reading(["A %s"]), Reading(["a %s"])], True)
        assert [each.text for each in line.translations(known)] == [expected]


def test_addresses_are_copied_or_the_line_is_read_as_it_is():
    """The reading with short addresses is chosen if a translation has them, whatever the confidence."""
    line = Line(
        Framed("", "siehe www.a.de", ""),
        [Reading(["siehe http://1"], ("www.a.de",)), Reading(["siehe www.a.de"])],
    )
    known = {"siehe www.a.de": [Translation("see www.b.com", -1.0, confidence=0.9)]}
    for text, expected in (("see http://1", "see www.a.de"), ("see it", "see www.b.com")):
        known["siehe http://1"] = [Translation(text, -2.0, confidence=0.5)]
        assert [each.text for each in line.translations(known)] == [expected]


def test_intact_translations_come_first():
    """The others follow in their order; a placeholder or tag that the line does not have makes one not intact, too."""
    (line,) = LineReader(_Tokenizer(b""), 12).lines(["<b>neerg</b> %s"])
    texts = ["green %s", "<b>a</b> %s %s", "<b>green</b> %s", "%s <b>b</b>"]
    found = line.translations({"<b>neerg</b> %s": [Translation(text, -float(i)) for i, text in enumerate(texts)]})
    assert [(each.text, each.is_intact) for each in found] == [
        ("<b>green</b> %s", True),
        ("%s <b>b</b>", True),
        ("green %s", False),
        ("<b>a</b> %s %s", False),
    ]


def test_a_line_with_a_placeholder_has_a_fallback():
    """It is read only where no translation of the line is intact, and used only if its own is."""
    (line,) = LineReader(_Tokenizer(b""), 12).lines(["siehe %s, www.a.de"])
    assert [reading.parts for reading in line.readings] == [["siehe %s, http://1"], ["siehe %s, www.a.de"]]
    assert line.fallbacks == [Reading(["siehe http://1, http://2"], ("%s", "www.a.de"))]
    known = {
        "siehe %s, http://1": [Translation("see http://1", -1.0, confidence=0.9)],
        "siehe %s, www.a.de": [Translation("see www.a.de", -1.0, confidence=0.5)],
    }
    assert line.texts_of_fallbacks(known) == ["siehe http://1, http://2"]
    for text, expected in (("see http://1, http://2", "see %s, www.a.de"), ("see http://2", "see www.a.de")):
        fallback = {"siehe http://1, http://2": [Translation(text, -2.0, confidence=0.1)]}
        assert [each.text for each in line.translations(known | fallback)] == [expected]
    known["siehe %s, http://1"] = [Translation("http://1: see %s", -1.0)]
    assert not line.texts_of_fallbacks(known)
    assert [each.text for each in line.translations(known)] == ["www.a.de: see %s"]


def test_a_fallback_of_another_line_changes_nothing():
    """Only the first line needs the fallback that both have; a translation must not depend on the lines beside it."""
    one, other = LineReader(_Tokenizer(b""), 12).lines(["neerg %s", "neerg %d"])
    known = {
        "neerg %s": [Translation("green", -1.0, confidence=0.5)],
        "neerg %d": [Translation("green %d", -1.0, confidence=0.5)],
        "neerg http://1": [Translation("lime http://1", -1.0, confidence=0.9)],
    }
    assert one.fallbacks[0].parts == other.fallbacks[0].parts and not other.texts_of_fallbacks(known)
    assert [line.translations(known)[0].text for line in (one, other)] == ["lime %s", "green %d"]


def test_lines_without_placeholders_have_no_fallback():
    """Those with addresses alone are read with short ones anyway."""
    lines = LineReader(_Tokenizer(b""), 12).lines(["neerg", "neerg www.a.de", "<neerg> 100%"])
    assert [list(line.fallbacks) for line in lines] == [[], [], []]
