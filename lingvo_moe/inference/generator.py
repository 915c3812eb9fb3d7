"""Text generation with a trained language model: prompts in, continued texts out."""

from __future__ import annotations

import dataclasses
import numbers
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_moe import definitions
from lingvo_moe.decoding.sampling import Sampling, input_specs
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.configured import configured
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.ranges import COUNT_OR_0
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import progress

_FOUND = ("ids", "scores", "lengths")


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A continued prompt.

    Attributes:
      text: the prompt and what follows it.
      score: of what follows: the length-normalised log-probability or, of a sample, the mean of its tokens'.
      truncated: whether it has the greatest length, `search.max_length`, and no end.
      is_cut: whether the prompt is longer than the model reads, so that only its end was read.
    """

    text: str
    score: float
    truncated: bool = False
    is_cut: bool = False


class Generator:
    """Continues prompts with the newest checkpoint of a log directory.

    Attributes:
      name: the registered name of the model.
      experiment: its experiment.
      step: the training step of the checkpoint.
      prompt_tokens: how many tokens of a prompt the model reads, at most.
    """

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        engine: Engine,
        logdir: str | pathlib.Path,
        sampling: Sampling | None = None,
    ):
        """Compiles the search and restores the weights.

        Args:
          name: the registered name of the model.
          experiment: its experiment.
          engine: where to decode.
          logdir: the log directory that it was trained in.
          sampling: how to draw tokens, with the maximal length and special tokens of the experiment's search instead of
            its own; None for the beam search of the experiment.

        Raises:
          UserError: the model is no language model, or reads no prompts; no tokenizer or one too large for it; no
            checkpoint or one of another model; too many samples.
        """
        if not experiment.generates:
            raise UserError(f"{name} does not generate text; `inference.translator` is for translation models.")
        if sampling is not None:
            definitions.check_type("sampling", sampling, Sampling)
            # Samples do not depend on the beam size; nor does the program.
            sampling = dataclasses.replace(sampling, search=dataclasses.replace(experiment.search, beam_size=1))
        self.name, self.experiment = name, experiment
        self._sampling = sampling
        self._tokenizer = experiment.tokenizers_of_languages().target
        specs = experiment.decoding_specs()
        self._rows, self._length = specs["ids"].shape
        self.prompt_tokens = self._length - 1
        if sampling:
            specs["sampling"] = input_specs(self._rows)
        with trained_weights(name, experiment, logdir) as restore:
            search = sampling.of_program if sampling else experiment.search
            self._decoding = engine.decoding(experiment.steps, specs, search)
            self.step, theta = restore(self._decoding.shardings)
        self._decoding.load(theta)

    def generate(self, prompts: Sequence[str], seed: int = 0) -> list[list[Continuation]]:
        """Returns the continuations of each prompt; see `stream`."""
        return [continuations for batch in self.stream(prompts, seed) for continuations in batch]

    def stream(self, prompts: Sequence[str], seed: int = 0) -> Iterator[list[list[Continuation]]]:
        """Yields the continuations of each prompt, a batch of prompts at a time, in order.

        Those of a beam search are in the order of their scores, samples in the order of their drawing. Of a prompt of
        more than `prompt_tokens` tokens, the last ones are read. White space at the end of a prompt is left out.

        Args:
          prompts: the texts; an empty one is the beginning of any text.
          seed: of sampling, 0 to 2^31 - 1; the samples of a prompt depend on it and on the prompt's index.

        Raises:
          UserError: this is no list of texts, or no seed.
        """
        _check_prompts(prompts)
        if not isinstance(seed, numbers.Integral) or seed not in COUNT_OR_0:
            raise UserError(f"seed is {seed!r}; expected a whole number, {COUNT_OR_0}.")
        with progress.bar("generating", len(prompts), "prompts") as advance:
            for start in range(0, len(prompts), self._rows):
                texts = [prompt.rstrip() for prompt in prompts[start : start + self._rows]]
                tokens = self._tokenizer.encode(texts)
                batch: dict = self._batch([ids[-self.prompt_tokens :] for ids in tokens])
                if self._sampling:
                    seeds = np.array([(seed, start + row) for row in range(self._rows)], np.int32)
                    batch["sampling"] = self._sampling.inputs(seeds)
                found = {name: np.asarray(value) for name, value in self._decoding.decode(batch).items()}
                yield [
                    list(self._continuations(text, tokens[row], *(found[name][row] for name in _FOUND)))
                    for row, text in enumerate(texts)
                ]
                advance(len(texts))

    def _batch(self, tokens: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns a batch of prompts, each after bos; surplus rows are empty."""
        batch = {field: np.zeros((self._rows, self._length), np.int32) for field in ("ids", "segment_ids", "positions")}
        for row, ids in enumerate(tokens):
            span = slice(0, len(ids) + 1)
            batch["ids"][row, span] = [self.experiment.search.bos_id, *ids]
            batch["segment_ids"][row, span], batch["positions"][row, span] = 1, np.arange(len(ids) + 1)
        return batch

    def _continuations(
        self, text: str, tokens: np.ndarray, rows: np.ndarray, scores: np.ndarray, lengths: np.ndarray
    ) -> Iterator[Continuation]:
        """Yields the continuations `rows [K, T]` of the prompt `text`, which has these tokens."""
        eos, is_cut = self.experiment.search.eos_id, len(tokens) > self.prompt_tokens
        for ids, score, length in zip(rows, scores, lengths):
            follows = ids[:length].tolist()
            # Together, because a word's first piece decodes with a space before it only if something precedes it.
            before, whole = self._tokenizer.decode([tokens, [*tokens, *follows]])
            yield Continuation(text + whole.removeprefix(before), float(score), eos not in follows, is_cut)


def load(
    logdir: str | pathlib.Path,
    sampling: Sampling | None = None,
    name: str | None = None,
    assignments: Sequence[str] = (),
    mesh: DeviceMesh = DeviceMesh(),
    platform: str | None = None,
) -> Generator:
    """Returns a generator with the newest checkpoint of a log directory; seconds, or a minute without program cache.

    Args:
      logdir: that of `train`.
      sampling: how to draw tokens; None for beam search.
      name: the registered name of the model; None for that of the log directory's `hyperparameters.json`.
      assignments: other hyperparameters, as `--set` has them: `["search.beam_size=8"]`.
      mesh: of the devices to generate on.
      platform: `cpu`, `gpu` or `tpu`; None for what JAX prefers.

    Raises:
      UserError: as `Generator` and `configured`.
    """
    return Generator(*configured(logdir, name, assignments, mesh, platform), logdir, sampling)


def _check_prompts(prompts: Sequence[str]):
    """Raises UserError unless these are texts that UTF-8, and so the tokenizer, can write."""
    definitions.check_texts("prompts", prompts)
    for index, prompt in enumerate(prompts):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompts: {prompt[error.start]!r} in prompt {index} is half of a surrogate pair; leave it out."
            ) from None
