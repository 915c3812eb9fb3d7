"""Writes the tables of a trained translation model's card: training, scores by language, packages by licence.

    python -m tools.model_card --model=m4.Pocket --corpus=DIR --logdir=DIR --scores=OWN.json,UNSEEN.json --output=FILE

Scores are files of `eval --json`, the first of them of the model's own packages. Licences are those that a Debian
package's copyright file, a wheel's metadata and an npm package's manifest name.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import pathlib
import re
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from lingvo_moe import experiment, lazy, registry
from lingvo_moe.cli import app
from lingvo_moe.data.corpora import debian_help, npm_packages, sources
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files
from tools import markdown

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", None, "the registered model", flag_values=FLAGS)
flags.DEFINE_multi_string("set", [], "override FIELD=VALUE of its training", flag_values=FLAGS)
flags.DEFINE_string("corpus", None, "the corpus that it was trained on", flag_values=FLAGS)
flags.DEFINE_list("logdir", None, "the log directories that it was trained in, oldest first", flag_values=FLAGS)
flags.DEFINE_list("scores", None, "files of `eval --json`: own packages, unseen packages", flag_values=FLAGS)
flags.DEFINE_string("packages", None, "where the packages are, as of tools.build_corpus", flag_values=FLAGS)
flags.DEFINE_string("output", None, "the Markdown file to write", flag_values=FLAGS)

_PAUSE = 600  # seconds without a report, after which training is taken to have stopped
_HIGH_RESOURCE = 20  # languages
_TITLES = ("own packages", "unseen packages")  # of the files of scores
_MEASURES = ("bleu", "copy_bleu", "chrf", "copy_chrf")
_FIELDS = {"language": str, "train_pairs": int, "test_pairs": int, **dict.fromkeys(_MEASURES, float)}  # of a score
_MOST = 2**63  # of a number of pairs
_MAX_LICENCES = 5  # of a package
_NAME = r"[\w.+-]+(?: with [\w .]+exception)?"
_LICENCE = re.compile(rf"^License: *({_NAME}(?:,? (?:or|and|OR|AND) {_NAME})*)$", re.MULTILINE)
_SEE_FILE = "named in free text alone"
_NO_FILE = "no copyright file in the package"


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What the curves of a log directory show.

    Attributes:
      steps: the number of the last step.
      tokens: of the targets that were read, without padding.
      hours: of training, without pauses.
      losses: (step, held-out cross-entropy, source gain), in nats per target token.
    """

    steps: int
    tokens: float
    hours: float
    losses: list[tuple[int, float, float]]


def main(arguments: list[str]):
    """Writes the card."""
    app.no_arguments(arguments[1:])
    for flag in ("model", "corpus", "logdir", "scores", "output"):
        if not FLAGS[flag].value:
            raise UserError(f"--{flag} is missing: {FLAGS[flag].help}.")
    output_files.check_path("--output", FLAGS.output)
    name = registry.full_name(FLAGS.model)
    config = experiment.get(name, FLAGS["set"].value or ())
    if not config.translates:
        raise UserError(f"{name} does not translate; the card is of a translation model.")
    if len(FLAGS.scores) > len(_TITLES):
        raise UserError(
            f"--scores={','.join(FLAGS.scores)}: expected at most {len(_TITLES)} files: {', '.join(_TITLES)}."
        )
    positions = config.input.batch_size * config.input.lengths["target"]
    runs = [read_curves(pathlib.Path(logdir), positions) for logdir in FLAGS.logdir]
    scores = [_read_scores(file) for file in FLAGS.scores]
    packages = pathlib.Path(FLAGS.packages).expanduser() if FLAGS.packages else sources.default_cache()
    licences = by_licence(Corpus.open(FLAGS.corpus), packages)
    text = "\n".join([f"# {name}: figures\n", *_training(runs), *_scores(scores), *_licences(licences)])
    with output_files.atomic_writer(FLAGS.output) as file:
        file.write(text)


