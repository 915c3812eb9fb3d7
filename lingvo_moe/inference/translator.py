"""Translation with a trained model: sentences in, the n best translations of each out."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lingvo_moe import tree
from lingvo_moe.data.cleaning import tidy
from lingvo_moe.data.pipeline import source_batches
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.engines.base import Engine
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.accelerators import without_accelerator
from lingvo_moe.inference.capitals import lower_case, upper_case
from lingvo_moe.inference.sentence_splitting import segment
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.inference.unknown_symbols import Framed, take_out
from lingvo_moe.utils import progress

_log = logging.getLogger(__name__)
# Sentences of like length are batched within a chunk. The batches of held-out sentences of m4.Pocket, in random order,
# have 10 % more steps with chunks of 32 than if the whole file was sorted, and 22 % with chunks of 16. The first chunks
# are smaller, so that a user sees translations, and a journal has some, within seconds.
_FIRST_BATCHES, _CHUNK_BATCHES = 2, 32
_MOST_HASHED = 2**16  # elements of a weight
_MAX_NAMED = 10  # lines in a warning; a long file may have hundreds


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis.

    Attributes:
      text: the translation.
      score: its length-normalised log-probability, which ranks the hypotheses of a sentence; of a line that was
        translated in parts, that of the least probable part.
      parts: the pairs of token ids, (sentence, translation), that the model read and wrote, without eos: one, or one
        for each part; none of an empty line.
      confidence: the geometric mean of its tokens' probabilities, 0 to 1, which compares translations of any length;
        of a line that was translated in parts, the least. Low values mark doubtful translations (docs/pocket.md).
      truncated: whether it, or one of its parts, reached `search.max_length` tokens before its end.
    """

    text: str
    score: float
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    confidence: float = 1.0
    truncated: bool = False


class Translator:
    """Translates with the newest checkpoint of a log directory.

    Attributes:
      step: the training step of the checkpoint.
      digest: a hash that differs between trained weights, and between tokenizers.
    """

    def __init__(self, name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path):
        """Compiles the beam search and restores the weights.

        Args:
          name: the registered name of the model.
          experiment: its experiment.
          engine: where to decode.
          logdir: the log directory that it was trained in.

        Raises:
          UserError: no tokenizer or one too large for the model, no checkpoint or one of another model.
        """
        self._experiment = experiment
        self._tokenizers = experiment.open_tokenizers()
        with trained_weights(name, experiment, logdir) as restore:
            self._decoding = engine.decoding(experiment.steps, experiment.decoding_specs(), experiment.search)
            self.step, theta = restore(self._decoding.shardings)
        self.digest = _digest(theta, self._tokenizers)
        self._decoding.load(theta)

    def fits(self, sentences: Sequence[str]) -> list[bool]:
        """Returns for each sentence whether it is short enough: fewer than `input.source_length` tokens."""
        limit = self._experiment.texts.source_length
        return [len(tokens) < limit for tokens in self._tokenizers.source.encode(sentences)]

    def translate(self, sentences: Sequence[str]) -> list[list[Translation]]:
        """Returns the translations of each sentence, best first; see `stream`."""
        return [translations for chunk in self.stream(sentences) for translations in chunk]

    def stream(self, sentences: Sequence[str], start: int = 0) -> Iterator[list[list[Translation]]]:
        """Yields the translations of each sentence, best first, some sentences at a time, in order.

        Equal sentences are translated once. Translations of an empty sentence are empty. A line of
        `input.source_length` tokens or more is translated in parts, see `sentence_splitting`; before the first
        translation, a warning names the lines with a sentence that is too long by itself and loses its end, ten of them
        at most. Symbols that the source tokenizer does not know are not translated, see `unknown_symbols`; the marks of
        `accelerators` are removed; lines in `capitals` are read in lower case, too.

        Args:
          sentences: the lines.
          start: how many of them to leave out, at the beginning.
        """
        lines = self._lines(sentences[start:], start + 1)
        uses = collections.Counter(text for line in lines for text in line.texts)
        if len(uses) < len(lines):
            _log.info("%d lines have %d different sentences; each is translated once.", len(lines), len(uses))
        known: dict[str, list[Translation]] = {}
        with progress.bar("translating", len(uses), "sentences") as advance:
            for chunk in _chunks(lines, self._experiment.decoding_batch):
                new = list(dict.fromkeys(text for line in chunk for text in line.texts if text not in known))
                known.update(zip(new, self._translate_texts(new, advance), strict=True))
                yield [line.translations(known) for line in chunk]
                uses.subtract(text for line in chunk for text in line.texts)
                known = {text: translations for text, translations in known.items() if uses[text]}

    def _lines(self, sentences: Sequence[str], first: int) -> list[_Line]:
        """Returns what the model reads of each line; `first` is the number of the first line."""
        tokenizer, limit = self._tokenizers.source, self._experiment.texts.source_length - 1
        framed = take_out([tidy(sentence) for sentence in sentences], tokenizer)
        texts = [without_accelerator(frame.text, tokenizer) for frame in framed]
        lines, too_long = [], []
        for number, (frame, text, fits) in enumerate(zip(framed, texts, self.fits(texts)), start=first):
            # Capitals have far more pieces; where they do not fit, the line is read in lower case alone.
            readings, truncated = [[text]] if fits else [], False
            lowered = lower_case(text)
            if lowered or not fits:
                parts, truncated = segment(lowered or text, self._count_tokens, limit)
                readings.append(parts)
            lines.append(_Line(frame, readings, in_capitals=lowered is not None))
            if truncated:
                too_long.append(number)
        if too_long:
            _log.warning(
                "%s: a sentence has more than %d tokens; its end is not translated. Split it, or pass "
                "--set input.source_length=N.",
                *(line_list(too_long), limit),
            )
        return lines

    def _translate_texts(self, texts: Sequence[str], advance: Callable[[int], None]) -> list[list[Translation]]:
        """Returns the translations of each text, which fits the model, best first."""
        results: list[list[Translation]] = [[]] * len(texts)
        batches = source_batches(
            texts, self._tokenizers.source, self._experiment.decoding_batch, self._experiment.texts.source_length
        )
        for indices, source in batches:
            for index, translations in zip(indices, self._translate_batch(source)):
                results[index] = translations
            advance(len(indices))
        return results

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizers.source.encode([text])[0])

    def _translate_batch(self, source: dict[str, np.ndarray]) -> Iterator[list[Translation]]:
        """Yields the translations of each row."""
        hypotheses = self._decoding.decode(source)
        ids, scores, lengths = (np.asarray(hypotheses[field]) for field in ("ids", "scores", "lengths"))
        for row, tokens in enumerate(np.count_nonzero(source["segment_ids"], axis=1)):
            sentence = tuple(map(int, source["ids"][row, : tokens - 1]))
            translations = self._translations(sentence, ids[row], scores[row], lengths[row])
            # An empty sentence is an end-of-sentence token alone, for which a model invents a translation.
            yield translations if tokens > 1 else [Translation("", 0.0)] * len(translations)

    def _translations(
        self, sentence: tuple[int, ...], ids: np.ndarray, scores: np.ndarray, lengths: np.ndarray
    ) -> list[Translation]:
        rows = [row[:length].tolist() for row, length in zip(ids, lengths)]
        texts, eos = self._tokenizers.target.decode(rows), self._tokenizers.target.eos_id
        return [
            Translation(
                text,
                float(score),
                ((sentence, tuple(token for token in row if token != eos)),),
                self._experiment.search.confidence(float(score), len(row)),
                truncated=eos not in row,
            )
            for text, score, row in zip(texts, scores, rows)
        ]


