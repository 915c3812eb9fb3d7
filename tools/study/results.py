"""The numbers of a study: what its runs left, as JSON, and what follows from it."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import statistics
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.errors import UserError
from lingvo_moe.inference.evaluation import LanguageScore
from lingvo_moe.utils import output_files
from tools.study import ticks
from tools.study.plan import Study
from tools.study.trial import Trial

_VERSION = 1
_MOST_POINTS = 100  # of a curve
_LOSS = "valid/cross_entropy"
_SHUFFLES = 100


@dataclasses.dataclass(frozen=True)
class Routing:
    """Which experts take the tokens of one layer, outside of training.

    Attributes:
      shares: by language, the share of its choices that go to each expert.
      information: mutual information of language and expert in these choices, in bits, where all languages are equally
        frequent. That of few choices is above 0 even where experts do not differ in their languages.
      chance: the same where languages are drawn for the sentences, without replacement: the mean of `_SHUFFLES` draws.
        None in results that were collected without it.
    """

    shares: dict[str, list[float]]
    information: float
    chance: float | None = None

    @property
    def load(self) -> list[float]:
        """The share of each expert, all languages taken together, times the number of experts: 1 is perfect balance."""
        columns = list(zip(*self.shares.values()))
        return [statistics.fmean(column) * len(columns) for column in columns]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What one run has shown.

    Attributes:
      model, language, seed: see `plan.Run`.
      assignments: `field=value`s that make the model.
      weights, experts: of the model.
      steps, cpu_seconds, tokens: of the training; tokens of the targets.
      curve: (step, tokens, CPU seconds, held-out cross-entropy, source gain) after each evaluation.
      overflow: (step, share of dropped tokens), of training; empty without experts.
      scores: of the test sentences, by language.
      cross_entropy, source_gain: of the test sentences of all its languages, in nats per target token.
      routing: by layer; empty without experts.
    """

    model: str
    language: str
    seed: int
    assignments: list[str]
    weights: int
    experts: int
    steps: int
    cpu_seconds: float
    tokens: int
    curve: list[tuple[int, int, float, float, float]]
    overflow: list[tuple[int, float]]
    scores: list[LanguageScore]
    cross_entropy: float
    source_gain: float
    routing: dict[str, Routing]

    def bleu(self, language: str) -> float | None:
        """BLEU of a language; None where it was not scored."""
        return next((score.bleu for score in self.scores if score.language == language), None)

    def reached(self, loss: float) -> tuple[float, float] | None:
        """Returns the tokens and the CPU seconds after which the validation loss was first as low; None if never.

        Between two evaluations, the loss is taken to fall on a straight line.
        """
        before = None
        for _, *now, value, _ in self.curve:
            if not math.isfinite(value):
                continue
            if value <= loss:
                if before is None:
                    return now[0], now[1]
                share = (before[1] - loss) / (before[1] - value)
                tokens, seconds = (old + share * (new - old) for old, new in zip(before[0], now))
                return tokens, seconds
            before = (now, value)
        return None


