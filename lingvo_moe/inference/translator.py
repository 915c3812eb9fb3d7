"""Translation with a trained model: sentences in, the n best translations of each out."""

from __future__ import annotations

import collections
import dataclasses
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_moe.data.pipeline import source_batches
from lingvo_moe.engines.base import Engine
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.sentence_splitting import segment
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.inference.unknown_symbols import Framed, take_out
from lingvo_moe.utils import progress

_log = logging.getLogger(__name__)
# Sentences of like length are batched within a chunk. The batches of held-out sentences of m4.Pocket, in random order,
# have 10 % more steps with chunks of 32 than if the whole file was sorted, and 22 % with chunks of 16. The first chunks
# are smaller, so that a user sees translations, and a journal has some, within seconds.
_FIRST_BATCHES, _CHUNK_BATCHES = 2, 32
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
        at most. Symbols that the source tokenizer does not know are not translated, see `unknown_symbols`.

        Args:
          sentences: the lines.
          start: how many of them to leave out, at the beginning.
        """
        framed = take_out(sentences[start:], self._tokenizers.source)
        lines = self._segmented([line.text for line in framed], start + 1)
        uses = collections.Counter(text for line in lines for text in line)
        if len(uses) < len(lines):
            _log.info("%d lines have %d different sentences; each is translated once.", len(lines), len(uses))
        known: dict[str, list[Translation]] = {}
        frames = iter(framed)
        with progress.bar("translating", len(uses), "sentences") as advance:
            for chunk in _chunks(lines, self._experiment.decoding_batch):
                new = list(dict.fromkeys(text for line in chunk for text in line if text not in known))
                known.update(zip(new, self._translate_texts(new, advance), strict=True))
                yield [_whole(next(frames), [known[text] for text in line]) for line in chunk]
                uses.subtract(text for line in chunk for text in line)
                known = {text: translations for text, translations in known.items() if uses[text]}

    def _segmented(self, sentences: Sequence[str], first: int) -> list[list[str]]:
        """Returns for each line its parts, which fit the model; `first` is the number of the first line."""
        limit = self._experiment.texts.source_length - 1
        lines, too_long = [], []
        for number, (sentence, fits) in enumerate(zip(sentences, self.fits(sentences)), start=first):
            texts, truncated = ([sentence], False) if fits else segment(sentence, self._count_tokens, limit)
            if truncated:
                too_long.append(number)
            lines.append(texts)
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


def line_list(numbers: Sequence[int]) -> str:
    """Returns `line 3`, `lines 3, 7` or, of many numbers, the first ones and how many more there are."""
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"line{'s' * (len(numbers) > 1)} {named}{more}"


def _chunks(lines: Sequence[list[str]], batch: int) -> Iterator[list[list[str]]]:
    """Yields consecutive lines whose new texts fill a number of batches at most, or one longer line.

    That number doubles from chunk to chunk, from `_FIRST_BATCHES` to `_CHUNK_BATCHES`.
    """
    seen: set[str] = set()
    chunk, new, batches = [], 0, min(_FIRST_BATCHES, _CHUNK_BATCHES)
    for line in lines:
        texts = set(line) - seen
        if chunk and new + len(texts) > batches * batch:
            yield chunk
            chunk, new, batches = [], 0, min(2 * batches, _CHUNK_BATCHES)
        chunk.append(line)
        seen |= texts
        new += len(texts)
    if chunk:
        yield chunk


def _whole(frame: Framed, parts: Sequence[list[Translation]]) -> list[Translation]:
    """Returns the translations of a line with its frame, from those of its parts."""
    return [dataclasses.replace(each, text=frame.around(each.text)) for each in _joined(parts)]


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
