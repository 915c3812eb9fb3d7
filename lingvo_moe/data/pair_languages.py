"""The languages of a corpus's pairs, for models whose texts begin with the piece of a language.

One side of a pair is English, the other is in the language of its label: `de`, `pt_BR`, `zh_Hans`. A model has names of
its own for these, `deu_Latn`, `por_Latn` and `zho_Hans` of NLLB-200 or `de`, `pt` and `zh` of M2M-100.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.data.tokenizer import OF_CORPUS, UNKNOWN_LANGUAGE, Tokenizer, is_english, language_name
from lingvo_moe.errors import UserError

_logger = logging.getLogger(__name__)
# langcodes counts 0 to 4 between names or regions of one language, 5 to 9 for another script of it that its readers
# know, or a language as close as Bokmål and Danish.
_MOST_DISTANCE = 9
# What langcodes does not find: other scripts than it expects, languages of which a model has one variety, M2M-100's
# name of Northern Sotho and its Chinese, and Twi, which it counts as Akan.
_OTHER_NAMES = {
    "ff": ("fuv_Latn",),
    "ko": ("kor_Hang",),
    "nso": ("ns",),
    "ps": ("pbt_Arab",),
    "qu": ("quy_Latn",),
    "sat": ("sat_Beng",),
    "tw": ("twi_Latn",),
    "tzm": ("tzm_Tfng",),
    "zh_HK": ("zho_Hant", "zh_Hant", "zh"),
    "zh_Hant": ("zh",),
    "zh_Hant_HK": ("zho_Hant", "zh_Hant", "zh"),
}


def closest(label: str, names: Iterable[str]) -> str | None:
    """Returns the name of a corpus's language among those of a model.

    Args:
      label: of the corpus: `de`, `pt_BR`, `ca@valencia`.
      names: of the model's languages.

    Returns:
      The name of that language or, without one, of a language that its readers understand; None without either.
    """
    return _closest(label, tuple(names))


@functools.cache
def _closest(label: str, names: tuple[str, ...]) -> str | None:
    import langcodes  # only models with languages need it

    tag = label.partition("@")[0]
    if found := next((name for name in (tag, *_OTHER_NAMES.get(tag, ())) if name in names), None):
        return found
    # A label, and a name, may have parts that BCP 47 lacks.
    if not _is_tag(tag) or not (tags := list(filter(_is_tag, names))):
        return None
    name, distance = langcodes.closest_match(tag, tags, max_distance=_MOST_DISTANCE)
    return name if distance <= _MOST_DISTANCE else None


@functools.cache
def _is_tag(name: str) -> bool:
    """Returns whether a name has the form of a tag of BCP 47, without which langcodes fails."""
    from langcodes import Language
    from langcodes.tag_parser import LanguageTagError

    try:
        Language.get(name)
    except LanguageTagError:
        return False
    return True


@functools.cache
def is_group(code: str) -> bool:
    """Returns whether a code of ISO 639 is of several languages: `zle` of the East Slavic ones, `mul` of any."""
    from langcodes.registry_parser import parse_registry

    scopes = {entry["Subtag"]: entry.get("Scope") for entry in parse_registry() if entry["Type"] == "language"}
    return scopes.get(code) in ("collection", "special")


class PairLanguages:
    """The languages of a corpus's pairs, by the settings `input.source_language` and `input.target_language`.

    Attributes:
      from_english: whether pairs are read from English into the language of their label: if the target's language is
        `corpus`, or its tokenizer of another language than English.
      by_label: the names of the languages by side, by the label of the pairs; no side whose texts are in no language.
      left_out: the labels that the model has no language for.
    """

    def __init__(self, config: InputConfig, tokenizers: Mapping[str, Tokenizer], labels: Iterable[str], what: str):
        """Finds the names.

        Args:
          config: with the languages.
          tokenizers: those of the sides that the model reads as texts, in no language.
          labels: of the pairs.
          what: for messages: the directory and the split.

        Raises:
          UserError: a language that the tokenizers do not have, none where they have some, or `corpus` where they have
            none; or all labels are left out.
        """
        self._what = what
        self._configured = {side: name for side, name in config.languages.items() if side in tokenizers}
        for side, name in self._configured.items():
            tokenizers[side].check_language(name, f"input.{side}_language")
        for tokenizer in tokenizers.values():
            tokenizer.check_translation(config.target_language, "input.target_language")
        # By the side whose language their pieces name, and the side whose texts begin with these.
        self._named = {
            "target" if tokenizer.names_target else side: (side, tokenizer)
            for side, tokenizer in tokenizers.items()
            if tokenizer.languages
        }
        own = {side: _own_language(tokenizers[side], name) for side, name in self._configured.items()}
        self.from_english = self._configured.get("target") == OF_CORPUS or not is_english(own.get("target", ""))
        self._own, self._english_side = own, "source" if self.from_english else "target"
        found = {label: self._names(label) for label in labels}
        self.by_label = {label: names for label, names in found.items() if None not in names.values()}
        self.left_out = tuple(label for label in found if label not in self.by_label)
        if self.left_out and not self.by_label:
            raise UserError(
                f"{what}: the model has none of the languages {', '.join(self.left_out)}{self._limits()}, so no pair "
                f"is left; name a corpus of its languages."
            )

    def _limits(self) -> str:
        """Returns which fixed languages pairs must have, for messages."""
        given = self._configured.items()
        fixed = [f"input.{side}_language is {name}" for side, name in given if name not in ("", OF_CORPUS)]
        return f" ({', '.join(fixed)})" if fixed else ""

    def warn(self):
        """Warns of labels that are left out, and where the English side of the pairs is read as another language."""
        if self.left_out:
            _logger.warning(
                "%s: the model has none of the languages %s; their pairs are left out.",
                self._what,
                ", ".join(self.left_out),
            )
        side = self._english_side
        if is_english(name := self._own.get(side) or self._configured.get(side, "")):
            return
        remedy = f"set input.{side}_language to the model's name of English"
        if OF_CORPUS not in self._configured.values() and not self._own.get(side):
            remedy += ", or to read them from English, the source's, and input.target_language to corpus"
        _logger.warning(
            "input.%s_language is %s, but this side of a corpus's pairs is English, unless you built it otherwise; %s.",
            side,
            name,
            remedy,
        )

    def _names(self, label: str) -> dict:
        """Returns the names of the languages of a pair by side; None for one that the model lacks."""
        found = {}
        for side, name in self._configured.items():
            own = self._own[side]
            names = self._named[side][1].language_names if side in self._named else ()
            if side != self._english_side and (own or (names and name == OF_CORPUS)):
                found[side] = closest(label, (own,) if own else names)
            elif own or names:
                found[side] = own or name
        return found

    def prefixes(self, label: str) -> dict[str, tuple[int, ...]]:
        """Returns the ids that the texts of pairs begin with, by side; of a side with languages.

        Raises:
          KeyError: the label is left out.
        """
        names = self.by_label[label]
        return {begun: tokenizer.prefix_of(names[side]) for side, (begun, tokenizer) in self._named.items()}

    def source_and_target(self, text: str, english: str) -> tuple[str, str]:
        """Returns (source, target) of a pair: a text in the language of its label, and its English."""
        return (english, text) if self.from_english else (text, english)


def _own_language(tokenizer: Tokenizer, configured: str) -> str:
    """Returns the only language of a tokenizer; empty if it has several, or nothing says which it is."""
    if tokenizer.own_language != UNKNOWN_LANGUAGE:
        return tokenizer.own_language
    return "" if configured in (OF_CORPUS, UNKNOWN_LANGUAGE) else language_name(configured)


def languages_of_readers(
    config: InputConfig, readers: Mapping[str, object], labels: Iterable[str], what: str
) -> PairLanguages:
    """Returns the languages of what reads the sides of pairs, of which tokenizers alone have languages.

    Args:
      config: with the languages.
      readers: by side.
      labels: of the pairs.
      what: for messages: the directory and the split.

    Raises:
      UserError: as `PairLanguages`.
    """
    tokenizers = {side: reader for side, reader in readers.items() if isinstance(reader, Tokenizer)}
    return PairLanguages(config, tokenizers, labels, what)
