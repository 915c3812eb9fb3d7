"""From nothing to translations in one go: corpora, tokenizer, training, BLEU, a few translated sentences.

    python -m tools.quickstart [--model=NAME] [--languages=es,it,...] [--directory=build/quickstart]

Each stage is a public command, printed before it runs. An interrupted run resumes: corpora, tokenizer, embeddings and
training that are finished are not made again; the evaluations and the translation are. The model is tested twice: on
sentences held out of its corpus, and on the texts of packages that its corpus does not have.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time

from absl import flags

from lingvo_moe import experiment
from lingvo_moe.cli import app
from lingvo_moe.data.corpora import corpus_builder, splitting
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.languages import check_selected
from lingvo_moe.errors import UserError
from lingvo_moe.models.translation import Translation
from lingvo_moe.utils import output_files, processor

_MOST = 2**31 - 1  # programs count in int32
_VALUES = flags.FlagValues()
flags.DEFINE_string(
    "model",
    None,
    "the registered model to train; by default m4.Quickstart on a processor with fast matmuls in bfloat16 "
    "(AMX, or AMD's AVX512-BF16), on others with AVX512-BF16 m4.QuickstartMedium, with fewer steps, and elsewhere "
    "m4.QuickstartShort, with fewer still",
    flag_values=_VALUES,
)
flags.DEFINE_string("preset", "debian_more", "preset of tools.build_corpus to train on", flag_values=_VALUES)
flags.DEFINE_string("unseen", "unseen", "preset of tools.build_corpus to test on", flag_values=_VALUES)
flags.DEFINE_list(
    "languages",
    ["es", "pt_BR", "it"],
    "the languages to translate from; none for all that the preset has",
    flag_values=_VALUES,
)
flags.DEFINE_string("directory", "build/quickstart", "directory of all files", flag_values=_VALUES)
flags.DEFINE_integer(
    "steps",
    None,
    "train to this step, instead of the model's own number",
    lower_bound=1,
    upper_bound=_MOST,
    flag_values=_VALUES,
)
flags.DEFINE_integer(
    "seed",
    0,
    "seed of the initial weights and of the order of the training data",
    lower_bound=0,
    upper_bound=_MOST,
    flag_values=_VALUES,
)
flags.DEFINE_integer(
    "max_pairs", 100, "test sentences translated per language, at most", lower_bound=1, flag_values=_VALUES
)

_USAGE = 2  # the status of a stage that reports a mistake
_USAGE_REMEDY = "The quickstart has no --force or --output: where the error asks for one, name another --directory."
_SETTINGS = "settings.json"  # of the training, which no stage compares
_TOKENIZER_SENTENCES = 60_000  # half a minute
_NUM_SAMPLES = 4  # of each of the two corpora
_SAMPLE_LENGTH = 80  # characters: a line of the screen


def main(arguments: list[str]):
    """Runs all stages and shows the result."""
    app.no_arguments(arguments[1:])
    start = time.monotonic()
    name = _VALUES.model or _model_of_processor()
    configured = experiment.get(name).model
    if not isinstance(configured, Translation):
        raise UserError(f"--model={name} does not translate; name a translation model, such as m4.Quickstart.")
    _check_data()
    directory = pathlib.Path(_VALUES.directory)
    settings = {"model": name, "seed": _VALUES.seed}
    _check_settings(directory, settings)
    corpus, unseen, tokenizers = (directory / part for part in ("corpus", "unseen", "tokenizers"))
    logdir = directory / "log"
    _make_data(configured, corpus, unseen, tokenizers)
    model = (f"--model={name}", f"--logdir={logdir}", f"--tokenizers={tokenizers}")
    embeddings = _embeddings(configured, directory, corpus, tokenizers)
    with output_files.atomic_writer(str(directory / _SETTINGS)) as file:
        json.dump(settings, file)
    _stage("5/7 training", "lingvo_moe", "train", *model, f"--corpus={corpus}", *embeddings, *_training_flags())
    tested_on = {"its own packages": corpus, "packages it has not seen": unseen}
    _evaluate(tested_on, directory, model)
    _translate_samples(tested_on, directory, model)
    print(
        f"\nDone in {(time.monotonic() - start) / 60:.1f} minutes. {_result(directory)}\n"
        f"Curves: {_python()} -m tensorboard.main --logdir={logdir}\nYour own sentences: "
        f"echo 'El archivo no se pudo abrir.' | {_python()} -m lingvo_moe translate {' '.join(model)}"
    )


def _model_of_processor() -> str:
    """Returns the registered name of the model whose steps take some 15 minutes at most."""
    if processor.multiplies_bfloat16():
        return "m4.Quickstart"
    return "m4.QuickstartMedium" if processor.has_avx512_bf16() else "m4.QuickstartShort"


def _make_data(configured: Translation, corpus: pathlib.Path, unseen: pathlib.Path, tokenizers: pathlib.Path):
    """Runs the stages before training, but for the embeddings: two corpora, and the tokenizers of the first."""
    languages = [f"--languages={','.join(_VALUES.languages)}"] if _VALUES.languages else []
    _stage("1/7 corpus", "tools.build_corpus", f"--preset={_VALUES.preset}", *languages, f"--output={corpus}")
    _stage(
        "2/7 corpus of unseen packages, to test with",
        "tools.build_corpus",
        f"--preset={_VALUES.unseen}",
        f"--unseen_by={corpus}",
        *languages,
        f"--output={unseen}",
    )
    _stage(
        "3/7 tokenizer",
        "tools.train_tokenizer",
        f"--corpus={corpus}",
        f"--output={tokenizers}",
        *_vocabularies(configured),
        f"--max_sentences={_TOKENIZER_SENTENCES}",
    )


def _evaluate(tested_on: dict[str, pathlib.Path], directory: pathlib.Path, model: tuple[str, ...]):
    """Scores the model on each corpus, by what its sentences are of; writes a file of scores for each."""
    for title, tested in tested_on.items():
        _stage(
            f"6/7 evaluation, on sentences of {title}",
            "lingvo_moe",
            "eval",
            *model,
            f"--corpus={tested}",
            f"--max_pairs={_VALUES.max_pairs}",
            f"--json={directory / f'scores_{tested.name}.json'}",
        )


def _check_data():
    """Raises UserError for a preset or language that the stages would refuse, some of them after minutes."""
    for flag, preset in (("--preset", _VALUES.preset), ("--unseen", _VALUES.unseen)):
        corpus_builder.check_preset(flag, preset)
    check_selected(_VALUES.languages, "--languages")


def _check_settings(directory: pathlib.Path, settings: dict[str, str | int]):
    """Raises UserError if the directory has a training with other settings, whose checkpoints would be taken."""
    file = directory / _SETTINGS
    if not file.exists():
        return
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise UserError(f"{file}: corrupt; expected the quickstart's settings. Name another --directory.") from None
    for flag, value in settings.items():
        if before.get(flag) != value:
            raise UserError(
                f"--{flag}={value}: --directory={directory} has a training with --{flag}={before.get(flag)}. Name "
                f"another --directory."
            )


def _vocabularies(model: Translation) -> list[str]:
    """Returns the sizes of the tokenizers; there is one for both sides if the model has one table for both."""
    if len(set(model.tied_tables.values())) == 1:
        return [f"--shared_vocabulary={model.source_vocabulary}"]
    return ["--align_pieces", *(f"--{side}_vocabulary={size}" for side, size in model.vocabularies.items())]


def _embeddings(
    model: Translation, directory: pathlib.Path, corpus: pathlib.Path, tokenizers: pathlib.Path
) -> list[str]:
    """Makes the initial embeddings of a model with tied ones; returns the flags that pass them to its training."""
    if not model.tied_tables:
        return []
    file = directory / "embeddings.safetensors"
    _stage(
        "4/7 initial embeddings",
        "tools.train_embeddings",
        f"--corpus={corpus}",
        f"--tokenizers={tokenizers}",
        f"--model_dim={model.model_dim}",
        f"--output={file}",
    )
    return [f"--initial_embeddings={file}"]


def _training_flags() -> list[str]:
    steps = [] if _VALUES.steps is None else [f"--steps={_VALUES.steps}"]
    return [*steps, f"--set=training.seed={_VALUES.seed}", f"--set=input.seed={_VALUES.seed}"]


def _stage(title: str, module: str, *arguments: str):
    """Runs one command with our standard streams; if it fails, exits with its status."""
    command = [sys.executable, "-m", module, *arguments]
    print(f"\n== {title}\n$ {_python()} {shlex.join(command[1:])}", flush=True)
    if status := _run(command):
        print(_USAGE_REMEDY if status == _USAGE else "Run the same command again to resume from here.", file=sys.stderr)
        sys.exit(status if status > 0 else 128 - status)


def _run(command: list[str]) -> int:
    """Runs a command to its end; returns its exit status, or that of an interruption if it ended well after a signal.

    Training saves a checkpoint before it ends, so it must not be killed: Ctrl-C reaches the command as well, and
    SIGTERM is passed on.
    """
    received: list[int] = []
    running: subprocess.Popen | None = None

    def note(number, frame):
        received.append(number)
        if running is not None and number == signal.SIGTERM:
            running.send_signal(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        running = subprocess.Popen(command)
        if received:  # before there was a process
            running.send_signal(received[-1])
        return running.wait() or (app.INTERRUPTED if received else 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _translate_samples(tested_on: dict[str, pathlib.Path], directory: pathlib.Path, model: tuple[str, ...]):
    """Translates and prints some test sentences of each corpus in `tested_on`, which has the title of each."""
    samples = [(title, *sample) for title, tested in tested_on.items() for sample in _samples(Corpus.open(tested))]
    source, output = directory / "samples.txt", directory / "samples.en.txt"
    source.write_text("".join(f"{sentence}\n" for _, _, sentence, _ in samples), encoding="utf-8")
    _stage("7/7 a few of those sentences", "lingvo_moe", "translate", *model, f"--input={source}", f"--output={output}")
    shown = ""
    for (title, language, sentence, reference), line in zip(samples, output.read_text(encoding="utf-8").split("\n")):
        print("" if title == shown else f"\nOf {title}:\n")
        print(f"{language:11}{sentence}\n{'ours':11}{line}\n{'reference':11}{reference}")
        shown = title


def _samples(corpus: Corpus) -> list[tuple[str, str, str]]:
    """Returns (language, sentence, English) of test pairs: the languages in turn, those of the least hashes first.

    So nobody chooses them, and they change only with the corpus. A sample fits a line of the screen, and its English
    is new.
    """
    by_language = [
        sorted(
            ((language, *pair) for pair in corpus.pairs("test", language) if len(pair[0]) <= _SAMPLE_LENGTH),
            key=lambda sample: splitting.hash_fraction("\t".join(sample)),
        )
        for language in corpus.languages_of("test")
    ]
    chosen: dict[str, tuple[str, str, str]] = {}
    for sample in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_language))):
        if len(chosen) < _NUM_SAMPLES:
            chosen.setdefault(sample[2], sample)
    return list(chosen.values())


def _result(directory: pathlib.Path) -> str:
    """Returns the mean BLEU of both corpora, beside that of copying the source."""
    texts = []
    for name in ("corpus", "unseen"):
        scores = json.loads((directory / f"scores_{name}.json").read_text(encoding="utf-8"))["scores"]
        bleu, copying = (sum(score[field] for score in scores) / len(scores) for field in ("bleu", "copy_bleu"))
        texts.append(f"{bleu:.1f} ({copying:.1f})")
    return f"Mean BLEU (copying the source): own packages {texts[0]}, unseen packages {texts[1]}."


def _python() -> str:
    """Returns the interpreter's path, relative to the working directory if it is below it."""
    path = pathlib.Path(sys.executable)
    return str(path.relative_to(pathlib.Path.cwd())) if path.is_relative_to(pathlib.Path.cwd()) else str(path)


if __name__ == "__main__":
    app.run(main, _VALUES)
