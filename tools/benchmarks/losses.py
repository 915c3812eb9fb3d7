"""Whether our model learns as a well-known library's does: validation loss at equal target tokens, against Marian.

    python -m tools.benchmarks.losses [--corpus=DIRECTORY] [--tokenizers=DIRECTORY] [--language=it] [--steps=1000]
        [--evaluations=5] [--rates=3e-4,1e-3,3e-3] [--set=FIELD=VALUE] [--json=FILE] [--document=docs/performance.md]

Both sides train a dense bilingual model of a few million weights, each with its own recipe: ours is m4.Quickstart's,
Marian's is Adam, with the best of the `--rates`. Vocabulary, dimensions, learning-rate schedule, steps and batches, one
pair a row, are equal, and so are the held-out pairs. They run one after another on one core. The status is 1 if our
last loss is more than 3 % above Marian's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Sequence

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.batching import Batch
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.pipeline import EvalInput, TrainInput
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files, progress
from tools import markdown
from tools.benchmarks import batches, comparisons, learner
from tools.benchmarks.comparisons import Directories
from tools.benchmarks.work import Learning
from tools.benchmarks.worker import Worker
from tools.study import corpora

PEER = "marian"
LARGEST_RATIO = 1.03
_EQUAL = ("layers", "batches")

_VALUES = flags.FlagValues()
flags.DEFINE_string("corpus", "build/quickstart/corpus", "corpus that has the language", flag_values=_VALUES)
flags.DEFINE_string("tokenizers", "build/quickstart/tokenizers", "one tokenizer of both sides", flag_values=_VALUES)
flags.DEFINE_string("language", "it", "language to translate into English", flag_values=_VALUES)
flags.DEFINE_integer("steps", 1000, "training steps of each side", lower_bound=10, flag_values=_VALUES)
flags.DEFINE_integer("evaluations", 5, "how often the validation loss is taken", lower_bound=1, flag_values=_VALUES)
flags.DEFINE_list("rates", ["3e-4", "1e-3", "3e-3"], "Marian's largest learning rates to try", flag_values=_VALUES)
flags.DEFINE_multi_string("set", [], "field=value: of our recipe", flag_values=_VALUES)
flags.DEFINE_string("json", None, "also write the run to this file", flag_values=_VALUES)
flags.DEFINE_string("document", None, "page to write the figures to", flag_values=_VALUES)
flags.DEFINE_string(
    "directory", "build/benchmarks", "directory of batches, logs and the cache of programs", flag_values=_VALUES
)
flags.DEFINE_string(
    "venvs", "build/benchmarks/venvs", "directory of the peers' virtual environments", flag_values=_VALUES
)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A training.

    Attributes:
      name: of the row.
      facts: of the worker.
      held_out: the losses on held-out pairs after each part of the training, in nats per target token.
      training: likewise the mean loss of the part's own steps.
      seconds: CPU seconds of the training with its evaluations.
    """

    name: str
    facts: dict
    held_out: tuple[float, ...]
    training: tuple[float, ...]
    seconds: float

    @property
    def last(self) -> float:
        """The validation loss at the end; infinite for one that is not a number."""
        return self.held_out[-1] if math.isfinite(self.held_out[-1]) else math.inf


@dataclasses.dataclass(frozen=True)
class Run:
    """Our training and Marian's.

    Attributes:
      command: that made it.
      tokens: the target tokens trained on, at each evaluation.
      held_out_tokens: the target tokens of the held-out pairs.
      ours: our training.
      tried: Marian's with each learning rate.
    """

    command: str
    tokens: tuple[int, ...]
    held_out_tokens: int
    ours: Curve
    tried: tuple[Curve, ...]

    @property
    def best(self) -> Curve:
        """Marian's training with the lowest loss at the end."""
        return min(self.tried, key=lambda curve: curve.last)

    @property
    def ratio(self) -> float:
        """Our loss over Marian's, at the end."""
        return self.ours.last / self.best.last


