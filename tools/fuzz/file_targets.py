"""Strategies of cases that corrupt a copy of a valid input and call a program that reads it."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

from hypothesis import strategies as st

from lingvo_moe.testing import experiments as tiny
from tools.fuzz import mutations
from tools.fuzz.case import Case
from tools.fuzz.fixtures import STEPS, Fixtures
from tools.fuzz.flag_targets import CARD, NO_RESULTS

_TINY = tuple(tiny.settings())
# Training with no step left to do, not even from the older checkpoint, opens all its inputs and compiles nothing.
_TRAIN = ("train", *_TINY, "--platform=cpu", f"--steps={STEPS[0]}")
_DATA = ("--corpus=FIXTURES/corpus", "--tokenizers=FIXTURES/tokenizers")
_CHECKPOINT_CALLS = (
    ("verify",),
    ("inspect",),
    ("inspect", "--stats"),
    ("average", "--last=2", "--output=new"),
    ("average", f"--steps={STEPS[0]},{STEPS[1]}", "--output=new"),
    ("convert", "--output=new.safetensors"),
    ("convert", f"--step={STEPS[1]}", "--output=new.safetensors"),
    ("train",),
    ("verify",),
)
_STEP_NAMES = ("9", "08", "4.corrupt", "1e3", "-1", "²", "9" * 40, "9.orbax-checkpoint-tmp", "checkpoint", " 9")


@st.composite
def _corrupted(
    draw: st.DrawFn, fixtures: Fixtures, source: str, among: str = ""
) -> tuple[Callable[[pathlib.Path], None], str]:
    """Draws a function that copies `source` and corrupts one of its files, and the file's path in the copy."""
    origin = fixtures.directory / source
    files = sorted(path for path in (origin / among).rglob("*") if path.is_file()) if origin.is_dir() else [origin]
    relative = draw(st.sampled_from(files)).relative_to(fixtures.directory)
    corrupt = draw(mutations.corruptions(relative.suffix == ".json"))

    def prepare(directory: pathlib.Path):
        if origin.is_dir():
            shutil.copytree(origin, directory / source)
        else:
            shutil.copy(origin, directory / source)
        corrupt(directory / relative)

    return prepare, str(relative)


