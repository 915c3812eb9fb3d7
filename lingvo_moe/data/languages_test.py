"""One language has one label, wherever its catalog comes from."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from hypothesis import given, strategies

from lingvo_moe.data import languages


@pytest.mark.parametrize(
    "written, label",
    [
        ("de", "de"),
        ("de_DE", "de"),
        ("de_DE.UTF-8", "de"),
        ("de-formal", "de_formal"),
        ("cs_CZ", "cs"),
        ("pt-br", "pt_BR"),
        ("pt_PT", "pt"),
        ("zh-hans", "zh_Hans"),
        ("zh_CN", "zh_Hans"),
        ("zh-tw", "zh_Hant"),
        ("zh_HK", "zh_HK"),
        ("sr@latin", "sr_Latn"),
        ("sr-ec", "sr"),
        ("uz@Cyrl", "uz_Cyrl"),
        ("ca@valencia", "ca@valencia"),
        ("be-x-old", "be_tarask"),
        ("cbk-zam", "cbk_zam"),
        ("es_419", "es_419"),
        ("nb_NO", "nb"),
        ("no", "nb"),
        ("iw", "he"),
        ("el@euro", "el"),
        ("qqq", None),
        ("django", None),
        ("C", None),
        ("", None),
        ("../de", None),
        ("de/", None),
    ],
)
def test_normalize(written, label):
    assert languages.normalize(written) == label


@given(strategies.from_regex(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{1,8}){0,2}(@(latin|euro|saaho))?", fullmatch=True))
def test_a_normalised_label_is_final(written):
    label = languages.normalize(written)
    assert label is None or languages.normalize(label) == label


def test_english_and_its_variants():
    assert all(map(languages.is_english, ("en", "en_GB", "en@shaw")))
    assert not any(map(languages.is_english, ("enm", "de", "eo")))


@pytest.mark.parametrize(
    "path, header, label",
    [
        ("locale/pt_BR/LC_MESSAGES/django.mo", "", "pt_BR"),
        ("locale/de/LC_MESSAGES/fr.mo", "fr", "de"),
        ("po/de.po", "", "de"),
        ("po/pt-br.po", "", "pt_BR"),
        ("gtk-de.po", "", "de"),
        ("gtk-pt_BR.po", "", "pt_BR"),
        ("django.de.po", "", "de"),
        ("admin-network-de_DE.mo", "", "de"),
        ("ast.po", "", "ast"),
        ("fy/app.po", "", "fy"),
        ("app.po", "de_AT", "de_AT"),
        ("wp-de.po", "de", "de"),
        ("messages.po", "", None),
        ("locale/all/LC_MESSAGES/qqq.mo", "", "all"),
    ],
)
def test_of_path(path, header, label):
    assert languages.of_path(PurePath(path), header) == label