@dataclasses.dataclass(frozen=True)
class Results:
    """A study's results.

    Attributes:
      minutes: of CPU time of each training.
      losses: see `plan.Study`.
      runs: those that are finished, in the study's order.
      missing: the models and seeds that are not.
    """

    minutes: float
    losses: list[float]
    runs: list[RunResult]
    missing: list[str]

    @property
    def models(self) -> dict[str, list[RunResult]]:
        """The multilingual runs, by model."""
        found = collections.defaultdict(list)
        for run in self.runs:
            if not run.language:
                found[run.model].append(run)
        return dict(found)

    @property
    def languages(self) -> dict[str, int]:
        """The training pairs of each language, from high to low resource."""
        scores = {score.language: score.train_pairs for run in self.runs for score in run.scores}
        return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))

    @property
    def baselines(self) -> dict[str, float]:
        """BLEU of the bilingual models, by language."""
        found = {run.language: run.bleu(run.language) for run in self.runs if run.language}
        return {language: bleu for language, bleu in found.items() if bleu is not None}

    def bleu(self, model: str) -> dict[str, list[float]]:
        """BLEU of a multilingual model, by language: one number for each seed."""
        values = {language: [run.bleu(language) for run in self.models.get(model, [])] for language in self.languages}
        scored = {language: [b for b in found if b is not None] for language, found in values.items()}
        return {language: found for language, found in scored.items() if found}

    def save(self, path: pathlib.Path):
        """Writes the results as JSON; a number that is not finite becomes null, as JSON has no other word for it."""
        content = _without_nan({"version": _VERSION, **dataclasses.asdict(self)})
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        with output_files.atomic_writer(str(path)) as file:
            file.write(text.replace('{"model"', '\n{"model"') + "\n")

    @classmethod
    def load(cls, path: pathlib.Path) -> Results:
        """Reads results that `save` wrote. Raises UserError for a file of another kind."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("expected an object")
            if content.pop("version") != _VERSION:
                raise ValueError("another version")
            found = cls(**{**content, "runs": [_run(**run) for run in content["runs"]]})
            _check_types(found)
            return found
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; expected the results.json of a study.") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path}: not the results.json of a study ({error}).") from None


def _check_types(record: Any):
    """Raises ValueError for a field of a dataclass whose value does not have the declared type."""
    for name, hint in typing.get_type_hints(type(record)).items():
        if not _has_type(getattr(record, name), hint):
            raise ValueError(f"wrong type of {name}")


def _has_type(value: object, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_has_type(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_has_type(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(item, parts[1]) for item in value.values())
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_has_type, value, parts))
    if dataclasses.is_dataclass(hint):
        _check_types(value)
        return True
    return isinstance(value, (int, float) if hint is float else hint)


def _run(curve: list, overflow: list, scores: list[dict], routing: dict[str, dict], **fields) -> RunResult:
    losses = {name: _number(fields.pop(name)) for name in ("cross_entropy", "source_gain")}
    return RunResult(
        curve=[(step, tokens, seconds, _number(loss), _number(gain)) for step, tokens, seconds, loss, gain in curve],
        overflow=[(step, _number(share)) for step, share in overflow],
        scores=[LanguageScore(**score) for score in scores],
        routing={layer: Routing(**found) for layer, found in routing.items()},
        **losses,
        **fields,
    )


def _without_nan(value: Any) -> Any:
    """Returns nested lists, tuples and dicts with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def trend(values: Sequence[float], window: int = 10) -> list[float]:
    """Returns the moving average of GShard's figure 6: at each position, over `window` values around it.

    Near both ends, the mean is over those of the window that exist.
    """
    return [statistics.fmean(values[max(0, i - window // 2) : i - window // 2 + window]) for i in range(len(values))]


def collect(study: Study, trials: Sequence[Trial], minutes: float, languages: Sequence[str]) -> Results:
    """Reads what finished runs have left.

    Args:
      study: the study.
      trials: its runs.
      minutes: of CPU time of each.
      languages: of the lines that were routed.
    """
    finished = [trial for trial in trials if trial.is_finished]
    missing = [trial.run.name for trial in trials if not trial.is_finished]
    return Results(minutes, list(study.losses), [_collect(trial, languages) for trial in finished], missing)


def _collect(trial: Trial, languages: Sequence[str]) -> RunResult:
    made = ticks.read(trial.logdir)
    found = json.loads(trial.scores.read_text(encoding="utf-8"))
    loss, model = found["loss"], trial.experiment().model
    lines = _lines(trial.experts) if model.num_experts else []
    return RunResult(
        model=trial.run.model,
        language=trial.run.language,
        seed=trial.run.seed,
        assignments=list(trial.assignments),
        weights=model.num_weights(),
        experts=model.num_experts,
        steps=made[-1].step,
        cpu_seconds=round(made[-1].seconds, 1),
        tokens=made[-1].tokens,
        curve=[(t.step, t.tokens, round(t.seconds, 1), *_held_out(t.scalars)) for t in made if _LOSS in t.scalars],
        overflow=_thinned([(tick.step, tick.scalars["overflow"]) for tick in made if "overflow" in tick.scalars]),
        scores=[LanguageScore(**score) for score in found["scores"]],
        cross_entropy=round(float(loss["cross_entropy"]), 4),  # `eval` writes "nan"
        source_gain=round(float(loss["shuffled_cross_entropy"] or math.nan) - float(loss["cross_entropy"]), 4),
        routing=routing(lines, languages, model.num_experts),
    )


def _lines(file: pathlib.Path) -> list[str]:
    """Returns the lines of a file; characters such as U+2028, which JSON leaves in texts, do not end one."""
    return [line for line in file.read_text(encoding="utf-8").split("\n") if line]


def _held_out(scalars: Mapping[str, float]) -> tuple[float, float]:
    return scalars[_LOSS], scalars.get("valid/source_gain", math.nan)


def routing(lines: Iterable[str], languages: Sequence[str], experts: int) -> dict[str, Routing]:
    """Counts the choices in a file of `translate --explain`, by layer.

    Args:
      lines: of the file.
      languages: of each line that was translated.
      experts: how many each layer has.
    """
    counts: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros((len(languages), experts), int))
    for line in lines:
        explanation = json.loads(line)
        for layer in (name for name in explanation if "/" in name):
            chosen = [expert for token in explanation[layer] for expert, _ in token]
            counts[layer][int(explanation["line"]) - 1] += np.bincount(chosen, minlength=experts)
    return {layer: _routing(found, np.asarray(languages)) for layer, found in counts.items()}


def _routing(counts: np.ndarray, languages: np.ndarray) -> Routing:
    """Summarises the choices, counts [lines, experts], of lines of these languages."""
    routed = counts.sum(1) > 0
    counts, languages = counts[routed], languages[routed]
    random = np.random.default_rng(0)
    shares = _shares(counts, languages)
    by_chance = [_information(_shares(counts, random.permutation(languages))) for _ in range(_SHUFFLES)]
    rounded = {language: [round(share, 4) for share in found.tolist()] for language, found in shares.items()}
    return Routing(rounded, round(_information(shares), 4), round(statistics.fmean(by_chance), 4))


def _shares(counts: np.ndarray, languages: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the share of each language's choices that go to each expert."""
    sums = {language: counts[languages == language].sum(0) for language in dict.fromkeys(languages.tolist())}
    return {language: found / found.sum() for language, found in sums.items()}


def _information(shares: Mapping[str, np.ndarray]) -> float:
    """Returns the mutual information of language and expert, in bits, of equally frequent languages."""
    of_languages = np.stack(list(shares.values()))
    ratios = of_languages / np.maximum(of_languages.mean(0), np.finfo(float).tiny)
    return float((of_languages * np.log2(ratios, where=ratios > 0, out=np.zeros_like(ratios))).sum(1).mean())


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the means of at most `_MOST_POINTS` equal parts of a curve, each at its last step."""
    size = -(-len(points) // _MOST_POINTS) or 1
    parts = (points[start : start + size] for start in range(0, len(points), size))
    return [(part[-1][0], round(statistics.fmean(value for _, value in part), 5)) for part in parts]