@st.composite
def corpus(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """A corpus with a corrupt file, given to training and to the tokenizer's training."""
    prepare, file = draw(_corrupted(fixtures, "corpus"))
    sizes = ("--source_vocabulary=400", "--target_vocabulary=150", "--max_sentences=500")
    calls = (
        ("train_tokenizer", ("--corpus=corpus", "--output=new", *sizes)),
        ("lingvo_moe", (*_TRAIN, "--corpus=corpus", _DATA[1], "--logdir=FIXTURES/log")),
    )
    return Case("corpora", *draw(st.sampled_from(calls)), (file, "corpus"), prepare)


@st.composite
def tokenizer(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """Tokenizers with a corrupt file."""
    prepare, file = draw(_corrupted(fixtures, "tokenizers"))
    arguments = (*_TRAIN, _DATA[0], "--tokenizers=tokenizers", "--logdir=FIXTURES/log")
    return Case("tokenizers", "lingvo_moe", arguments, (file, "tokenizer"), prepare)


@st.composite
def catalog(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """A corrupt catalog of any format."""
    prepare, file = draw(_corrupted(fixtures, "catalogs"))
    chosen = draw(st.sampled_from(("catalogs", file)))
    return Case(
        f"catalogs, {pathlib.Path(file).suffix}",
        "build_corpus",
        ("--preset=none", f"--input={chosen}", "--output=new"),
        (file, "--input", "nothing to build", "no training pair", "left to train on"),
        prepare,
    )


@st.composite
def checkpoint(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """A log directory with a corrupt file of any or of the newer checkpoint, given to every reader."""
    prepare, file = draw(_corrupted(fixtures, "log", draw(st.sampled_from(("", f"checkpoints/{STEPS[1]}")))))
    del file  # messages name the checkpoint
    action, *rest = draw(st.sampled_from(_CHECKPOINT_CALLS))
    call = (*_TRAIN, *_DATA) if action == "train" else ("checkpoint", action, *rest)
    return Case(
        f"checkpoints, {action}",
        "lingvo_moe",
        (*call, "--logdir=log"),
        ("checkpoint", "log"),
        prepare,
        summary_on_stdout=action == "verify",
    )


@st.composite
def step_directory(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """A foreign name below `checkpoints`, or a step under another number."""
    name = draw(st.sampled_from(_STEP_NAMES))
    content = draw(st.sampled_from(("empty", "file", "copy")))

    def prepare(directory: pathlib.Path):
        shutil.copytree(fixtures.directory / "log", directory / "log")
        path = directory / "log" / "checkpoints" / name
        if content == "copy":
            shutil.copytree(fixtures.directory / "log" / "checkpoints" / str(STEPS[1]), path)
        elif content == "file":
            path.write_text("not a checkpoint")
        else:
            path.mkdir()

    action = draw(st.sampled_from(("verify", "inspect")))
    arguments = ("checkpoint", action, "--logdir=log")
    named = ("checkpoint", "log")
    return Case("checkpoints, names", "lingvo_moe", arguments, named, prepare, summary_on_stdout=action == "verify")


@st.composite
def safetensors(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """A corrupt safetensors file."""
    prepare, file = draw(_corrupted(fixtures, "weights.safetensors"))
    sets = tuple(argument for argument in _TINY if not argument.startswith("--devices"))
    call = ("checkpoint", "convert", f"--input={file}", "--logdir=new", *sets)
    return Case("safetensors", "lingvo_moe", call, (file,), prepare)


@st.composite
def program(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """A corrupt program bundle."""
    prepare, file = draw(_corrupted(fixtures, "program.zip"))
    return Case("programs", "load_program", (file,), (file,), prepare)


@st.composite
def plan(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """Plans, one of them corrupt, given to the report."""
    prepare, file = draw(_corrupted(fixtures, "plans"))
    arguments = ("--plans=plans", *NO_RESULTS, "--output=new.html")
    return Case("plans", "report", arguments, (file, "--plans"), prepare)


@st.composite
def results(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """Results of other tools, corrupt, given to the report."""
    name = draw(st.sampled_from(("layer_pairs", "collective_times", "layout_searches")))
    prepare, file = draw(_corrupted(fixtures, f"{name}.json"))
    arguments = ("--plans=FIXTURES/plans", *NO_RESULTS, f"--{name}={file}", "--output=new.html")
    return Case("results", "report", arguments, (file,), prepare)


@st.composite
def ranking(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """Corrupt results of compiled layouts."""
    prepare, file = draw(_corrupted(fixtures, "ranking.json"))
    return Case("results", "read_ranking", (file,), (file, "--topology"), prepare)


@st.composite
def card(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """Corrupt scores or curves, given to the model's card."""
    prepare, file = draw(_corrupted(fixtures, "card"))
    arguments = (argument.replace("FIXTURES/card", "card") for argument in CARD)
    return Case("cards", "model_card", (*arguments, "--output=new.md"), (file, "--logdir"), prepare)


@st.composite
def package(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """A file that is not a Debian package."""
    del fixtures
    content = draw(mutations.byte_edits())(b"!<arch>\ndebian-binary   ")

    def prepare(directory: pathlib.Path):
        (directory / "package.deb").write_bytes(content)

    return Case("packages", "read_package", ("package.deb",), ("package.deb",), prepare)


@st.composite
def sentences(draw: st.DrawFn, fixtures: Fixtures) -> Case:
    """Corrupt lines to translate; the checkpoint is of another model, which is reported after they are read."""
    prepare, file = draw(_corrupted(fixtures, "sentences.txt"))
    arguments = ("translate", *_TINY, _DATA[1], "--platform=cpu", "--logdir=FIXTURES/other", "--output=new.txt")
    named = (file, "--input", "weights are not those")
    if draw(st.booleans()):
        return Case("sentences", "lingvo_moe", (*arguments, f"--input={file}"), named, prepare)
    data = draw(mutations.byte_edits())((fixtures.directory / file).read_bytes())
    return Case("sentences", "lingvo_moe", arguments, named, input=data)


# How often each is drawn.
TARGETS: dict[Callable[[Fixtures], st.SearchStrategy[Case]], int] = {
    corpus: 10,
    tokenizer: 6,
    catalog: 14,
    checkpoint: 14,
    step_directory: 3,
    safetensors: 6,
    program: 5,
    plan: 5,
    results: 5,
    ranking: 2,
    card: 4,
    package: 1,
    sentences: 3,
}