def main(arguments: list[str]) -> int:
    """Trains and compares; returns 1 if our loss is more than 3 % above Marian's."""
    app.no_arguments(arguments[1:])
    rates, ends = _rates(_VALUES.rates), _ends(_VALUES.steps, _VALUES.evaluations)
    learner.experiment_of(_work())  # raises for --set before anything is read
    output_files.check_path("--json", _VALUES.json)
    if _VALUES.document:
        markdown.check("--document", _VALUES.document, "losses")  # raises before the work
    directories = Directories(pathlib.Path(_VALUES.directory).absolute(), pathlib.Path(_VALUES.venvs).absolute())
    run = _run(rates, ends, directories)
    text = table(run)
    print(text)
    if _VALUES.document:
        markdown.replace(pathlib.Path(_VALUES.document), "losses", text)
    if _VALUES.json:
        with output_files.atomic_writer(_VALUES.json) as file:
            file.write(json.dumps(dataclasses.asdict(run), indent=1) + "\n")
    return int(not run.ratio <= LARGEST_RATIO)


def _run(rates: Sequence[float], ends: Sequence[int], directories: Directories) -> Run:
    work = make_batches(directories.directory / "losses" / _VALUES.language)
    with progress.bar("training", (1 + len(rates)) * ends[-1], "steps") as advance:

        def curve(name: str, who: str, work: Learning) -> Curve:
            with directories.worker(f"losses.{who}", who, work) as worker:
                return train(name, worker, ends, advance)

        # Marian first: its environment may be impossible to make.
        tried = [curve(f"Marian, {rate:g}", PEER, dataclasses.replace(work, rate=rate)) for rate in rates]
        ours = curve("ours", comparisons.LEARNER, work)
    for other in tried:
        check_equal(ours, other)
    made = batches.Batches(work.batches)
    tokens = list(itertools.accumulate(made.target_tokens("train")))
    return Run(
        _command(),
        tuple(tokens[end - 1] for end in ends),
        sum(made.target_tokens("held_out")),
        ours,
        tuple(tried),
    )


def _command() -> str:
    """Returns the command with the flags that the figures depend on, without its directories."""
    given = [f"--{name}={getattr(_VALUES, name)}" for name in ("language", "steps", "evaluations")]
    given += [f"--rates={','.join(_VALUES.rates)}", *(f"--set={assignment}" for assignment in _VALUES.set)]
    return " ".join(["python -m tools.benchmarks.losses", *given])


def make_batches(directory: pathlib.Path) -> Learning:
    """Writes the batches of the flags' language to `directory`, with the corpus of it alone; returns the work.

    Raises:
      UserError: no corpus, no such language in it, or tokenizers that the sides do not share.
    """
    corpus = Corpus.open(_VALUES.corpus)
    if _VALUES.language not in corpus.languages:
        raise UserError(
            f"--language={_VALUES.language}: {_VALUES.corpus} does not have it; it has {', '.join(corpus.languages)}."
        )
    tokenizers = Tokenizers.load(_VALUES.tokenizers)
    if not tokenizers.is_shared:
        raise UserError(
            f"--tokenizers={_VALUES.tokenizers}: source and target have different ones, but Marian has one vocabulary. "
            f"Train one with `python -m tools.train_tokenizer --shared_vocabulary=6000`."
        )
    file = directory / "batches.npz"
    work = dataclasses.replace(_work(), batches=str(file), vocabulary=tokenizers.source.vocabulary_size)
    config = learner.experiment_of(work).input
    own = directory / "corpus"
    corpora.restrict(corpus, {_VALUES.language: 0}, own, "Delete it, or name another --directory.")
    endless = TrainInput(own, _VALUES.tokenizers, config).batches()
    training = [rows_of(batch) for batch, _ in itertools.islice(endless, work.steps)]
    held_out = [rows_of(batch) for batch in EvalInput(own, _VALUES.tokenizers, config).batches()]
    if not held_out:
        raise UserError(
            f"--language={_VALUES.language}: {_VALUES.corpus} has no held-out pair that fits into a row; use another."
        )
    batches.write(file, {"train": training, "held_out": held_out})
    return work