def read_curves(logdir: pathlib.Path, positions: int) -> TrainingRun:
    """Reads the curves of a log directory.

    Args:
      logdir: the log directory.
      positions: of the targets in a batch.

    Raises:
      UserError: it has no curves, or others.
    """
    times, padding, held_out = set(), [], collections.defaultdict(dict)
    for run in ("train", "valid"):
        for step, wall_time, tag, value in _events(logdir / run):
            times.add((wall_time, step))
            if run == "valid":
                held_out[step][tag] = value
            elif tag == "padding/target":
                padding.append(value)
    if not padding:
        raise UserError(f"--logdir={logdir}: there are no curves of training; expected a log directory of `train`.")
    ordered = sorted(times)
    pauses = [after[0] - before[0] for before, after in itertools.pairwise(ordered)]
    steps = max(step for _, step in ordered)
    if without := [step for step, found in held_out.items() if "cross_entropy" not in found]:
        raise UserError(
            f"--logdir={logdir}: the held-out curves have no cross_entropy at step {min(without)}; expected a log "
            f"directory of `train`, of a translation model."
        )
    losses = [
        (step, found["cross_entropy"], found.get("source_gain", math.nan)) for step, found in sorted(held_out.items())
    ]
    used = 1 - sum(padding) / len(padding)
    return TrainingRun(steps, steps * positions * used, sum(p for p in pauses if p < _PAUSE) / 3600, losses)


def by_licence(corpus: Corpus, packages: pathlib.Path) -> dict[str, list[str]]:
    """Returns the inputs of a corpus by the names of their licences, in the order of the first of each."""
    found = collections.defaultdict(list)
    for name in (name.removesuffix(debian_help.NAME_SUFFIX) for name in corpus.manifest["inputs"]):
        found[", ".join(_licences_of(name, packages))].append(name.partition("_")[0])
    return {names: sorted(set(packages)) for names, packages in sorted(found.items(), key=lambda item: min(item[1]))}


def _licences_of(name: str, packages: pathlib.Path) -> Sequence[str]:
    if name.endswith(".deb"):
        if (packages / name).is_file():
            return _of_debian_package(packages / name)
        raise UserError(f"--packages={packages}: {name} of the corpus is not there.")
    for wheel in sorted(packages.glob(f"{name.lower()}-*.whl")):
        with _readable(wheel), zipfile.ZipFile(wheel) as archive:
            metadata = next((member for member in archive.namelist() if member.endswith(".dist-info/METADATA")), None)
            if metadata is None:
                raise ValueError("it has no METADATA")
            directory = zipfile.Path(archive, metadata.removesuffix("METADATA"))
            return _of_distribution(importlib.metadata.PathDistribution(directory))
    for package in npm_packages.PACKAGES:
        if package.name == name:
            return _of_npm_package(packages / package.file_name)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return _of_distribution(importlib.metadata.distribution(name))
    return (f"those of {name}",)


def _of_debian_package(package: pathlib.Path) -> Sequence[str]:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as archive:
        extract = ["tar", "--extract", "--to-stdout", "--wildcards", "./usr/share/doc/*/copyright"]
        done = subprocess.run(extract, stdin=archive.stdout, capture_output=True, check=False)
    if archive.returncode:
        raise UserError(f"{package} cannot be read by dpkg-deb; delete it, and build the corpus again.")
    if not done.stdout:
        return (_NO_FILE,)
    names = collections.Counter(_LICENCE.findall(done.stdout.decode(errors="replace")))
    return sorted(licence for licence, _ in names.most_common(_MAX_LICENCES)) or (_SEE_FILE,)


def _of_npm_package(path: pathlib.Path) -> Sequence[str]:
    if not path.is_file():
        raise UserError(f"--packages={path.parent}: {path.name} of the corpus is not there.")
    with _readable(path), tarfile.open(path) as archive:
        manifest = archive.extractfile("package/package.json")
        if manifest is None:
            raise ValueError("package/package.json is no file")
        return (str(json.load(manifest).get("license", _NO_FILE)),)


