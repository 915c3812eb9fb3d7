"""Strategies of cases of the command lines: every flag of every command with unfit values, assignments, imports."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from absl import flags
from hypothesis import strategies as st

from lingvo_moe import overrides
from lingvo_moe.cli import command_flags, main
from lingvo_moe.experiment import get
from lingvo_moe.testing import experiments as tiny
from tools.fuzz import runner
from tools.fuzz.case import Case

_TINY = tuple(tiny.settings())
_DATA = ("--corpus=FIXTURES/corpus", "--tokenizers=FIXTURES/tokenizers", "--platform=cpu")
# Calls that end with a known error, as late as possible and before anything is compiled, with a word of its message. A
# flag that is added ends either there or with a message about the flag. A command that is missing here is called with
# --model.
_SMALL = ("--source_vocabulary=400", "--target_vocabulary=150", "--max_sentences=500")
NO_RESULTS = ("--layer_pairs=", "--collective_times=", "--layout_searches=")
CARD = (
    "--model=m4.Pocket",
    "--corpus=FIXTURES/corpus",
    "--logdir=FIXTURES/card/log",
    "--scores=FIXTURES/card/scores.json",
    "--packages=FIXTURES/card",
)
_OTHER = (*_TINY, *_DATA, "--logdir=FIXTURES/other")
_CALLS = {
    "list": ((), ""),
    "show": (("Quickstart",), ""),
    "train": (_OTHER, "weights are not those"),
    "eval": (_OTHER, "weights are not those"),
    "diagnose": (_OTHER, "weights are not those"),
    "translate": (
        (
            *_TINY,
            "--tokenizers=FIXTURES/tokenizers",
            "--platform=cpu",
            "--logdir=FIXTURES/other",
            "--input=FIXTURES/sentences.txt",
        ),
        "weights are not those",
    ),
    "plan": (("--model=m4.Small", "--topology=v3:2x2x1", "--mesh=3"), "mesh"),
    "checkpoint": (("inspect", "--logdir=FIXTURES/log", "--step=5"), "--step=5"),
    "export": ((*_TINY, "--output=new.zip", "--set=model.num_experts=7"), "num_experts"),
    "build_corpus": (("--preset=none", "--input=FIXTURES/sentences.txt", "--output=new"), "sentences.txt"),
    "train_tokenizer": (("--corpus=FIXTURES/catalogs", "--output=new"), "is not a corpus"),
    "report": (("--plans=FIXTURES/catalogs", *NO_RESULTS, "--output=new.html"), "catalogs"),
    "launch_tpu": (("--dry_run", "--slice=s", "--zone=z"), "no --model"),
    "launcher_check": (("--launchers=nothing", "--directory=new"), "nothing"),
    "altered_lines": (_OTHER, "weights are not those"),
    "confidence": (_OTHER, "weights are not those"),
    "lost_placeholders": (("--preset=none", "--input=FIXTURES/sentences.txt"), "sentences.txt"),
    "copied_words": (
        ("--translations=FIXTURES/sentences.txt", "--trained_on=FIXTURES/corpus"),
        "sentences.txt",
    ),
    "english_lines": (("--corpus=FIXTURES/catalogs",), "is not a corpus"),
    "build_speech": (("--preset=none", "--input=FIXTURES/sentences.txt", "--output=new"), "sentences.txt"),
    "import_speech": (("--table=FIXTURES/sentences.txt", "--output=new"), "sentences.txt:1: 1 field,"),
    "train_embeddings": (
        ("--corpus=FIXTURES/catalogs", "--tokenizers=FIXTURES/tokenizers", "--output=new.safetensors"),
        "is not a corpus",
    ),
    "model_card": ((*CARD, "--logdir=FIXTURES/log", "--output=new.md"), "no curves"),
    "study": (("--corpus=FIXTURES/catalogs", "--directory=new"), "is not a corpus"),
    "soak": (("--directory=FIXTURES/corpus",), "is not empty"),
    "kernel_times": (("--set=mesh=4",), "TPU v3 slice"),
    "operator_table": (("--devices=12",), "--devices=12"),
    "partial_products": (("--sizes=1",), "--sizes=1"),
    "windowed_products": (("--products=nothing",), "nothing"),
    "collective_times": (("--shapes=1x3", "--output=new.json"), "--shapes=1x3"),
    "rank_layouts": (("--output=FIXTURES/sentences.txt",), "sentences.txt"),
    "needed_annotations": (("--model=nothing",), "nothing"),
    "plan_zoo": (("--only=nothing",), "--only=nothing"),
    "quickstart": (("--languages=x y", "--directory=new"), "--languages"),
    "benchmarks.everyday": (("--output=FIXTURES/sentences.txt",), "sentences.txt"),
    "benchmarks": (("--only=nothing",), "there is no such row"),
    "benchmarks.beams": (("--beams=0",), "--beams=0"),
    "benchmarks.losses": (
        ("--corpus=FIXTURES/corpus", "--tokenizers=FIXTURES/tokenizers", "--language=de", "--directory=new"),
        "have different ones",
    ),
    "gpu_bench.make": (("--model=dense_lm.Small", "--directory=new"), "does not translate"),
    "launch_processes": ((), "no --model"),
    "tpu_graph": (("--only=nothing",), "--only=nothing"),
}
# Calls that would succeed, for flags that the calls above do not reach.
_WORKING = {
    ("train", "logdir"): (*_TINY, *_DATA, "--steps=1"),
    ("export", "output"): _TINY,
    ("export", "program"): (*_TINY, "--output=new.zip"),
    ("checkpoint", "last"): ("average", "--logdir=FIXTURES/log", "--output=new"),
    ("checkpoint", "steps"): ("average", "--logdir=FIXTURES/log", "--output=new"),
    ("checkpoint", "output"): ("average", "--logdir=FIXTURES/log", "--last=2"),
    ("checkpoint", "input"): ("convert", "--logdir=new", *_TINY[:1], *_TINY[2:]),
    ("checkpoint", "model"): ("convert", "--logdir=new", "--input=FIXTURES/weights.safetensors", *_TINY[2:]),
    ("checkpoint", "set"): ("convert", "--logdir=new", "--input=FIXTURES/weights.safetensors", *_TINY[:1], *_TINY[2:]),
    **{
        ("checkpoint", flag): ("convert", "--logdir=FIXTURES/log", "--output=new.safetensors")
        for flag in ("step", "dtype")
    },
    ("checkpoint", "logdir"): ("verify",),
    ("checkpoint", "grep"): ("inspect", "--logdir=FIXTURES/log"),
    ("checkpoint", "stats"): ("inspect", "--logdir=FIXTURES/log"),
    ("build_corpus", "output"): ("--preset=none", "--input=FIXTURES/catalogs"),
    **{
        ("build_corpus", flag): ("--preset=none", "--input=FIXTURES/catalogs", "--output=new")
        for flag in ("force", "languages", "unseen_by", "valid_input", "test_input")
    },
    ("train_tokenizer", "output"): ("--corpus=FIXTURES/corpus", *_SMALL),
    **{
        ("train_tokenizer", flag): ("--corpus=FIXTURES/corpus", "--output=new", *_SMALL)
        for flag in (
            "source_vocabulary",
            "target_vocabulary",
            "shared_vocabulary",
            "temperature",
            "max_sentences",
            "force",
        )
    },
    **{
        ("report", flag): ("--plans=FIXTURES/plans", *NO_RESULTS, "--output=new.html")
        for flag in ("figures", "planning", "layer_pairs", "collective_times", "layout_searches")
    },
    **{
        ("model_card", flag): (*CARD, "--output=new.md")
        for flag in ("model", "set", "corpus", "logdir", "scores", "packages")
    },
    ("model_card", "output"): CARD,
    ("english_lines", "tokenizers"): ("--corpus=FIXTURES/corpus",),
    ("report", "output"): ("--plans=FIXTURES/plans", *NO_RESULTS),
}
# Flags that would start hours of work, or work on other machines.
_LEFT_OUT = {
    ("launch_tpu", "dry_run"),
    ("checkpoint", "import"),
    ("tpu_graph", "only"),
    ("benchmarks", "only"),
    ("benchmarks.beams", "beams"),
    ("rank_layouts", "output"),
    ("rank_layouts", "calibration"),
    ("soak", "directory"),
    ("quickstart", "languages"),
}
# Values that would read or write the whole machine's files.
_TOO_MUCH = {
    **dict.fromkeys(("input", "valid_input", "test_input"), ("/", "..")),
    **dict.fromkeys(("cache", "logdir"), ("/",)),
    "figures": ("/", ".."),
    **dict.fromkeys(("only", "products"), ("",)),  # for all
}
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
# Tools that are only called with malformed command lines: any other starts minutes of work.
_ONLY_MALFORMED = ("layer_pairs", "layout_searches", "write_golden")
_MALFORMED = (
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
)
_NO_MODULES = (
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
)
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


@st.composite
def flag(draw: st.DrawFn) -> Case:
    """A flag of a command or tool, with one of VALUES."""
    name = draw(st.sampled_from([*main.COMMANDS, *(name for name in _CALLS if name not in main.COMMANDS)]))
    is_command = name in main.COMMANDS
    base, usual = _CALLS.get(name, (("--model=m4.Quickstart",), ""))
    known = _flags_of(name) if is_command else runner.flags_of(name)
    chosen = draw(st.sampled_from(sorted(f for f in known if f != "help" and (name, f) not in _LEFT_OUT)))
    value = draw(st.sampled_from([value for value in VALUES if value not in _TOO_MUCH.get(chosen, ())]))
    arguments = (*_WORKING.get((name, chosen), base), f"--{chosen}={value}")
    return Case(
        f"flags of {name}",
        "lingvo_moe" if is_command else name,
        ((name,) if is_command else ()) + arguments,
        (chosen, usual, value.strip()[:100].encode("utf-8", "backslashreplace").decode()),
        _make_named_files,
        writes=(value,) if chosen == "output" else (),
    )


@st.composite
def malformed(draw: st.DrawFn) -> Case:
    """A command line that no command accepts."""
    tools = [*_ONLY_MALFORMED, "build_corpus", "train_tokenizer", "report"]
    name = draw(st.sampled_from([*main.COMMANDS, *tools]))
    word = draw(st.sampled_from(_MALFORMED))
    if name in main.COMMANDS:
        named = (word.strip("-").partition("=")[0] or "-", word, "argument", "flag", "--model", "to", "missing", name)
        return Case("malformed command lines", "lingvo_moe", (name, word), named, _make_named_files)
    named = ("no_such_flag", "flagfile")
    return Case("malformed command lines", name, ("--no_such_flag", word), named, _make_named_files)


@st.composite
def command(draw: st.DrawFn) -> Case:
    """The name of a command that does not exist."""
    name = draw(st.sampled_from([*filter(None, VALUES), "trian", "TRAIN", "checkpoints", "train eval"]))
    return Case("malformed command lines", "lingvo_moe", (name,), ("no such command",))


@st.composite
def assignment(draw: st.DrawFn) -> Case:
    """`--set` of an existing or nearly existing field, with one of VALUES."""
    model = draw(st.sampled_from(("m4.Quickstart", "m4.MoE2048E36L", "dense_lm.Small", "hybrid_lm.MoE804B64E")))
    fields = [path for path, _ in overrides.fields(get(model))]
    field, value = draw(st.sampled_from(fields)), draw(st.sampled_from(VALUES))
    # Mostly a field and a value; otherwise no value, a wrong field, no field.
    texts = (f"{field}={value}",) * 17 + (field, f"{field}x={value}", value)
    text = draw(st.sampled_from(texts))
    # Checks of sizes that must agree name the other field.
    others = [path.rpartition(".")[2] for path in fields] if text == texts[0] else []
    named = (field, field.rpartition(".")[2], value.strip(), "--set", *others)
    return Case("assignments", "lingvo_moe", ("show", model, f"--set={text}"), named)


@st.composite
def imported(draw: st.DrawFn) -> Case:
    """`--import` of a module that does not exist or fails."""
    name = draw(st.sampled_from((*_MODULES, *_NO_MODULES)))

    def prepare(directory: pathlib.Path):
        _make_named_files(directory)
        (directory / "directory.py").mkdir()
        if name in _MODULES:
            (directory / name).write_bytes(_MODULES[name])

    return Case("imports", "lingvo_moe", ("list", f"--import={name}"), ("--import",), prepare)


# How often each is drawn.
TARGETS: dict[Callable[[], st.SearchStrategy[Case]], int] = {
    flag: 36,
    malformed: 6,
    command: 2,
    assignment: 14,
    imported: 4,
}


def _flags_of(name: str) -> flags.FlagValues:
    values = flags.FlagValues()
    command_flags.define_flags(main.COMMANDS[name].config, values)
    return values


def _make_named_files(directory: pathlib.Path):
    """Makes what VALUES name: a file, a directory, a link to nothing."""
    (directory / "file.txt").write_text("not what you expect\n")
    (directory / "directory").mkdir()
    (directory / "directory" / "kept.txt").write_text("kept\n")
    (directory / "link").symlink_to("nowhere")
