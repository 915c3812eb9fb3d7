"""Protects language labels: one label per language, and no label that is unsafe in a path."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from hypothesis import given, strategies

from lingvo_moe.data import languages
from lingvo_moe.errors import UserError


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
    """Spellings of gettext, BCP 47 and MediaWiki give one label."""
    assert languages.normalize(written) == label


@pytest.mark.slow
@given(strategies.from_regex(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{1,8}){0,2}(@(latin|euro|saaho))?", fullmatch=True))
def test_normalising_twice_changes_nothing(written):
    """A label that was written to a manifest is read back as the same label."""
    label = languages.normalize(written)
    assert label is None or languages.normalize(label) == label


def test_selected_labels_are_normalised():
    """An alias would select nothing; the error has the label to use."""
    assert languages.check_selected(["de", "pt_BR"], "--languages") == {"de", "pt_BR"}
    with pytest.raises(UserError, match="--languages=pt-br: not a normalised language label. Did you mean pt_BR?"):
        languages.check_selected(["pt-br"], "--languages")
    with pytest.raises(UserError, match="--languages=German: unknown language label. Labels look like de"):
        languages.check_selected(["German"], "--languages")


def test_empty_selection_selects_all():
    """An entry of an unknown language may be of a selected one."""
    assert languages.is_selected("de", ()) and languages.is_selected(None, {"fr"})
    assert languages.is_selected("fr", {"fr"}) and not languages.is_selected("de", {"fr"})


def test_english_and_its_variants():
    """Three-letter languages that begin with `en` are not English."""
    assert all(map(languages.is_english, ("en", "en_GB", "en@shaw")))
    assert not any(map(languages.is_english, ("enm", "de", "eo")))


@given(strategies.text(max_size=40) | strategies.from_regex(r"[a-zA-Z]{2,3}([-_@./\\\\][\\w.]*){0,3}"))
def test_every_normalised_label_is_safe_in_a_path(written):
    """Property: whatever a file or a header says, a label is one path component and passes `check_label`."""
    label = languages.normalize(written)
    if label is not None:
        assert languages.check_label(label, "test") == label
        assert not set(label) & set("/\\\0.:") and len(label.encode()) < 200


@given(
    strategies.text()
    | strategies.none()
    | strategies.integers()
    | strategies.sampled_from(["../x", "/etc", "de/..", "c:de", "de\0", "de\n", "DE", "", "de.tsv", "..", "de\\x"])
)
def test_label_that_is_not_one_is_refused_with_the_manifest_and_the_value(label):
    """Property: absolute paths, `..`, separators, NUL and drive letters never pass as a language."""
    try:
        accepted = languages.check_label(label, "corpus.json")
        assert accepted == label and not set(label) & set("/\\\0.: \n")
    except UserError as error:
        assert str(error).startswith(f"corpus.json: {label!r} is not a language label")


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
        ("de/ui.po", "de", "de"),  # `ui` looks like a language
        ("de/db.po", "de_DE", "de"),
        ("de/ui.po", "", "de"),
        ("ui/de.po", "", "de"),
        ("ui.po", "", None),
        ("js/de.po", "", "de"),
        ("de/LC_MESSAGES/x.mo", "fr", "de"),
        ("LC_MESSAGES/x.mo", "fr", "fr"),
        ("locale/all/LC_MESSAGES/qqq.mo", "", "all"),
    ],
)
def test_language_of_a_catalog_from_its_path_and_header(path, header, label):
    """The common directory layouts of translation catalogs are recognised."""
    assert languages.from_path(PurePath(path), header) == label
