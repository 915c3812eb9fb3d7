"""Language labels: one normalised label per language, however a catalog's author spelled it.

A label is `language[_Script][_REGION][_variant][@modifier]`: `de`, `pt_BR`, `sr_Latn`, `be_tarask`, `ca@valencia`.
These are BCP 47 tags with underscores, and gettext's modifiers. A label names files of a corpus, so `check_label`
guards every label that comes from a file or from a user's code.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePath

from lingvo_moe.errors import UserError

# What `normalize` returns. No separator, dot, NUL or drive letter: a label is safe as the stem of a file name.
_NORMALIZED = re.compile(r"[a-z]{2,3}(?:_[A-Za-z0-9]{1,8}){0,6}(?:@[a-z]{1,16})?")
_LABEL = re.compile(r"([a-z]{2,3})((?:[-_][a-z0-9]{1,8})*)(?:\.[a-z0-9-]+)?(?:@([a-z]+))?", re.IGNORECASE)
_SCRIPTS = frozenset(
    "Arab Aran Bali Beng Bugi Cans Cyrl Deva Ethi Gujr Guru Hans Hant Hebr Java Kana Knda Latn "
    "Mlym Mong Mtei Nkoo Olck Orya Taml Telu Tfng Thaa Thai Tibt".split()
)
_SCRIPT_OF_MODIFIER = {
    "latin": "Latn",
    "latn": "Latn",
    "cyrillic": "Cyrl",
    "cyrl": "Cyrl",
    "arabic": "Arab",
    "bengali": "Beng",
    "devanagari": "Deva",
}
_EMPTY_MODIFIERS = ("euro", "utf")

# The default region of a language, which its label omits. A region that repeats the language (de_DE) is not listed.
_DEFAULT_REGIONS = {
    label[:2]: label[3:]
    for label in (
        "af_ZA am_ET bn_BD bs_BA ca_ES cs_CZ cy_GB da_DK dz_BT el_GR et_EE eu_ES fa_IR ga_IE gd_GB gl_ES gu_IN he_IL "
        "hi_IN hy_AM ja_JP ka_GE kk_KZ km_KH kn_IN ko_KR ky_KG lb_LU ml_IN mr_IN ms_MY my_MM nb_NO ne_NP nn_NO oc_FR "
        "pa_IN ps_AF si_LK sl_SI sq_AL sr_RS sv_SE sw_KE ta_IN te_IN tg_TJ tk_TM "
        "tt_RU ug_CN uk_UA ur_PK vi_VN xh_ZA zu_ZA"
    ).split()
}
_SAME_LANGUAGE = {"iw": "he", "in": "id", "ji": "yi", "no": "nb", "mo": "ro"}
_SAME_LABEL = {
    "zh_CN": "zh_Hans",
    "zh_Hans_CN": "zh_Hans",
    "zh_TW": "zh_Hant",
    "zh_Hant_TW": "zh_Hant",
    "sr_EC": "sr",
    "sr_Cyrl": "sr",
    "sr_EL": "sr_Latn",
    "be_x_old": "be_tarask",
    "crh_Latn": "crh",
    "kk_Cyrl": "kk",
    "ku_Latn": "ku",
    "sh_Latn": "sh",
    "tg_Cyrl": "tg",
    "tt_Cyrl": "tt",
    "ug_Arab": "ug",
    "uz_Latn": "uz",
}
# ISO 639-1, and `bh` and `sh`, which it had before.
_TWO_LETTERS = frozenset(
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en "
    "eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv "
    "ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne "
    "ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss "
    "st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu".split()
)
# MediaWiki documents its messages under qqq; xx and qps stand for artificial test translations.
_NOT_LANGUAGES = frozenset(("qqq", "qqx", "xx", "qps"))


def normalize(label: str) -> str | None:
    """Returns the normalised label of a language (`pt-br` -> `pt_BR`, `de_DE.UTF-8` -> `de`), or None."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    language = match[1].lower()
    language = _SAME_LANGUAGE.get(language, language)
    if language in _NOT_LANGUAGES:
        return None
    subtags = [_subtag(part) for part in re.split("[-_]", match[2])[1:]]
    modifier = (match[3] or "").lower()
    if modifier in _SCRIPT_OF_MODIFIER:
        subtags.insert(0, _SCRIPT_OF_MODIFIER[modifier])
        modifier = ""
    default_regions = (language.upper(), _DEFAULT_REGIONS.get(language))
    normalized = "_".join([language, *(subtag for subtag in subtags if subtag not in default_regions)])
    normalized = _SAME_LABEL.get(normalized, normalized)
    if modifier and modifier not in _EMPTY_MODIFIERS:
        normalized = f"{normalized}@{modifier}"
    return normalized if _NORMALIZED.fullmatch(normalized) else None


