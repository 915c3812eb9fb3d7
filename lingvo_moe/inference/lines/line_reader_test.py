"""The ways to read a line, and the choice among their translations."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.lines import readings
from lingvo_moe.inference.lines.line_reader import LineReader
from lingvo_moe.inference.lines.readings import Reading, Text
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.inference.lines.unknown_symbols import Framed

_LOST = Translation("", -9.0, is_intact=False)


class _Tokenizer(Tokenizer):
    """A piece for each capital and for each word without one; knows everything but a snowman."""

    def encode(self, texts):
        sizes = (sum(max(1, sum(map(str.isupper, word))) for word in text.split()) for text in texts)
        return [np.zeros(size, np.int32) for size in sizes]

    def has_pieces_for(self, text):
        return "\u2603" not in text


def _texts(*lines: str, limit: int = 12) -> list[Text]:
    return [text for line in LineReader(_Tokenizer(b""), limit).lines(lines) for text in line.texts.values()]


def _readings(line: str, limit: int = 12) -> list[Reading]:
    (text,) = _texts(line, limit=limit)
    return text.readings


def test_words_begin_with_no_language(monkeypatch):
    """By the numbers of their pieces, a mark of an accelerator is told from a part of a name."""
    read = []
    encode = _Tokenizer.encode
    monkeypatch.setattr(_Tokenizer, "encode", lambda self, texts: (read.append(self), encode(self, texts))[1])
    source = _Tokenizer(b"", language="de", own_language="de", names_target=True, target_piece="<2fr>")
    LineReader(source, 12).lines(["Enre_gistrer"])
    assert {(each.language, each.target_piece) for each in read} == {("", ""), ("de", "<2fr>")}


def test_a_plain_line_is_read_as_it_is():
    (text,) = _texts("\u2603 \u2068neerg\u2069  der")
    assert (text.frame, text.readings) == (Framed("\u2603 ", "neerg der", ""), [Reading(["neerg der"])])


def test_capitals_and_addresses_have_readings_of_their_own():
    assert _readings("NEERG DER") == [Reading(["NEERG DER"]), Reading(["Neerg der"])]
    short, plain = Reading(["neerg http://1"], ("a@b.de",)), Reading(["neerg a@b.de"])
    assert _readings("neerg a@b.de") == [short, plain]
    assert [reading.inputs for reading in _readings("NEERG A@B.DE")] == [
        ["NEERG http://1"],
        ["Neerg http://1"],
        ["NEERG A@B.DE"],
        ["Neerg A@B.DE"],
    ]


def test_capitals_that_do_not_fit_are_read_in_lower_case_alone():
    """Nothing is lost then."""
    assert _readings("NEERG DER EULB") == [Reading(["NEERG DER EULB"]), Reading(["Neerg der eulb"])]
    assert _readings("NEERG DER EULB", limit=4) == [Reading(["Neerg der eulb"])]
    assert _readings("NEERG DER. EULB.", limit=2) == [Reading(["Neerg der.", "Eulb."])]


def test_a_sentence_that_is_too_long_is_cut():
    """Whatever the reading; its translations say so, and only those."""
    whole, lowered, address = _texts("der", "NEERG DER EULB", "neerg der www.a.de", limit=2)
    assert not whole.readings[0].is_cut
    assert lowered.readings == [Reading(["Neerg der"], (), True)]
    assert address.readings == [Reading(["neerg der"], ("www.a.de",), True), Reading(["neerg der"], (), True)]
    known = {"Neerg der": [Translation("Green red", -1.0)], "der": [Translation("red", -1.0)]}
    assert lowered.translations(known)[0].is_cut and not whole.translations(known)[0].is_cut


def test_many_sentences_are_read_one_by_one():
    """A model drops some of three; two are read together."""
    assert _readings("Neerg. Der.") == [Reading(["Neerg. Der."])]
    assert _readings("Neerg. Der. Eulb.") == [Reading(["Neerg.", "Der.", "Eulb."])]
    capitals, lowered = _readings("NEERG. DER. EULB.", limit=20)
    assert capitals.inputs == ["NEERG.", "DER.", "EULB."] and lowered.inputs == ["Neerg.", "Der.", "Eulb."]


def test_the_texts_of_a_line_are_translated_one_by_one():
    """What is between them is copied, and quotes get their backslashes back."""
    (line,) = LineReader(_Tokenizer(b""), 12).lines(['  \\"neerg eulb\\"\t12\\n DER\r'])
    assert line.inputs == ['"neerg eulb"', "DER", "Der"]
    known = {
        '"neerg eulb"': [Translation('"green"', -1.0, confidence=0.9), Translation("green", -3.0, confidence=0.7)],
        "DER": [Translation("der", -2.0, confidence=0.1), Translation("die", -2.0, confidence=0.1)],
        "Der": [Translation("red", -2.0, confidence=0.8), Translation("Red", -2.5, confidence=0.6)],
    }
    best, second = line.translations(known)
    assert (best.text, best.score, best.confidence) == ('  \\"green\\"\t12\\n RED\r', -2.0, 0.8)
    assert (second.text, second.score) == ("  green\t12\\n RED\r", -3.0)


def test_equal_parts_are_read_once(monkeypatch):
    """A line of a table, of which a cell is repeated thousands of times, takes no longer for it."""
    encoded: list[str] = []

    class Counting(_Tokenizer):
        def encode(self, texts):
            encoded.extend(texts)
            return super().encode(texts)

    first, second = LineReader(Counting(b""), 12).lines(["neerg\tder\t" * 50, "der"])
    assert first.inputs == ["neerg", "der"] and second.inputs == ["der"]
    assert sorted(encoded) == ["der", "neerg"]
    known = {"neerg": [Translation("green", -1.0)], "der": [Translation("red", -2.0), Translation("Red", -3.0)]}
    assert [each.text for each in first.translations(known)] == ["green\tred\t" * 50, "green\tRed\t" * 50]
    checked = []
    monkeypatch.setattr(readings, "count_required", checked.append)
    first.translations(known)
    assert sorted(checked) == sorted(["neerg", "der", "green", "red", "Red"])


def test_equal_translations_of_a_line_are_left_out():
    """Those of a line in capitals may differ only in case before."""
    (line,) = LineReader(_Tokenizer(b""), 12).lines(["DER EULB"])
    texts = ["red", "Red", "blue", "RED"]
    known = {
        "DER EULB": [Translation("x", -9.0, confidence=0.1)] * 4,
        "Der eulb": [Translation(text, -float(i), confidence=0.5) for i, text in enumerate(texts)],
    }
    assert [(each.text, each.score) for each in line.translations(known)] == [("RED", 0.0), ("BLUE", -2.0)]


def test_digits_of_other_scripts_are_those_of_english_in_a_fallback():
    (text,) = _texts("neerg ١٢٣")
    assert text.readings == [Reading(["neerg ١٢٣"])] and text.read_again(_LOST) == [
        Reading(["neerg http://1"], ("123",))
    ]
    known = {"neerg ١٢٣": [Translation("green 12", -1.0)], "neerg http://1": [Translation("green http://1", -1.0)]}
    assert text.translations(known)[0].text == "green 123"


def test_the_more_confident_translation_of_a_line_in_capitals_is_in_capitals():
    """Within its frame, whichever reading it is of; a placeholder keeps its case."""
    known = {}
    for confidence, expected in ((0.4, "\u2603 B %s"), (0.6, "\u2603 AS IT IS %s")):
        known["A %s"] = [Translation("as it is %s", -1.0, confidence=confidence)]
        known["a %s"] = [Translation("b %s", -2.0, confidence=0.5)]
        text = Text(Framed("\u2603 ", "A %s", ""), [Reading(["A %s"]), Reading(["a %s"])], True)
        assert [each.text for each in text.translations(known)] == [expected]


def test_addresses_are_copied_or_the_line_is_read_as_it_is():
    """The reading with short addresses is chosen if a translation has them, whatever the confidence."""
    read = Text(
        Framed("", "siehe www.a.de", ""),
        [Reading(["siehe http://1"], ("www.a.de",)), Reading(["siehe www.a.de"])],
    )
    known = {"siehe www.a.de": [Translation("see www.b.com", -1.0, confidence=0.9)]}
    for text, expected in (("see http://1", "see www.a.de"), ("see it", "see www.b.com")):
        known["siehe http://1"] = [Translation(text, -2.0, confidence=0.5)]
        assert [each.text for each in read.translations(known)] == [expected]


def test_intact_translations_come_first():
    """The others follow in their order; a placeholder or tag that the line does not have makes one not intact, too."""
    (read,) = _texts("<b>neerg</b> %s")
    texts = ["green %s", "<b>a</b> %s %s", "<b>green</b> %s", "%s <b>b</b>"]
    found = read.translations({"<b>neerg</b> %s": [Translation(text, -float(i)) for i, text in enumerate(texts)]})
    assert [(each.text, each.is_intact) for each in found] == [
        ("<b>green</b> %s", True),
        ("%s <b>b</b>", True),
        ("green %s", False),
        ("<b>a</b> %s %s", False),
    ]


def test_a_line_with_a_placeholder_has_a_fallback():
    """It is read only where no translation of the line is intact, and used only if its own is."""
    (read,) = _texts("siehe %s, www.a.de")
    assert [reading.inputs for reading in read.readings] == [["siehe %s, http://1"], ["siehe %s, www.a.de"]]
    assert read.read_again(_LOST) == [Reading(["siehe http://1, http://2"], ("%s", "www.a.de"))]
    known = {
        "siehe %s, http://1": [Translation("see http://1", -1.0, confidence=0.9)],
        "siehe %s, www.a.de": [Translation("see www.a.de", -1.0, confidence=0.5)],
    }
    assert read.inputs_read_again(known) == ["siehe http://1, http://2"]
    for text, expected in (("see http://1, http://2", "see %s, www.a.de"), ("see http://2", "see www.a.de")):
        fallback = {"siehe http://1, http://2": [Translation(text, -2.0, confidence=0.1)]}
        assert [each.text for each in read.translations(known | fallback)] == [expected]
    known["siehe %s, http://1"] = [Translation("http://1: see %s", -1.0)]
    assert not read.inputs_read_again(known)
    assert [each.text for each in read.translations(known)] == ["www.a.de: see %s"]


class _Multilingual(Tokenizer):
    """A piece for each word and each `_`, after that of the language, if there is one."""

    def encode(self, texts):
        sizes = (len(text.replace("_", " ").split()) + text.count("_") + bool(self.language) for text in texts)
        return [np.zeros(size, np.int32) for size in sizes]

    def has_pieces_for(self, text):
        return True


@pytest.mark.parametrize(
    "confidence, expected",
    [(0.5, [("%2$d red %1$s", False), ("red %s %d", True)]), (0.8, [("red %s %d", True), ("%2$d red %1$s", False)])],
)
def test_formats_that_change_places_get_numbers_and_a_mark(confidence, expected):
    """A translation that keeps their order is for every program, so it comes first if it is about as confident."""
    (text,) = _texts("%s der %d")
    known = [Translation("%d red %s", -1.0, confidence=0.9), Translation("red %s %d", -2.0, confidence=confidence)]
    assert [(each.text, each.is_intact) for each in text.translations({"%s der %d": known})] == expected


@pytest.mark.parametrize(
    "numbered, confidence, expected",
    [
        ("%2$d red %1$d", 0.8, ("%2$d red %1$d", False)),
        ("%1$d red %2$d", 0.8, ("%d red %d", True)),
        ("%2$d red %1$d", 0.5, ("%d red %d", True)),
        ("%2$d red", 0.8, ("%d red %d", True)),
    ],
)
def test_equal_formats_are_read_with_numbers_too(numbered, confidence, expected):
    """Only these show whether they change places; that must be as sure as the translation without numbers."""
    (text,) = _texts("%d der %d")
    assert text.inputs == ["%1$d der %2$d", "%d der %d"]
    known = {
        "%1$d der %2$d": [Translation(numbered, -1.0, confidence=confidence)],
        "%d der %d": [Translation("%d red %d", -1.0, confidence=0.9)],
    }
    best = text.translations(known)[0]
    assert (best.text, best.is_intact) == expected


@pytest.mark.parametrize("language", ["", "fra_Latn"])
def test_the_piece_of_a_language_is_no_piece_of_a_word(language):
    """Two words have three of them together, but are not fewer pieces as one word: the mark is no accelerator."""
    (line,) = LineReader(_Multilingual(b"", language), 12).lines(["The garden_cold is here today and now"])
    assert line.inputs == ["The garden_cold is here today and now"]


@pytest.mark.parametrize("in_english, number", [(True, "1,234.5"), (False, "1.234,5")])
def test_a_number_is_put_into_english_alone_as_english_writes_it(in_english, number):
    """A model that translates into other languages keeps it as it is."""
    (line,) = LineReader(_Tokenizer(b""), 12, into_english=in_english).lines(["neerg 1.234,5"])
    (read,) = line.texts.values()
    assert [reading.originals for reading in read.read_again(_LOST)] == [(number,)]


@pytest.mark.parametrize(
    "into_english, inputs", [(True, ["neerg 2024-03-12", "der"]), (False, ["neerg 2024年3月12日", "«der»"])]
)
def test_dates_and_quotes_are_those_of_english_in_english_alone(into_english, inputs):
    """Another language may write them as the line does."""
    lines = LineReader(_Tokenizer(b""), 12, into_english=into_english).lines(["neerg 2024年3月12日", "«der»"])
    assert [text for line in lines for text in line.inputs] == inputs


def test_bold_text_is_read_with_tags_and_written_with_marks():
    """Of two hypotheses the one that has both tags is taken."""
    (line,) = LineReader(_Tokenizer(b""), 12).lines(["**Neerg** der"])
    assert line.inputs == ["<b>Neerg</b> der"]
    lost, kept = Translation("<b>Green red", -1.0), Translation("<b>Green</b> red", -2.0)
    best, *_ = line.translations({"<b>Neerg</b> der": [lost, kept]})
    assert (best.text, best.is_intact) == ("**Green** red", True)


def test_a_translation_that_loses_a_quote_is_not_intact():
    """Another hypothesis is taken, if one is."""
    (read,) = _texts('"neerg" und "der"')
    known = {read.inputs[0]: [Translation('"green" and "', -1.0), Translation('"green" and "red"', -2.0)]}
    assert [(each.text, each.is_intact) for each in read.translations(known)] == [
        ('"green" and "red"', True),
        ('"green" and "', False),
    ]


def test_a_translation_without_words_is_not_intact():
    """Unless the line has none: short addresses alone are a poor translation of a word and a number."""
    (read,) = _texts("neerg 12")
    known = {read.inputs[0]: [Translation("12", -1.0), Translation("green 12", -2.0)]}
    assert [(each.text, each.is_intact) for each in read.translations(known)] == [("green 12", True), ("12", False)]


def test_a_fallback_of_another_line_changes_nothing():
    """Only the first line needs the fallback that both have; a translation must not depend on the lines beside it."""
    one, other = _texts("neerg %s", "neerg %d")
    known = {
        "neerg %s": [Translation("green", -1.0, confidence=0.5)],
        "neerg %d": [Translation("green %d", -1.0, confidence=0.5)],
        "neerg http://1": [Translation("lime http://1", -1.0, confidence=0.9)],
    }
    assert one.read_again(_LOST)[0].inputs == other.read_again(_LOST)[0].inputs and not other.inputs_read_again(known)
    assert [text.translations(known)[0].text for text in (one, other)] == ["lime %s", "green %d"]


def test_lines_without_placeholders_have_no_fallback():
    """Those with addresses alone are read with short ones anyway."""
    texts = _texts("neerg", "neerg www.a.de", "<neerg> 5%")
    assert [text.read_again(_LOST) for text in texts] == [[], [], []]


def test_a_line_without_placeholders_is_read_as_a_doubtful_one_if_its_translation_is_not_intact():
    """One that begins to be code, for instance; but not where doubtful lines are not read again."""
    (line,) = LineReader(_Tokenizer(b""), 12, reread_below=0.5).lines(["neerg"])
    (text,) = line.texts.values()
    assert [reading.inputs for reading in text.read_again(_LOST)] == [["neerg."]]


_ENGLISH = st.sampled_from(["Open the selected file.", 'The "old" file was not found', "_Save all of these changes"])
_BETWEEN = st.sampled_from(["\t", "\\n", " \\t ", "  12\t", "\\n%s\\n"])


@hypothesis.given(st.lists(st.tuples(_ENGLISH, _BETWEEN), min_size=1), st.booleans())
def test_english_lines_are_copied_as_they_are(parts, escaped):
    """With white space, marks of accelerators, escapes and quotes, without anything to read."""
    given = "".join(text.replace('"', '\\"' if escaped else '"') + between for text, between in parts)
    (line,) = LineReader(_Tokenizer(b""), 12, english=_Tokenizer(b"")).lines([given])
    assert line.is_copied and line.inputs == line.inputs_read_again({}) == []
    assert [each.text for each in line.translations({})] == [given]


def test_an_english_line_keeps_how_its_letters_are_written():
    """A file may have entities or escapes because its encoding lacks the letters."""
    given = r"Open the selected caf&eacute; or r\u00e9sum\u00e9"
    english, other = LineReader(_Tokenizer(b""), 12, english=_Tokenizer(b"")).lines([given, "der gr&uuml;n"])
    assert english.is_copied and [each.text for each in english.translations({})] == [given]
    assert other.inputs == ["der grün"]


def test_english_parts_of_a_line_are_copied():
    """Into each of its translations."""
    lines = ["Open the selected file\tder neerg ist rot", "Open the selected file"]
    (line, _) = LineReader(_Tokenizer(b""), 12, english=_Tokenizer(b"")).lines(lines)
    assert (line.is_copied, line.inputs) == (False, ["der neerg ist rot"])
    found = line.translations({"der neerg ist rot": [Translation("green", -0.5), Translation("greet", -1)]})
    assert [(each.text, each.score) for each in found] == [
        ("Open the selected file\tgreen", -0.5),
        ("Open the selected file\tgreet", -1),
    ]
    for line in LineReader(_Tokenizer(b""), 12).lines(lines):
        assert not line.is_copied and "Open the selected file" in line.inputs


@pytest.mark.parametrize("line", ["<b>5 neerg</b>", "der <b>5</b>", "neerg %s2", "neerg {0}1", "xhttp://1 %s"])
def test_a_line_whose_short_addresses_would_be_ambiguous_has_no_fallback(line):
    """With `http://1` for `<b>`, the model would read `http://15`, and no check would find that `<b>` is lost.

    In capitals, only the reading in lower case may be ambiguous.
    """
    (text,) = _texts(line)
    known = {each: [Translation("green", -1.0)] for each in text.inputs}
    copied = {each: [Translation(each, -1.0)] for each in text.inputs_read_again(known)}
    assert [(each.text, each.is_intact) for each in text.translations(known | copied)] == [("green", False)]
    assert [reading.inputs for reading in _texts("XHTTP://1 %S")[0].read_again(_LOST)] == [["XHTTP://1 http://1"]]


def test_an_address_before_a_digit_is_read_as_it_is():
    assert _readings("neerg www.a.de٥") == [Reading(["neerg www.a.de٥"])]


def test_a_doubtful_text_is_read_in_other_ways():
    """The most confident translation is written as that of the text, which stays doubtful."""
    reader = LineReader(_Tokenizer(b""), 12, reread_below=0.5)
    (line,) = reader.lines(["Neerg der"])
    sure, doubtful = (Translation("Plain", -1.0, confidence=confidence) for confidence in (0.5, 0.4))
    assert line.inputs == ["Neerg der"] and not line.inputs_read_again({"Neerg der": [sure]})
    known = {"Neerg der": [doubtful]}
    assert line.inputs_read_again(known) == ["neerg der", "Neerg der."]
    for confidences, expected in (((0.45, 0.44), "Green one."), ((0.44, 0.45), "a green one"), ((0.3, 0.3), "Plain")):
        again = (Translation(text, -1.0, confidence=c) for text, c in zip(("green one.", "a green one."), confidences))
        known |= {text: [each] for text, each in zip(line.inputs_read_again(known), again)}
        assert [(each.text, each.confidence) for each in line.translations(known)] == [(expected, 0.4)]
    assert line.translations({"Neerg der": [sure]}) == [sure]


def test_a_text_that_lost_something_is_not_read_as_a_doubtful_one():
    (line,) = LineReader(_Tokenizer(b""), 12, reread_below=1.0).lines(["Neerg %s"])
    assert line.inputs_read_again({"Neerg %s": [Translation("green", -1.0, confidence=0.1)]}) == ["Neerg http://1"]


def test_another_way_to_read_keeps_what_must_be_kept():
    """It is that of the text: `Config.yaml` has become another file in a text that begins with a small letter."""
    text, again = "Neerg Config.yaml", "neerg Config.yaml"
    (line,) = LineReader(_Tokenizer(b""), 12, reread_below=0.5).lines([text])
    known = {text: [Translation("Config.yaml", -1.0, confidence=0.1)]}
    assert line.inputs_read_again(known) == [again, f"{text}."]
    known |= {again: [Translation("see config.yaml", -1.0, confidence=0.9)], f"{text}.": known[text]}
    assert [each.text for each in line.translations(known)] == ["Config.yaml"]


class _WithStops(_Tokenizer):
    """A piece for each stop, too."""

    def encode(self, texts):
        return [np.zeros(len(ids) + text.count("."), np.int32) for ids, text in zip(super().encode(texts), texts)]


def test_another_way_to_read_does_not_cut_the_text():
    """With a stop, the text has a token too many."""
    doubtful = Translation("green", -1.0, confidence=0.1)
    for limit, expected in ((3, ["neerg der", "neerg der."]), (2, ["neerg der"])):
        (line,) = LineReader(_WithStops(b""), limit, reread_below=0.5).lines(["neerg der"])
        assert [*line.inputs, *line.inputs_read_again({"neerg der": [doubtful]})] == expected


def test_a_repetitive_translation_is_not_taken():
    """A model is sure of each further token of a loop."""
    (line,) = LineReader(_Tokenizer(b""), 12, reread_below=0.5).lines(["neerg"])
    for repeated, expected in ((9, "of of"), (10, "green")):
        translations = [("green", 0.4, 2), ("of of", 0.9, repeated)]
        plain, loop = (Translation(text, -1.0, (((1,), (7,) * n),), sure) for text, sure, n in translations)
        assert [each.text for each in line.translations({"neerg": [plain], "neerg.": [loop]})] == [expected]


def test_a_list_that_loses_a_field_is_read_field_by_field():
    """One that keeps all of them is read whole, which the model does better."""
    (line,) = LineReader(_Tokenizer(b""), 12).lines(["neerg;der;eulb"])
    lost = {"neerg;der;eulb": [Translation("green;blue", -1.0, confidence=0.9)]}
    fields = {"neerg": "green", "der": "red", "eulb": "blue"}
    known = lost | {field: [Translation(text, -2.0, confidence=0.5)] for field, text in fields.items()}
    assert line.inputs == ["neerg;der;eulb"] and line.inputs_read_again(lost) == list(fields)
    assert line.translations(known) == [Translation("green;red;blue", -2.0, confidence=0.5)]
    kept = known | {"neerg;der;eulb": [Translation("green;red;blue", -1.0, confidence=0.9)]}
    assert line.translations(kept)[0].confidence == 0.9
