"""Trains and compares the translation models of a study, each for the same CPU time: M4 in miniature (docs/study.md).

    python -m tools.study --corpus=DIR [--budget=60] [--only=RUN,...] [--plan=PLAN.toml] [--directory=build/study]
    python -m tools.study --results=docs/study/results.json --output=docs/study --page=docs/study.md

The first form trains, evaluates and draws; what is finished is not repeated, so the same command resumes after any
interruption. Started several times, for instance with `taskset` on one core each, it makes as many runs at once.
`--only` trains some of the runs; the report is of all that are finished. The second form redraws from the numbers of a
study.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.utils import file_lock, output_directories, output_files
from lingvo_moe.utils.exit_status import INTERRUPTED
from tools import markdown
from tools.report import style
from tools.study import charts, corpora, embeddings, plan, tables, trial
from tools.study.plan import Study
from tools.study.results import Results, collect
from tools.study.trial import CommandFailed, Data, Trial

FLAGS = flags.FlagValues()
flags.DEFINE_string("plan", None, "what to train and compare; default: m4.toml of tools/study", flag_values=FLAGS)
flags.DEFINE_string("corpus", None, "the directory of a corpus with the study's languages", flag_values=FLAGS)
flags.DEFINE_string("directory", "build/study", "directory of all files", flag_values=FLAGS)
flags.DEFINE_float(
    "budget", 60.0, "minutes of CPU time of each training, of all threads together", lower_bound=0.0, flag_values=FLAGS
)
flags.DEFINE_multi_string("set", [], "override FIELD=VALUE of all models", flag_values=FLAGS)
flags.DEFINE_list("only", [], "names of the runs to train, with commas; default: all of the plan", flag_values=FLAGS)
flags.DEFINE_string("results", None, "only draw the results.json of a study", flag_values=FLAGS)
flags.DEFINE_string(
    "output",
    None,
    "directory of figures, tables and numbers; default, without --results: `report` in --directory",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "page", None, "write the tables into this page, between its markers, instead of tables.md", flag_values=FLAGS
)

_PLAN = pathlib.Path(__file__).with_name("m4.toml")
_TOKENIZER_SENTENCES = 60_000
_ROUTED_SENTENCES = 20  # of each language, to see which experts take them
_MARKER = "study"  # of the generated part of --page


def main(arguments: list[str]) -> int:
    """Runs the study and draws it; returns the exit status, 1 if a run failed."""
    app.no_arguments(arguments[1:])
    output_directories.check_path("--directory", FLAGS.directory)
    output_directories.check_path("--output", FLAGS.output)
    if FLAGS.page:
        markdown.check("--page", FLAGS.page, _MARKER)  # reports a mistake before hours of training
    if FLAGS.results:
        if not FLAGS.output:
            raise UserError("--output is missing: with --results, the directory to write figures and tables to.")
        report(Results.load(pathlib.Path(FLAGS.results)))
        return 0
    if not FLAGS.corpus:
        raise UserError("--corpus is missing: the directory of a corpus with the study's languages.")
    if not FLAGS.budget or not math.isfinite(FLAGS.budget):
        raise UserError(f"--budget={FLAGS.budget:g}: expected minutes of CPU time above 0.")
    study, directory = plan.load(FLAGS.plan or _PLAN), pathlib.Path(FLAGS.directory)
    plan.check_names(study, FLAGS.only)
    trials = [Trial(study, run, directory / "runs" / run.name, FLAGS["set"].value or ()) for run in study.runs]
    for each in trials:
        each.experiment()  # reports a mistake, too
    selected = [each for each in trials if not FLAGS.only or each.run.name in FLAGS.only]
    corpus = Corpus.open_to_train(FLAGS.corpus)
    directory.mkdir(parents=True, exist_ok=True)
    with file_lock.locked(directory / "lock"):
        data, languages = prepare(study, corpus, directory)
        for each in selected:
            each.check_settings(data, _seconds(each))
        embeddings.make(selected, data)
    failed = []
    for each, lock in _in_turn(selected):
        print(f"\n== {1 + selected.index(each)}/{len(selected)} {each.run.name}", flush=True)
        try:
            each.complete(data, _seconds(each), functools.partial(trial.execute, inherited=[lock]))
        except CommandFailed as error:
            if error.status == INTERRUPTED:
                return error.status
            failed.append(f"{each.run.name} ({error})")
        report(collect(study, trials, FLAGS.budget, languages))
    if failed:
        print(f"Failed: {', '.join(failed)}. The same command tries these again.", file=sys.stderr)
    return 1 if failed else 0


def prepare(study: Study, corpus: Corpus, directory: pathlib.Path) -> tuple[Data, list[str]]:
    """Makes what all runs read but for initial embeddings, unless it is there.

    Returns:
      (the data, the language of each line of its sentences).
    """
    of_all = corpora.restrict(corpus, study.languages, directory / "corpus")
    limits = {run.language: {run.language: study.languages[run.language]} for run in study.baselines}
    single = {
        language: corpora.restrict(corpus, limit, directory / "corpora" / language).directory
        for language, limit in limits.items()
    }
    sizes = {tokenizer_trainer.SHARED: study.vocabulary}
    tokenizer_trainer.train(of_all, directory / "tokenizers", sizes, 5.0, _TOKENIZER_SENTENCES)
    samples = [
        (language, source)
        for language in sorted(study.languages)
        for source, _ in of_all.sample("test", language, _ROUTED_SENTENCES)
    ]
    sentences = directory / "sentences.txt"
    _write(sentences, "".join(f"{source}\n" for _, source in samples))
    training = {"": of_all.directory, **single}
    data = Data(of_all.directory, training, directory / "tokenizers", sentences, directory / "embeddings")
    return data, [language for language, _ in samples]


def report(results: Results):
    """Writes numbers, tables and figures of what is finished."""
    output = pathlib.Path(FLAGS.output or pathlib.Path(FLAGS.directory, "report"))
    output.mkdir(parents=True, exist_ok=True)
    results.save(output / "results.json")
    text = tables.text(results)
    drawn = charts.figures(results)
    for name, figure in drawn.items():
        _write(output / f"{name}.svg", style.svg(figure).decode())
    if FLAGS.page:
        page = pathlib.Path(FLAGS.page)
        links = [f"![{name}]({os.path.relpath(output / name, page.parent)}.svg)\n" for name in drawn]
        markdown.replace(page, _MARKER, "\n".join([text, "", *links]))
    else:
        _write(output / "tables.md", f"{text}\n")
    print(f"{output}: {len(results.runs)} runs, {len(results.missing)} missing", flush=True)


def _write(path: pathlib.Path, text: str):
    with output_files.atomic_writer(str(path)) as file:
        file.write(text)


def _seconds(each: Trial) -> float:
    """Returns the CPU time of a run."""
    return 60 * FLAGS.budget * each.run.share


def _in_turn(trials: Sequence[Trial]) -> Iterator[tuple[Trial, int]]:
    """Yields each run and a descriptor that holds it: first those that are in no other process, then the others.

    Commands inherit the descriptor: if this process is killed, the next one waits until its last command has ended.
    """
    elsewhere = []
    for each in trials:
        each.directory.mkdir(parents=True, exist_ok=True)
        try:
            with file_lock.locked(each.directory / "lock", waits=False) as lock:
                yield each, lock
        except BlockingIOError:
            elsewhere.append(each)
    for each in elsewhere:
        with file_lock.locked(each.directory / "lock") as lock:
            yield each, lock


if __name__ == "__main__":
    app.run(main, FLAGS)
