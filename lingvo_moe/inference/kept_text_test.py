"""What a translation is required to keep, and what only looks like it."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.kept_text import required


@pytest.mark.parametrize(
    "text, expected",
    [
        ("%s: %-5.2f von %(count)d, %1$s", ["%s", "%-5.2f", "%(count)d", "%1$s"]),
        ("%1 und %2", ["%1", "%2"]),
        (
            "{name} {0} {{count}} ${amount} $(ARG1) @user@",
            ["{name}", "{0}", "{{count}}", "${amount}", "$(ARG1)", "@user@"],
        ),
        ("ページ$1に移動, $1ın, $HOMEé", ["$1", "$1", "$HOME"]),
        ("%d%% fertig", ["%d"]),
        ("Mail an a@b.de oder https://a.de/%s", ["a@b.de", "https://a.de/%s"]),
        ('<b>Fett</b>, <br>, <br/>, <img src="a">', ["<b>", "</b>", "<br>", "<br/>", '<img src="a">']),
        ("<B>Fett</b>", ["<B>", "</b>"]),
        ("%1%2", ["%1", "%2"]),
        ("%PRODUCTNAME öffnen", ["%PRODUCTNAME"]),
    ],
)
def test_placeholders_addresses_and_markup_are_required(text, expected):
    assert [each[0] for each in required(text)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "Super+<Nummer>",
        "%50 indirim",
        "%5 veya %10",
        "100%ig und 50%em",
        "5 % Rabatt, 100 %",
        "Appliquer&nbsp;: l&#8217;image",
        'Zeile\\n und \\"Wort\\"',
        "a < b > c, {} offen {",
        "",
    ],
)
def test_percentages_names_entities_and_escapes_are_not(text):
    """A translation may write them in another way, or translate them."""
    assert [each[0] for each in required(text) if each[0] != "{}"] == []
