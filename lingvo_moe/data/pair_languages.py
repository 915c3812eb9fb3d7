"""The languages of a corpus's pairs, for models whose texts begin with the piece of their language.

One side of a pair is English, the other is in the language of its label: `de`, `pt_BR`, `zh_Hans`. A model has names of
its own for these, `deu_Latn`, `por_Latn` and `zho_Hans` of NLLB-200 or `de`, `pt` and `zh` of M2M-100.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.data.tokenizer import OF_CORPUS, SIDES, Tokenizer, is_english
from lingvo_moe.errors import UserError

_logger = logging.getLogger(__name__)
# langcodes counts 0 to 4 between names or regions of one language, 5 to 9 for another script of it that its readers
# know, or a language as close as Bokmål and Danish.
_MOST_DISTANCE = 9
# What langcodes does not find: Hangul alone, languages of which a model has one variety, and M2M-100's Chinese.
_OTHER_NAMES = {
    "ko": ("kor_Hang",),
    "ps": ("pbt_Arab",),
    "qu": ("quy_Latn",),
    "ff": ("fuv_Latn",),
    "zh_Hant": ("zh",),
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
    if found := next((name for name in _OTHER_NAMES.get(tag, ()) if name in names), None):
        return found
    name, distance = langcodes.closest_match(tag, names, max_distance=_MOST_DISTANCE)
    return name if distance <= _MOST_DISTANCE else None


class PairLanguages:
    """The languages of a corpus's pairs, by the settings `input.source_language` and `input.target_language`.

    Attributes:
      from_english: whether pairs are read from English into the language of their label.
      by_label: the names of the languages of both sides, by the label of the pairs; empty where texts begin with none.
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
        self.from_english = config.target_language == OF_CORPUS
        self._tokenizers, self._what = tokenizers, what
        self._configured = {side: name for side, name in config.languages.items() if side in tokenizers}
        for side, name in self._configured.items():
            tokenizers[side].check_language(name, f"input.{side}_language")
        found = {label: self._names(label) for label in labels}
        self.by_label = {label: names for label, names in found.items() if None not in names.values()}
        self.left_out = tuple(label for label in found if label not in self.by_label)
        if self.left_out and not self.by_label:
            raise UserError(
                f"{what}: the model has none of the languages {', '.join(self.left_out)}, so no pair is left; name a "
                f"corpus of its languages."
            )

    def warn(self):
        """Warns of labels that are left out, and where the English side of the pairs is read as another language."""
        if self.left_out:
            _logger.warning(
                "%s: the model has none of the languages %s; their pairs are left out.",
                self._what,
                ", ".join(self.left_out),
            )
        side = "source" if self.from_english else "target"
        own = self._tokenizers[side].own_language if side in self._tokenizers else ""
        if not is_english(name := self._configured.get(side) or own):
            _logger.warning(
                "input.%s_language is %s, but this side of a corpus's pairs is English, unless you built it otherwise; "
                "%s_language=%s would read the pairs from English.",
                side,
                name,
                side,
                OF_CORPUS,
            )

    def _names(self, label: str) -> dict:
        return {
            side: closest(label, self._tokenizers[side].language_names) if name == OF_CORPUS else name
            for side, name in self._configured.items()
        }

    def first_ids(self, label: str) -> dict[str, int]:
        """Returns the ids that the texts of both sides begin with, by side; those of pairs with this label."""
        tokenizers = {side: of_side for side, of_side in self._tokenizers.items() if of_side.languages}
        return {side: of_side.id_of_language(self.by_label[label][side]) for side, of_side in tokenizers.items()}

    def in_order(self, source: str, english: str) -> tuple[str, str]:
        """Returns (source, target) of a pair as the corpus has it."""
        return (english, source) if self.from_english else (source, english)


def of_readers(config: InputConfig, readers: Mapping[str, object], labels: Iterable[str], what: str) -> PairLanguages:
    """Returns the languages of what reads the sides of pairs, of which tokenizers alone have languages."""
    tokenizers = {side: reader for side in SIDES if isinstance(reader := readers.get(side), Tokenizer)}
    return PairLanguages(config, tokenizers, labels, what)
