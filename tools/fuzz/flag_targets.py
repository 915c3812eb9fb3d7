"""Cases of the command lines: every flag of every command with values that it may not expect, assignments and imports."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator

from absl import flags

from lingvo_moe import overrides
from lingvo_moe.cli import main, run_config
from lingvo_moe.experiment import get
from lingvo_moe.testing import experiments as tiny
from tools.fuzz import runner
from tools.fuzz.case import Case

_TINY = tuple(tiny.settings())
_DATA = ("--corpus=WORLD/corpus", "--tokenizers=WORLD/tokenizers", "--platform=cpu")
# Calls that end with a known mistake, as late as possible and before anything is compiled; and a word of its message. What is
# added to one ends either there or with a message about what was added. A command that is not here is called with --model.
_SMALL = ("--source_vocabulary=400", "--target_vocabulary=150", "--max_sentences=500")
_OTHER = (*_TINY, *_DATA, "--logdir=WORLD/other")
_CALLS = {
    "list": ((), ""),
    "show": (("Quickstart",), ""),
    "train": (_OTHER, "weights are not those"),
    "eval": (_OTHER, "weights are not those"),
    "diagnose": (_OTHER, "weights are not those"),
    "translate": (
        (
            *_TINY,
            "--tokenizers=WORLD/tokenizers",
            "--platform=cpu",
            "--logdir=WORLD/other",
            "--input=WORLD/sentences.txt",
        ),
        "weights are not those",
    ),
    "plan": (("--model=m4.Small", "--topology=v3:2x2x1", "--mesh=3"), "mesh"),
    "checkpoint": (("inspect", "--logdir=WORLD/log", "--step=5"), "--step=5"),
    "export": ((*_TINY, "--output=new.zip", "--set=model.num_experts=7"), "num_experts"),
    "build_corpus": (("--preset=none", "--input=WORLD/sentences.txt", "--output=new"), "sentences.txt"),
    "train_tokenizer": (("--corpus=WORLD/catalogs", "--output=new"), "is not a corpus"),
    "report": (("--plans=WORLD/catalogs", "--output=new.html"), "catalogs"),
    "launch_tpu": (("--dry_run", "--slice=s", "--zone=z"), "no --model"),
    "benchmarks": (("--only=nothing",), "there is no such row"),
    "benchmarks.beams": (("--beams=0",), "--beams=0"),
    "gpu_bench.make": (("--model=dense_lm.Small", "--directory=new"), "does not translate"),
    "launch_processes": ((), "no --model"),
    "tpu_graph": (("--only=nothing",), "--only=nothing"),
}
# Calls that would succeed, for flags that others do not come to.
_WORKING = {
    ("train", "logdir"): (*_TINY, *_DATA, "--steps=1"),
    ("export", "output"): _TINY,
    ("export", "program"): (*_TINY, "--output=new.zip"),
    ("checkpoint", "last"): ("average", "--logdir=WORLD/log", "--output=new"),
    ("checkpoint", "steps"): ("average", "--logdir=WORLD/log", "--output=new"),
    ("checkpoint", "output"): ("average", "--logdir=WORLD/log", "--last=2"),
    ("checkpoint", "input"): ("convert", "--logdir=new", *_TINY[:1], *_TINY[2:]),
    ("checkpoint", "model"): ("convert", "--logdir=new", "--input=WORLD/weights.safetensors", *_TINY[2:]),
    ("checkpoint", "set"): ("convert", "--logdir=new", "--input=WORLD/weights.safetensors", *_TINY[:1], *_TINY[2:]),
    ("checkpoint", "step"): ("convert", "--logdir=WORLD/log", "--output=new.safetensors"),
    ("checkpoint", "logdir"): ("verify",),
    ("checkpoint", "grep"): ("inspect", "--logdir=WORLD/log"),
    ("checkpoint", "stats"): ("inspect", "--logdir=WORLD/log"),
    ("build_corpus", "output"): ("--preset=none", "--input=WORLD/catalogs"),
    ("build_corpus", "force"): ("--preset=none", "--input=WORLD/catalogs", "--output=new"),
    ("train_tokenizer", "output"): ("--corpus=WORLD/corpus", *_SMALL),
    **{
        ("train_tokenizer", flag): ("--corpus=WORLD/corpus", "--output=new", *_SMALL)
        for flag in ("source_vocabulary", "target_vocabulary", "temperature", "max_sentences", "force")
    },
    ("report", "output"): ("--plans=WORLD/plans",),
}
# What would start work that nobody waits for, or that leaves this machine.
_LEFT_OUT = {
    ("launch_tpu", "dry_run"),
    ("checkpoint", "import"),
    ("tpu_graph", "only"),
    ("benchmarks", "only"),
    ("benchmarks.beams", "beams"),
}
# Values that mean something there: the whole machine's files.
_TOO_MUCH = {"input": ("/", ".."), "cache": ("/",), "logdir": ("/",)}
VALUES = (
    "",
    " ",
    "0",
    "-1",
    "1",
    "7",
    "3.5",
    "1e999",
    "nan",
    "99999999999999999999",
    "-99999999999999999999",
    "x",
    "true",
    "None",
    "ünïcödé✓",
    "\u202eright to left",
    "nul\0nul",
    "two\nlines",
    "\udcff",
    "..",
    ".",
    "/",
    "/dev/null",
    "/dev/null/x",
    "missing/x",
    "%s%n",
    "[red]",
    "--x",
    "-",
    "=",
    ",",
    "1,2",
    ",,",
    "0x0",
    "1x1x1x1",
    "4x-2",
    "'",
    "a" * 300,
    "a" * 5000,
    "file.txt",
    "directory",
    "link",
    "/proc/self/mem",
)
_ONLY_WRONG = ("operator_table", "plan_zoo", "quickstart", "write_golden")
_MODULES = {
    "syntax.py": b"class Broken(:\n",
    "raises.py": b"raise RuntimeError('boom')\n",
    "exits.py": b"import sys\nsys.exit(3)\n",
    "bytes.py": bytes(range(256)),
    "nul.py": b"\0\0",
    "latin.py": "# -*- coding: latin-1\nx = '\xe9'\n".encode("latin-1"),
    "imports.py": b"import no_such_module_at_all\n",
    "deep.py": b"x = " + b"(" * 5000,
    "recursion.py": b"def f(): f()\nf()\n",
    "twice.py": b"import params.m4\nfrom lingvo_moe import registry\nclass C: pass\nC.__module__ = 'x.m4'\n"
    b"C.__name__ = 'Quickstart'\nregistry.register(C)\n",
    "empty.py": b"",
    "interrupt.py": b"raise SystemExit\n",
    "module.txt": b"x = 1\n",
}


def flag(generator: random.Random) -> Case:
    """A flag of a command or tool, with one of VALUES."""
    name = generator.choice([*main.COMMANDS, *(name for name in _CALLS if name not in main.COMMANDS)])
    is_command = name in main.COMMANDS
    base, usual = _CALLS.get(name, (("--model=m4.Quickstart",), ""))
    known = [
        flag for flag in (_flags_of(name) if is_command else runner.flags_of(name)) if (name, flag) not in _LEFT_OUT
    ]
    chosen = generator.choice(sorted(set(known) - {"help"}))
    value = generator.choice([value for value in VALUES if value not in _TOO_MUCH.get(chosen, ())])
    arguments = (*_WORKING.get((name, chosen), base), f"--{chosen}={value}")
    about = (chosen, usual, value.strip()[:100].encode("utf-8", "backslashreplace").decode())
    return Case(
        f"flags of {name}",
        "lingvo_moe" if is_command else name,
        ((name,) if is_command else ()) + arguments,
        about,
        _put_places,
        writes=(value,) if chosen == "output" else (),
    )


def malformed(generator: random.Random) -> Case:
    """A command line that no command understands."""
    commands, tools = list(main.COMMANDS), [*_ONLY_WRONG, "build_corpus", "train_tokenizer", "report"]
    name = generator.choice([*commands, *tools])
    word = generator.choice(
        [
            "--no_such_flag=1",
            "--model",
            "-x",
            "extra argument",
            "--=",
            "---",
            "--set",
            "--nomodel",
            "é",
            "--undefok=x",
            "--flagfile=missing",
            "--flagfile=directory",
            "--flagfile=file.txt",
            "--loglevel=9",
        ]
    )
    about = (word.strip("-").partition("=")[0] or "-", word, "argument", "flag", "--model", "to", "missing", name)
    if name in commands:
        return Case("malformed command lines", "lingvo_moe", (name, word), about, _put_places)
    return Case("malformed command lines", name, ("--no_such_flag", word), ("no_such_flag", "flagfile"), _put_places)


def command(generator: random.Random) -> Case:
    """No command at all, or none of ours."""
    name = generator.choice([value for value in VALUES if value] + ["trian", "TRAIN", "checkpoints", "train eval"])
    return Case("malformed command lines", "lingvo_moe", (name,), ("no such command",))


def assignment(generator: random.Random) -> Case:
    """`--set` of a field that there is, or nearly, with one of VALUES."""
    model = generator.choice(["m4.Quickstart", "m4.MoE2048E36L", "dense_lm.Small", "hybrid_lm.MoE804B64E"])
    field = generator.choice([path for path, _ in overrides.fields(get(model))])
    value = generator.choice(VALUES)
    how = generator.random()
    text = f"{field}={value}" if how < 0.85 else field if how < 0.9 else f"{field}x={value}" if how < 0.95 else value
    rest = [path for path, _ in overrides.fields(get(model))] if how < 0.85 else []
    about = (field, field.rpartition(".")[2], value.strip(), "--set", *_parts(rest))
    return Case("assignments", "lingvo_moe", ("show", model, f"--set={text}"), about)


def imported(generator: random.Random) -> Case:
    """A module that is none, or fails."""
    name = generator.choice(
        [
            *_MODULES,
            "missing.py",
            "directory",
            "directory.py",
            "no.such.module",
            "..",
            ".x",
            "a b",
            "link",
            "é",
            "nul\0.py",
            "",
            ".py",
            "/",
            "a" * 300 + ".py",
        ]
    )

    def prepare(directory: pathlib.Path):
        _put_places(directory)
        (directory / "directory.py").mkdir()
        if name in _MODULES:
            (directory / name).write_bytes(_MODULES[name])

    return Case("imports", "lingvo_moe", ("list", f"--import={name}"), ("--import",), prepare)


def _parts(paths: list[str]) -> Iterator[str]:
    """The names by which checks of sizes that must fit each other call fields."""
    for path in paths:
        yield path.rpartition(".")[2]


def _flags_of(name: str) -> flags.FlagValues:
    values = flags.FlagValues()
    run_config.define_flags(main.COMMANDS[name].config, values)
    return values


def _put_places(directory: pathlib.Path):
    """What VALUES name: a file, a directory, a link to nothing."""
    (directory / "file.txt").write_text("not what you expect\n")
    (directory / "directory").mkdir()
    (directory / "directory" / "kept.txt").write_text("kept\n")
    (directory / "link").symlink_to("nowhere")
