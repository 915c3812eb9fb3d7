"""What a study trains and compares, read from a TOML file such as m4.toml."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any

from lingvo_moe.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Run:
    """One training, and the evaluation after it.

    Attributes:
      model: the name of the model in tables and figures; runs of one model differ in their seed.
      language: of a bilingual baseline; empty for a multilingual model.
      assignments: `field=value`s of `--set`, after those of the study.
      seed: of the initial weights and of the order of the training data.
      share: of the study's CPU time, above 0 and at most 1.
    """

    model: str
    language: str = ""
    assignments: tuple[str, ...] = ()
    seed: int = 0
    share: float = 1.0

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return file_name(self.model) + (f"_seed{self.seed}" if self.seed else "")


@dataclasses.dataclass(frozen=True)
class Study:
    """Models that are trained for an equal CPU time on the same data.

    Attributes:
      model: the registered model that all others are variations of.
      languages: the training pairs that are read of each language at most; 0 for all.
      assignments: `field=value`s of all models.
      vocabulary: the number of pieces of the shared tokenizer.
      max_pairs: the test sentences of each language, at most.
      losses: of held-out text, to which tokens and CPU time are reported; falling.
      baselines: the bilingual runs.
      models: the multilingual runs; the first is what the others are compared with.
    """

    model: str
    languages: Mapping[str, int]
    assignments: tuple[str, ...]
    vocabulary: int
    max_pairs: int
    losses: tuple[float, ...]
    baselines: tuple[Run, ...]
    models: tuple[Run, ...]

    @property
    def runs(self) -> list[Run]:
        """All runs: first one of each model, then those of further seeds."""
        return sorted([*self.baselines, *self.models], key=lambda run: run.seed)


class _Table:
    """A table of the file, whose keys are taken one by one."""

    def __init__(self, where: str, values: Any):
        if not isinstance(values, dict):
            raise UserError(f"{where} is {values!r}; expected a table.")
        self._where, self._left, self._known = where, dict(values), set[str]()

    def take(self, key: str, kind: type, default: Any = None, least: int | None = None) -> Any:
        """Returns a value; raises UserError if it is missing, without a default, or of another type or range.

        Args:
          key: of the value.
          kind: its type.
          default: what a missing one is taken as.
          least: the smallest that is allowed.
        """
        self._known.add(key)
        if key not in self._left:
            if default is None:
                raise UserError(f"{self._where}: `{key}` is missing.")
            return default
        value = self._left.pop(key)
        # TOML writes 4.0 as 4, too; a bool is an int to Python alone.
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise UserError(f"{self._where}: {key} is {value!r}; expected {_KINDS[kind]}.")
        if kind is float and not math.isfinite(value):
            raise UserError(f"{self._where}: {key} is {value}; expected a finite number.")
        if least is not None and value < least:
            raise UserError(f"{self._where}: {key} is {value}; expected {least} or more.")
        return value

    def take_list(self, key: str, kind: type, default: Any = None, least: int | None = None) -> tuple:
        """Returns a list whose items are of one type; raises UserError as `take` does."""
        items = self.take(key, list, default)
        return tuple(
            _Table(f"{self._where}: {key}", {"an item": item}).take("an item", kind, None, least) for item in items
        )

    def end(self):
        """Raises UserError if there are keys that were not taken."""
        for key in self._left:
            raise UserError(f"{self._where}: `{key}` is unknown.{did_you_mean(key, self._known)}")


_KINDS = {int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a table"}


def file_name(model: str) -> str:
    """Returns a model's name as a part of names of files."""
    return re.sub(r"\W+", "_", model)


def load(path: str | pathlib.Path) -> Study:
    """Reads a study; raises UserError where the file is missing or not as m4.toml is."""
    try:
        with open(path, "rb") as file:
            table = _Table(str(path), tomllib.load(file))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML ({error}).") from None
    languages = table.take("languages", dict)
    limits = _Table(f"{path}: languages", languages)
    study = Study(
        model=table.take("model", str),
        languages={language: limits.take(language, int, least=0) for language in languages},
        assignments=table.take_list("set", str, []),
        vocabulary=table.take("vocabulary", int, least=1),
        max_pairs=table.take("max_pairs", int, 100, least=1),
        losses=tuple(sorted(table.take_list("losses", float, []), reverse=True)),
        baselines=tuple(_baseline(f"{path}: baselines", each) for each in table.take("baselines", list, [])),
        models=tuple(run for each in table.take("models", list) for run in _models(f"{path}: models", each)),
    )
    table.end()
    _check(path, study)
    return study


def check_names(study: Study, names: Collection[str]):
    """Raises UserError for a name that no run has."""
    known = [run.name for run in study.runs]
    for name in names:
        if name not in known:
            raise UserError(f"--only: no run is named {name!r}; known: {', '.join(known)}.{did_you_mean(name, known)}")


def _baseline(where: str, values: Any) -> Run:
    table = _Table(where, values)
    language = table.take("language", str)
    assignments = table.take_list("set", str, [])
    share = table.take("share", float, 1.0)
    table.end()
    if not 0 < share <= 1:
        raise UserError(f"{where}: share is {share:g}; expected a number above 0, and at most 1.")
    return Run(f"bilingual {language}", language, ("model.num_experts=0", *assignments), share=share)


def _models(where: str, values: Any) -> list[Run]:
    table = _Table(where, values)
    name, assignments = table.take("name", str), table.take_list("set", str, [])
    seeds = table.take_list("seeds", int, [0], least=0)
    table.end()
    if not seeds:
        raise UserError(f"{where}: seeds is empty; expected a seed for each run.")
    return [Run(name, "", assignments, seed) for seed in seeds]


def _check(path: str | pathlib.Path, study: Study):
    """Raises UserError where languages or runs do not fit each other."""
    if not study.languages or not study.models:
        raise UserError(f"{path}: expected one language and one of `models` at least.")
    for run in study.baselines:
        if run.language not in study.languages:
            hint = did_you_mean(run.language, study.languages)
            raise UserError(f"{path}: baselines: {run.language} is not among the study's languages.{hint}")
    _check_different(path, [run.name for run in study.runs])


def _check_different(path: str | pathlib.Path, names: Collection[str]):
    for name in names:
        if not re.search(r"[^\W_]", name):
            raise UserError(f"{path}: a model's name is empty; expected letters or digits.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise UserError(f"{path}: two runs are named {twice}; models need different names, and their seeds too.")
