"""One run of a study: training for a CPU time, then evaluation, by the project's own commands.

The first half of the CPU time is trained at the full learning rate, after the warm-up. The number
of its steps determines that of the second half, in which the rate falls to a tenth. Each stage leaves a file, and a
stage that has left one is skipped, so a run resumes from its newest checkpoint after any interruption.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_moe import experiment
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import output_files
from lingvo_moe.utils.exit_status import INTERRUPTED
from lingvo_moe.utils.hashes import file_sha256
from tools.study import ticks
from tools.study.plan import Run, Study

CONSTANT_SHARE = 0.5  # of the CPU time: how much is trained before the learning rate falls
_ENDLESS = 10_000_000  # steps
_REPOSITORY = pathlib.Path(__file__).parents[2]

Execute = Callable[[Sequence[str], Mapping[str, str]], int]


class CommandFailed(Exception):
    """A command has ended with a status that is not 0.

    Attributes:
      status: as a shell shows it, 128 and the number of a signal.
    """

    def __init__(self, status: int):
        super().__init__(f"status {status}")
        self.status = status


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The second half of a training run.

    Attributes:
      cooldown_after: the step after which the learning rate falls.
      steps: the last step.
    """

    cooldown_after: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Data:
    """What all runs of a study read.

    Attributes:
      corpus: of all languages.
      training: the corpora to train on: by language, and that of all languages under "".
      tokenizers: of all runs.
      sentences: a file of test sentences to route.
      embeddings: a directory of initial embeddings.
    """

    corpus: pathlib.Path
    training: Mapping[str, pathlib.Path]
    tokenizers: pathlib.Path
    sentences: pathlib.Path
    embeddings: pathlib.Path

    def embeddings_of(self, language: str, dim: int) -> pathlib.Path:
        """Returns the file of vectors `[V, dim]` counted from `training[language]`."""
        return self.embeddings / language / f"{dim}.safetensors"