@contextlib.contextmanager
def _readable(package: pathlib.Path) -> Iterator[None]:
    """Turns an error of reading a package into a UserError."""
    try:
        yield
    except (ValueError, KeyError, AttributeError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise UserError(f"{package} cannot be read ({reason}); delete it, and build the corpus again.") from None


def _of_distribution(distribution: importlib.metadata.Distribution) -> Sequence[str]:
    fields = distribution.metadata
    classifiers = [value.split(" :: ") for value in map(str, fields.get_all("Classifier", []))]
    expressions = [*map(str, fields.get_all("License-Expression", []))]
    return expressions or [parts[-1] for parts in classifiers if parts[0] == "License"] or (_SEE_FILE,)


def _events(directory: pathlib.Path) -> Iterator[tuple[int, float, str, float]]:
    """Yields (step, time in seconds, name, value) of each value that was reported."""
    lazy.import_tensorflow()  # imported by TensorBoard, it would print its messages
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.util import tensor_util

    for path in sorted(directory.glob("events.out.tfevents.*")):
        with open(path, "rb"):  # an OSError has one line; TensorFlow has errors of its own
            pass
        for event in event_file_loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                array = tensor_util.make_ndarray(value.tensor)
                if array.shape == () and array.dtype.kind == "f":  # no text or histogram of a callback
                    yield event.step, event.wall_time, value.tag, array.item()


def _read_scores(file: str) -> list[dict]:
    try:
        with open(file, encoding="utf-8") as opened:
            scores = [{name: score[name] for name in _FIELDS} for score in json.load(opened)["scores"]]
        for score in scores:
            _check_score(score)
        if len({score["language"] for score in scores}) < len(scores):
            raise ValueError("a language has two scores")
        return scores
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"--scores={file}: not a file of `eval --json` of a translation model ({error!r}).") from None


def _check_score(score: Mapping[str, Any]):
    """Raises ValueError for a field of another type, or a number that is not finite."""
    for name, kind in _FIELDS.items():
        value = score[name]
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not (isinstance(value, str) and value if kind is str else is_number and 0 <= value < _MOST):
            raise ValueError(f"{name} is {value!r}")


def _training(runs: list[TrainingRun]) -> Iterator[str]:
    steps, tokens, hours = (sum(getattr(run, name) for run in runs) for name in ("steps", "tokens", "hours"))
    yield f"""## Training

{steps:,} steps, {tokens / 1e6:.1f} million target tokens, {hours:.1f} hours. Held-out cross-entropy and source gain, in
nats per target token:
"""
    # Each run counts from 0, as new training does with --initial_weights.
    before = itertools.accumulate((run.steps for run in runs), initial=0)
    rows = [
        (f"{start + step:,}", f"{loss:.3f}", f"{gain:.3f}")
        for start, run in zip(before, runs)
        for step, loss, gain in run.losses
    ]
    yield markdown.table(("step", "cross-entropy", "source gain"), rows)


def _scores(files: list[list[dict]]) -> Iterator[str]:
    """Yields the scores by language, in the order of their training data, and the means."""
    order = {score["language"]: score["train_pairs"] for score in sorted(files[0], key=lambda s: -s["train_pairs"])}
    yield "\n## BLEU and chrF, of the model and of copying the source\n"
    yield "A mean is over the languages that have sentences to score, among those with most training pairs.\n"
    header = ["language", "training pairs"]
    header += [
        f"{title}: {name}"
        for title in _TITLES[: len(files)]
        for name in ("sentences", "BLEU", "copying", "chrF", "copying")
    ]
    by_language = [{score["language"]: score for score in scores} for scores in files]
    rows = [
        (language, f"{pairs:,}", *itertools.chain.from_iterable(_cells([f.get(language)]) for f in by_language))
        for language, pairs in order.items()
    ]
    for count in sorted({min(_HIGH_RESOURCE, len(order)), len(order)}):
        chosen = list(order)[:count]
        cells = (_cells([f[language] for language in chosen if language in f]) for f in by_language)
        rows.append((f"mean of the first {count}", "", *itertools.chain.from_iterable(cells)))
    yield markdown.table(header, rows)


def _cells(scores: Sequence[dict | None]) -> list[str]:
    """Returns the cells of a language, or of the mean of several; empty ones where nothing was scored."""
    present = [score for score in scores if score]
    if not present:
        return [""] * 5
    means = [sum(score[field] for score in present) / len(present) for field in _MEASURES]
    return [str(sum(score["test_pairs"] for score in present)), *(f"{mean:.1f}" for mean in means)]


def _licences(by_licence: Mapping[str, list[str]]) -> Iterator[str]:
    yield f"""
## Packages and licences

At most {_MAX_LICENCES} licences of a package, those that its copyright file names most often.
"""
    yield markdown.table(
        ("packages", "licences"), [(", ".join(packages), names) for names, packages in by_licence.items()]
    )


if __name__ == "__main__":
    app.run(main, FLAGS)
