"""Cases of the files: a copy of a sound input is damaged, and whatever reads it is called."""

from __future__ import annotations

import pathlib
import random
import shutil
from collections.abc import Callable

from lingvo_moe.testing import experiments as tiny
from tools.fuzz import mutations
from tools.fuzz.case import Case
from tools.fuzz.fixtures import STEPS, Fixtures

_TINY = tuple(tiny.settings())
# Training that has nothing left to do, not even from the older checkpoint, opens all its inputs and compiles nothing.
_TRAIN = ("train", *_TINY, "--platform=cpu", f"--steps={STEPS[0]}")


def _damaged(
    world: Fixtures, source: str, generator: random.Random, among: str = ""
) -> tuple[Callable[[pathlib.Path], None], str]:
    """Returns what copies `source` and damages one of its files, and the file's path there."""
    origin = world.directory / source
    file = origin if origin.is_file() else mutations.any_file(origin / among, generator)
    relative = file.relative_to(world.directory)
    seed = generator.random()

    def prepare(directory: pathlib.Path):
        shutil.copytree(origin, directory / source) if origin.is_dir() else shutil.copy(origin, directory / source)
        mutations.damage(directory / relative, random.Random(seed))

    return prepare, str(relative)


def corpus(world: Fixtures, generator: random.Random) -> Case:
    """A corpus of which a file is damaged, given to what reads one."""
    prepare, file = _damaged(world, "corpus", generator)
    call = generator.choice(
        [
            (
                "train_tokenizer",
                (
                    "--corpus=corpus",
                    "--output=new",
                    "--source_vocabulary=400",
                    "--target_vocabulary=150",
                    "--max_sentences=500",
                ),
            ),
            ("lingvo_moe", (*_TRAIN, "--corpus=corpus", "--tokenizers=WORLD/tokenizers", "--logdir=WORLD/log")),
        ]
    )
    return Case("corpora", *call, (file, "corpus"), prepare)


def tokenizer(world: Fixtures, generator: random.Random) -> Case:
    """Tokenizers of which a file is damaged."""
    prepare, file = _damaged(world, "tokenizers", generator)
    arguments = (*_TRAIN, "--corpus=WORLD/corpus", "--tokenizers=tokenizers", "--logdir=WORLD/log")
    return Case("tokenizers", "lingvo_moe", arguments, (file, "tokenizer"), prepare)


def catalog(world: Fixtures, generator: random.Random) -> Case:
    """A catalog that is damaged, of any format."""
    prepare, file = _damaged(world, "catalogs", generator)
    chosen = generator.choice(["catalogs", file])
    return Case(
        f"catalogs, {file[file.rindex('.') :]}",
        "build_corpus",
        ("--preset=none", f"--input={chosen}", "--output=new"),
        (file, "--input", "nothing to build", "no training pair", "left to train on"),
        prepare,
    )


def checkpoint(world: Fixtures, generator: random.Random) -> Case:
    """A log directory of which a file of the newer checkpoint is damaged, or of both, given to every reader."""
    prepare, file = _damaged(world, "log", generator, among=generator.choice(["", f"checkpoints/{STEPS[1]}"]))
    action, *rest = generator.choice(
        [
            ("verify",),
            ("verify",),
            ("inspect",),
            ("inspect", "--stats"),
            ("average", "--last=2", "--output=new"),
            ("average", f"--steps={STEPS[0]},{STEPS[1]}", "--output=new"),
            ("convert", "--output=new.safetensors"),
            ("convert", f"--step={STEPS[1]}", "--output=new.safetensors"),
            ("train",),
        ]
    )
    call = ("checkpoint", action, *rest)
    if action == "train":
        call = (*_TRAIN, "--corpus=WORLD/corpus", "--tokenizers=WORLD/tokenizers")
    return Case(
        f"checkpoints, {action}",
        "lingvo_moe",
        (*call, "--logdir=log"),
        ("checkpoint", "log"),
        prepare,
        tells_on_stdout=action == "verify",
    )


def step_directory(world: Fixtures, generator: random.Random) -> Case:
    """Names below `checkpoints` that are none of ours, or a step that stands under another number."""
    name = generator.choice(
        ["9", "08", "4.damaged", "1e3", "-1", "²", "9" * 40, "9.orbax-checkpoint-tmp", "checkpoint", " 9"]
    )
    content = generator.choice(["empty", "file", "copy"])

    def prepare(directory: pathlib.Path):
        shutil.copytree(world.directory / "log", directory / "log")
        place = directory / "log" / "checkpoints" / name
        if content == "copy":
            shutil.copytree(world.directory / "log" / "checkpoints" / str(STEPS[1]), place)
        elif content == "file":
            place.write_text("not a checkpoint")
        else:
            place.mkdir()

    action = generator.choice(["verify", "inspect"])
    return Case(
        "checkpoints, names",
        "lingvo_moe",
        ("checkpoint", action, "--logdir=log"),
        ("checkpoint", "log"),
        prepare,
        tells_on_stdout=action == "verify",
    )


def safetensors(world: Fixtures, generator: random.Random) -> Case:
    """A safetensors file that is damaged."""
    prepare, file = _damaged(world, "weights.safetensors", generator)
    sets = tuple(argument for argument in _TINY if not argument.startswith("--devices"))
    call = ("checkpoint", "convert", f"--input={file}", "--logdir=new", *sets)
    return Case("safetensors", "lingvo_moe", call, (file,), prepare)


def program(world: Fixtures, generator: random.Random) -> Case:
    """A bundle that is damaged."""
    prepare, file = _damaged(world, "program.zip", generator)
    return Case("programs", "load_program", (file,), (file,), prepare)


def plan(world: Fixtures, generator: random.Random) -> Case:
    """Plans of which one is damaged, made a report of."""
    prepare, file = _damaged(world, "plans", generator)
    return Case("plans", "report", ("--plans=plans", "--output=new.html"), (file, "--plans"), prepare)


def package(world: Fixtures, generator: random.Random) -> Case:
    """A Debian package that is none."""
    content = mutations.BYTES[-2](b"!<arch>\ndebian-binary   ", generator)
    return Case(
        "packages",
        "read_package",
        ("package.deb",),
        ("package.deb",),
        lambda directory: (directory / "package.deb").write_bytes(content) and None,
    )


def sentences(world: Fixtures, generator: random.Random) -> Case:
    """Lines to translate that are damaged; the checkpoint is that of another model, which is told after them."""
    prepare, file = _damaged(world, "sentences.txt", generator)
    arguments = (
        "translate",
        *_TINY,
        "--tokenizers=WORLD/tokenizers",
        "--platform=cpu",
        "--logdir=WORLD/other",
        "--output=new.txt",
    )
    about = (file, "--input", "weights are not those")
    if generator.random() < 0.5:
        return Case("sentences", "lingvo_moe", (*arguments, f"--input={file}"), about, prepare)
    data = generator.choice(mutations.BYTES)((world.directory / file).read_bytes(), generator)
    return Case("sentences", "lingvo_moe", arguments, about, input=data)
