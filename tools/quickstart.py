"""From nothing to translations in one go: corpus, tokenizers, training, BLEU, a few held-out sentences.

    python -m tools.quickstart [--model=m4.Quickstart] [--preset=quickstart] [--directory=build/quickstart]

Each stage is a public command, printed before it runs. A finished stage is skipped, so an interrupted run resumes.
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
from collections.abc import Sequence

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus

_VALUES = flags.FlagValues()
flags.DEFINE_string("model", "m4.Quickstart", "the registered model to train", flag_values=_VALUES)
flags.DEFINE_string("preset", "quickstart", "preset of tools.build_corpus", flag_values=_VALUES)
flags.DEFINE_string("directory", "build/quickstart", "directory of all files", flag_values=_VALUES)
flags.DEFINE_integer("source_vocabulary", 8000, "vocabulary size of the source tokenizer", flag_values=_VALUES)
flags.DEFINE_integer("target_vocabulary", 4000, "vocabulary size of the target tokenizer", flag_values=_VALUES)
flags.DEFINE_integer("steps", None, "train to this step, instead of the model's own number", flag_values=_VALUES)
flags.DEFINE_integer("max_pairs", 20, "held-out sentences translated per language, at most", flag_values=_VALUES)
flags.DEFINE_list(
    "sample_languages",
    ["de", "fr", "pl", "tr", "ja", "ar", "sw", "cy"],
    "languages of the samples shown at the end",
    flag_values=_VALUES,
)


def main(arguments: list[str]):
    """Runs all stages and shows the result."""
    app.no_arguments(arguments[1:])
    start = time.monotonic()
    directory = pathlib.Path(_VALUES.directory)
    corpus, tokenizers, logdir = directory / "corpus", directory / "tokenizers", directory / "log"
    _stage("1/5 corpus", "tools.build_corpus", f"--preset={_VALUES.preset}", f"--output={corpus}")
    _stage(
        "2/5 tokenizers",
        "tools.train_tokenizer",
        f"--corpus={corpus}",
        f"--output={tokenizers}",
        f"--source_vocabulary={_VALUES.source_vocabulary}",
        f"--target_vocabulary={_VALUES.target_vocabulary}",
    )
    model = (f"--model={_VALUES.model}", f"--logdir={logdir}", f"--tokenizers={tokenizers}")
    steps = () if _VALUES.steps is None else (f"--steps={_VALUES.steps}",)
    _stage("3/5 training", "lingvo_moe", "train", *model, f"--corpus={corpus}", *steps)
    _stage(
        "4/5 evaluation, on sentences the model has not seen",
        "lingvo_moe",
        "eval",
        *model,
        f"--corpus={corpus}",
        f"--max_pairs={_VALUES.max_pairs}",
        "--summary",
        f"--json={directory / 'scores.json'}",
    )
    _translate_samples(corpus, directory, model)
    scores = json.loads((directory / "scores.json").read_text(encoding="utf-8"))["scores"]
    print(
        f"\nDone in {(time.monotonic() - start) / 60:.1f} minutes. BLEU of each of the {len(scores)} languages: "
        f"{directory / 'scores.json'}\nCurves: {_python()} -m tensorboard.main --logdir={logdir}\nYour own sentences: "
        f"echo 'Bitte geben Sie einen Namen ein.' | {_python()} -m lingvo_moe translate {' '.join(model)}"
    )


def _stage(title: str, module: str, *arguments: str):
    """Runs one command with our standard streams; if it fails, exits with its status."""
    command = [sys.executable, "-m", module, *arguments]
    print(f"\n== {title}\n$ {_python()} {shlex.join(command[1:])}", flush=True)
    # Ctrl-C reaches the command as well, which saves a checkpoint before it ends; it must not be killed.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        status = subprocess.run(command, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    if status:
        print("Run the same command again to resume from here.", file=sys.stderr)
        sys.exit(status if status > 0 else 128 - status)


def _translate_samples(corpus_directory: pathlib.Path, directory: pathlib.Path, model: tuple[str, ...]):
    pairs = _samples(Corpus.open(corpus_directory), _VALUES.sample_languages)
    if not pairs:
        print(
            f"\nThe corpus has no held-out sentence in any of --sample_languages={','.join(_VALUES.sample_languages)}."
        )
        return
    source, output = directory / "samples.txt", directory / "samples.en.txt"
    source.write_text("".join(f"{sentence}\n" for _, sentence, _ in pairs), encoding="utf-8")
    _stage("5/5 a few held-out sentences", "lingvo_moe", "translate", *model, f"--input={source}", f"--output={output}")
    for (language, sentence, reference), line in zip(pairs, output.read_text(encoding="utf-8").split("\n")):
        print(f"\n{language:11}{sentence}\n{'ours':11}{line}\n{'reference':11}{reference}")


def _samples(corpus: Corpus, languages: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns (language, sentence, English) of one held-out pair of each language.

    It is the first that fits a line of the screen and whose English is new: otherwise the first sentence of one catalog
    would be shown in every language.
    """
    found: list[tuple[str, str, str]] = []
    for language in languages:
        if language in corpus.languages_of("test"):
            shown = {english for *_, english in found}
            fitting = (pair for pair in corpus.pairs("test", language) if len(pair[0]) <= 80 and pair[1] not in shown)
            found.extend((language, *pair) for pair in itertools.islice(fitting, 1))
    return found


def _python() -> str:
    """Returns the interpreter's path, relative to the working directory if it is below it."""
    path = pathlib.Path(sys.executable)
    return str(path.relative_to(pathlib.Path.cwd())) if path.is_relative_to(pathlib.Path.cwd()) else str(path)


if __name__ == "__main__":
    app.run(main, _VALUES)