class Trial:
    """A run in a directory of its own.

    Attributes:
      run: what is trained.
      directory: of all its files.
    """

    def __init__(self, study: Study, run: Run, directory: pathlib.Path, further: Sequence[str] = ()):
        """Takes the study, one of its runs, its directory, and assignments that come after all others."""
        self.run, self.directory = run, directory
        self._study = study
        self.assignments = (
            *study.assignments,
            *(f"model.{side}_vocabulary={study.vocabulary}" for side in ("source", "target")),
            *run.assignments,
            f"training.seed={run.seed}",
            f"input.seed={run.seed}",
            *further,
        )

    @property
    def logdir(self) -> pathlib.Path:
        """The log directory."""
        return self.directory / "log"

    @property
    def scores(self) -> pathlib.Path:
        """The file of `eval --json`."""
        return self.directory / "scores.json"

    @property
    def experts(self) -> pathlib.Path:
        """The file of `translate --explain`; a dense model has none."""
        return self.directory / "experts.jsonl"

    @property
    def is_finished(self) -> bool:
        """Whether all stages are done."""
        return self.scores.exists() and (self.experts.exists() or not self.num_experts)

    @property
    def num_experts(self) -> int:
        """E; 0 for a dense model."""
        return self.experiment().model.num_experts

    @property
    def embedding_dim(self) -> int:
        """M of the initial embeddings; 0 without tied embeddings, which start with random ones."""
        tied = self.experiment().tied_model
        return tied.model_dim if tied else 0

    def experiment(self) -> experiment.Experiment:
        """Returns the experiment; raises UserError where the study's assignments do not fit it."""
        return experiment.get(self._study.model, self.assignments, DeviceMesh((1,)))

    def complete(self, data: Data, budget: float, execute: Execute):
        """Does what is left to do.

        Args:
          data: to train and to test with.
          budget: CPU seconds of training.
          execute: runs a command with further environment variables, returns its exit status.

        Raises:
          UserError: the directory has a run of other settings.
          CommandFailed: a command failed, or was interrupted.
        """
        self.check_settings(data, budget)
        self.directory.mkdir(parents=True, exist_ok=True)
        _write(self._settings_file, self._settings(data, budget))
        if not self.scores.exists():
            self._train(data, budget, execute)
            self._evaluate(data, execute)
        if not self.is_finished:
            self._explain(data, execute)

    def check_settings(self, data: Data, budget: float):
        """Raises UserError if the directory has a run of other settings; arguments are those of `complete`."""
        if not self._settings_file.exists():
            return
        before = json.loads(self._settings_file.read_text(encoding="utf-8"))
        for name, value in self._settings(data, budget).items():
            if before.get(name) != value:
                raise UserError(
                    f"{self.directory} was trained with {name} {before.get(name)}, which is now {value}. Name a new "
                    f"--directory, or delete this one to train it from the start."
                )

    def schedule(self, budget: float) -> Schedule | None:
        """Returns the second half of the training; None before the first is done. Once decided, it stays."""
        file = self.directory / "schedule.json"
        if file.exists():
            return Schedule(**json.loads(file.read_text(encoding="utf-8")))
        made = ticks.read(self.logdir)
        if not made or made[-1].seconds < CONSTANT_SHARE * budget:
            return None
        left = (budget - made[-1].seconds) * made[-1].step / made[-1].seconds
        decided = Schedule(made[-1].step, made[-1].step + max(1, round(left)))
        _write(file, dataclasses.asdict(decided))
        return decided

    @property
    def _settings_file(self) -> pathlib.Path:
        return self.directory / "settings.json"

    def _settings(self, data: Data, budget: float) -> dict[str, Any]:
        """Returns all that the numbers of the run follow from."""
        corpus = json.loads((data.corpus / "corpus.json").read_text(encoding="utf-8"))
        return {
            "model": self._study.model,
            "set": list(self.assignments),
            "language": self.run.language,
            "max_pairs": self._study.max_pairs,
            "cpu_seconds": budget,
            "corpus": corpus["fingerprint"],
            "sentences": file_sha256(data.sentences),
        }

    def _flags(self, corpus: pathlib.Path, data: Data) -> list[str]:
        return [
            f"--model={self._study.model}",
            "--devices=1",
            *(f"--set={assignment}" for assignment in self.assignments),
            f"--corpus={corpus}",
            f"--tokenizers={data.tokenizers}",
            f"--logdir={self.logdir}",
        ]

    def _train(self, data: Data, budget: float, execute: Execute):
        command = ["train", *self._flags(data.training[self.run.language], data), "--import=tools.study.cpu_clock"]
        if self.embedding_dim:
            command.append(f"--initial_embeddings={data.embeddings_of(self.run.language, self.embedding_dim)}")
        # Long enough for a slow step and its checkpoint beside other work.
        command.append("--set=training.grace_seconds=600")
        schedule = self.schedule(budget)
        if schedule is None:
            status = execute([*command, f"--steps={_ENDLESS}"], {ticks.LIMIT: str(CONSTANT_SHARE * budget)})
            schedule = self.schedule(budget)
            if status not in (0, INTERRUPTED) or schedule is None:
                raise CommandFailed(status)
        falling = {
            "cooldown_after": schedule.cooldown_after,
            "cooldown_steps": schedule.steps - schedule.cooldown_after,
        }
        changes = [f"--set=optimizer.learning_rate.{name}={value}" for name, value in falling.items()]
        _require(execute([*command, *changes, f"--steps={schedule.steps}"], {}))

    def _evaluate(self, data: Data, execute: Execute):
        languages = [self.run.language] if self.run.language else sorted(self._study.languages)
        flags = [f"--languages={','.join(languages)}", f"--max_pairs={self._study.max_pairs}", f"--json={self.scores}"]
        _require(execute(["eval", *self._flags(data.corpus, data), *flags], {}))

    def _explain(self, data: Data, execute: Execute):
        flags = [flag for flag in self._flags(data.corpus, data) if not flag.startswith("--corpus=")]
        flags += [f"--input={data.sentences}", f"--output={self.directory / 'translations.txt'}"]
        _require(execute(["translate", *flags, f"--explain={self.experts}"], {}))


def execute(arguments: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int] = ()) -> int:
    """Runs `python -m lingvo_moe` with these arguments and prints the command; returns its exit status.

    Args:
      arguments: of the command line.
      environment: further variables.
      inherited: file descriptors that the process keeps open.
    """
    command = [sys.executable, "-m", "lingvo_moe", *arguments]
    shown = [f"{name}={value}" for name, value in environment.items()]
    print(f"\n$ {' '.join([*shown, shlex.join(command)])}", flush=True)
    variables = {**os.environ, **environment, ticks.PARENT: str(os.getpid())}
    variables["PYTHONPATH"] = os.pathsep.join([str(_REPOSITORY), *filter(None, sys.path)])
    # Ctrl-C reaches the command as well, which saves a checkpoint before it ends; it must not be killed.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        status = subprocess.run(command, check=False, env=variables, pass_fds=inherited).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status


def _require(status: int):
    if status:
        raise CommandFailed(status)


def _write(file: pathlib.Path, content: Mapping):
    with output_files.atomic_writer(str(file)) as opened:
        json.dump(content, opened, indent=1)