def _digest(theta: dict, tokenizers: Tokenizers) -> str:
    """Returns the hash of the small weights and the tokenizers: no two trainings have the same scales of a norm."""
    found = hashlib.sha256(tokenizers.source.model + tokenizers.target.model)
    for path, weight in tree.flatten(theta).items():
        if weight.size <= _MOST_HASHED:
            found.update(path.encode() + np.asarray(weight).tobytes())
    return found.hexdigest()


def line_list(numbers: Sequence[int]) -> str:
    """Returns `line 3`, `lines 3, 7` or, of many numbers, the first ones and how many more there are."""
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"line{'s' * (len(numbers) > 1)} {named}{more}"


class _Line(NamedTuple):
    """A line.

    Attributes:
      frame: the symbols around it.
      readings: the ways to read it, at least one; each is the parts that the model reads, which are short enough.
      in_capitals: whether it is, and its translation should be.
    """

    frame: Framed
    readings: list[list[str]]
    in_capitals: bool = False

    @property
    def texts(self) -> list[str]:
        """All that the model reads."""
        return [part for parts in self.readings for part in parts]

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of the reading whose best one has the highest confidence, within the frame."""
        found = (_joined([known[part] for part in parts]) for parts in self.readings)
        best = max(found, key=lambda translations: translations[0].confidence)
        return [dataclasses.replace(each, text=self.frame.around(self._in_case(each.text))) for each in best]

    def _in_case(self, translation: str) -> str:
        return upper_case(translation) if self.in_capitals else translation


def _chunks(lines: Sequence[_Line], batch: int) -> Iterator[list[_Line]]:
    """Yields consecutive lines whose new texts fill a number of batches at most, or one longer line.

    That number doubles from chunk to chunk, from `_FIRST_BATCHES` to `_CHUNK_BATCHES`.
    """
    seen: set[str] = set()
    chunk, new, batches = [], 0, min(_FIRST_BATCHES, _CHUNK_BATCHES)
    for line in lines:
        texts = set(line.texts) - seen
        if chunk and new + len(texts) > batches * batch:
            yield chunk
            chunk, new, batches = [], 0, min(2 * batches, _CHUNK_BATCHES)
        chunk.append(line)
        seen |= texts
        new += len(texts)
    if chunk:
        yield chunk


def _joined(parts: Sequence[list[Translation]]) -> list[Translation]:
    """Returns the translations of a line from those of its parts: the best of each, then the second best of each."""
    if len(parts) == 1:
        return parts[0]
    return [
        Translation(
            " ".join(part.text for part in ranked),
            min(part.score for part in ranked),
            tuple(pair for part in ranked for pair in part.parts),
            min(part.confidence for part in ranked),
            any(part.truncated for part in ranked),
        )
        for ranked in zip(*parts, strict=True)
    ]