def check_label(label: object, origin: str) -> str:
    """Returns `label` if it has the form of a normalised label, so that it is safe in a path.

    Args:
      label: the value as a manifest or a data source has it; any value.
      origin: what the value comes from, for the error: the manifest's path or the source's name.

    Raises:
      UserError: it is not a string or not such a label; the message names the origin and the value.
    """
    if not isinstance(label, str) or not _NORMALIZED.fullmatch(label):
        raise UserError(
            f"{origin}: {label!r} is not a language label; expected "
            "language[_Script][_REGION][_variant][@modifier], such as de, pt_BR or ca@valencia."
        )
    return label


def check_selected(labels: Collection[str], flag: str) -> frozenset[str]:
    """Returns the labels that a user selects.

    Args:
      labels: as typed.
      flag: for the error.

    Raises:
      UserError: one of them is not a normalised label; the message has the normalised one, if there is one.
    """
    for label in labels:
        normalized = normalize(label)
        if normalized != label:
            if normalized is None:
                raise UserError(f"{flag}={label}: unknown language label. Labels look like de, pt_BR or sr_Latn.")
            raise UserError(f"{flag}={label}: not a normalised language label. Did you mean {normalized}?")
    return frozenset(labels)


def is_selected(label: str | None, selected: Collection[str]) -> bool:
    """Returns whether entries of a language are read: no selection selects all, and an unknown language may be any."""
    return not selected or label is None or label in selected


def is_english(label: str) -> bool:
    """Returns whether a normalised label names English or a variant of it (`en_GB`, `en@shaw`)."""
    return re.match(r"en(?![a-z])", label) is not None


def from_path(path: PurePath, header: str = "") -> str | None:
    """Returns the label of the language that a catalog translates into, or None if neither path nor header names it.

    The layouts `LANG/LC_MESSAGES/x.mo`, `LANG.po`, `x-LANG.po`, `x.LANG.po` and `LANG/x.po` are recognised. Short names
    such as `gtk-de`, `app` or `ui` look like labels too. So the catalog's own header takes precedence if the directory
    or the name agrees with it, then a language of two letters over one of three. Two letters that are no language are
    not read as one.

    Args:
      path: the catalog's path inside its source.
      header: the `Language:` field of the catalog's header, if it has one.
    """
    if path.parent.name == "LC_MESSAGES":
        return normalize(path.parent.parent.name) or normalize(header)
    stated = normalize(header)
    parent = _language(path.parent.name)
    by_name = [label for label in map(_language, _tails(path.stem)) if label]
    short = [label for label in by_name if _is_two_letter(label)]
    if stated and stated in (*by_name, parent):
        return stated
    return (
        next(iter(short), None)
        or stated
        or (parent if parent and _is_two_letter(parent) else None)
        or next(iter(by_name), None)
        or parent
    )


def names_language(directory: str) -> bool:
    """Whether a directory's name is a language of two letters: `de`, `pt_BR`. One of three may be any word."""
    label = _language(directory)
    return label is not None and _is_two_letter(label)


def _subtag(part: str) -> str:
    if part.title() in _SCRIPTS:
        return part.title()
    is_region = (len(part) == 2 and part.isalpha()) or (len(part) == 3 and part.isdigit())
    return part.upper() if is_region else part.lower()


def _tails(stem: str) -> list[str]:
    """Returns the parts of a file name that may be a label: `x-y-pt_BR` -> `x-y-pt_BR`, `y-pt_BR`, `pt_BR`."""
    starts = [0, *(match.end() for match in re.finditer(r"[-.]", stem))]
    return [stem[start:] for start in starts]


def _language(name: str) -> str | None:
    """Returns the label that a part of a path looks like, or None."""
    label = normalize(name)
    return None if label and _is_two_letter(label) and label[:2] not in _TWO_LETTERS else label


def _is_two_letter(label: str) -> bool:
    return re.match(r"[a-z]{2}(?![a-z])", label) is not None