def _work() -> Learning:
    """Returns the work that the flags describe, still without batches and with a vocabulary of some size."""
    return Learning(batches="", steps=_VALUES.steps, settings=tuple(_VALUES.set), vocabulary=1000)


def rows_of(batch: Batch) -> batches.Rows:
    """Returns what a file holds of a batch without packing."""
    target = batch["target"]
    return {"source": batch["source"]["ids"], "inputs": target["ids"], "labels": target["labels"]}


def train(name: str, worker: Worker, ends: Sequence[int], advance: Callable) -> Curve:
    """Lets a worker train, with an evaluation after each of the steps `ends`; calls `advance(steps, note)`.

    Raises:
      UserError: the worker ends early.
    """
    held_out, training, seconds = [], [], 0.0
    for start, end in itertools.pairwise((0, *ends)):
        measured = worker.run(end - start)
        *losses, after = measured.losses
        held_out.append(after)
        training.append(sum(losses) / len(losses))
        seconds += measured.seconds * (end - start)
        advance(end - start, note=f"{name}: validation loss {after:.3f}")
    return Curve(name, worker.facts, tuple(held_out), tuple(training), seconds)


def check_equal(ours: Curve, other: Curve):
    """Raises UserError if the two training runs had other batches or layers."""
    for fact in _EQUAL:
        if ours.facts[fact] != other.facts[fact]:
            raise UserError(
                f"{other.name}: its {fact} are {other.facts[fact]}, ours {ours.facts[fact]}; the losses cannot be "
                f"compared."
            )


def table(run: Run) -> str:
    """Returns the losses at each evaluation, then the facts of all training runs, as Markdown."""
    best = run.best
    rows = [("0", f"{run.ours.facts['first_loss']:.3f}", f"{best.facts['first_loss']:.3f}", "")]
    for tokens, ours, other in zip(run.tokens, run.ours.held_out, best.held_out):
        rows.append((f"{tokens:,}", f"{ours:.3f}", f"{other:.3f}", f"{ours / other:.3f}"))
    lines = [
        f"`{run.command}`; loss on {run.held_out_tokens:,} held-out target tokens, in nats per token:",
        "",
        markdown.table(("target tokens", "ours", best.name, "ratio"), rows),
    ]
    met = "yes" if run.ratio <= LARGEST_RATIO else "no"
    lines += ["", f"- at most {LARGEST_RATIO} times Marian's loss: {met}"]
    lines += [f"- {_facts(curve)}" for curve in (run.ours, *run.tried)]
    return "\n".join(lines)


def _facts(curve: Curve) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in curve.facts["versions"].items())
    return (
        f"{curve.name}: {curve.facts['weights']:,} weights, {curve.seconds:.0f} CPU s; training loss of the last part "
        f"{curve.training[-1]:.3f}, validation loss {curve.held_out[-1]:.3f}; {versions}"
    )


def _ends(steps: int, evaluations: int) -> list[int]:
    """Returns the steps after which there is an evaluation: the last one, and others evenly before it."""
    if evaluations > steps:
        raise UserError(f"--evaluations={evaluations}: expected at most --steps={steps}.")
    return [steps * part // evaluations for part in range(1, evaluations + 1)]


def _rates(given: Sequence[str]) -> list[float]:
    try:
        rates = [float(text) for text in given]
    except ValueError:
        rates = []
    if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise UserError(
            f"--rates={','.join(given)}: expected numbers above 0 with commas between them, like 3e-4,1e-3."
        )
    return rates


if __name__ == "__main__":
    app.run(main, _VALUES)
