"""A translation of a line, with its score and its confidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis.

    Attributes:
      text: the translation.
      score: its length-normalised log-probability, which ranks the hypotheses of a sentence; of a line that was
        translated in parts, that of the least probable part; 0 of what is copied.
      parts: the pairs of token ids, (sentence, translation), that the model read and wrote, without eos: one, or one
        for each part; none of an empty line, and of what is copied.
      confidence: the geometric mean of its tokens' probabilities, 0 to 1, which compares translations of any length;
        of a line that was translated in parts, the least. Low values mark doubtful translations (docs/pocket.md).
      truncated: whether it, or one of its parts, reached `search.max_length` tokens before its end.
      is_intact: whether it has the placeholders, numbers and other parts of the line that a translation must keep, see
        `kept_text.required`.
      is_cut: whether a sentence of the line was too long, and its end was not translated.
    """

    text: str
    score: float
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    confidence: float = 1.0
    truncated: bool = False
    is_intact: bool = True
    is_cut: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model wrote, without eos."""
        return sum(len(target) for _, target in self.parts)


def join(parts: Sequence[list[Translation]], join_texts: Callable[[list[str]], str] = " ".join) -> list[Translation]:
    """Returns the translations of a whole from those of its parts: the best of each, then the second best of each.

    Args:
      parts: the translations of each part, best first, as many of each; or one, which is that of every whole.
      join_texts: returns the whole text of the texts of its parts.
    """
    number = max(map(len, parts))
    return [
        Translation(
            join_texts([part.text for part in ranked]),
            min(part.score for part in ranked),
            tuple(pair for part in ranked for pair in part.parts),
            min(part.confidence for part in ranked),
            any(part.truncated for part in ranked),
            all(part.is_intact for part in ranked),
            any(part.is_cut for part in ranked),
        )
        for ranked in zip(*(part * number if len(part) == 1 else part for part in parts), strict=True)
    ]
