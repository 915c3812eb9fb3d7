"""Calls entry points, in this process or in one of their own, and records their outcomes."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator

from absl import flags

from lingvo_moe.cli import app, main
from lingvo_moe.data.corpora import debian
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.program import Program
from tools import (
    build_corpus,
    build_speech,
    import_speech,
    launch_processes,
    launch_tpu,
    launcher_check,
    model_card,
    plan_zoo,
    quickstart,
    train_embeddings,
    train_tokenizer,
    write_golden,
)
from tools.benchmarks import __main__ as benchmarks
from tools.benchmarks import beams, everyday, losses
from tools.fuzz.case import Case, Outcome
from tools.gpu_bench import make
from tools.partitioning import (
    collective_times,
    kernel_times,
    layer_pairs,
    layout_searches,
    needed_annotations,
    operator_table,
    partial_products,
    rank_layouts,
    tpu_graph,
    windowed_products,
)
from tools.quality import altered_lines, confidence, copied_words, english_lines, lost_placeholders
from tools.report import __main__ as report
from tools.soak import __main__ as soak
from tools.study import __main__ as study

# The timeout of a call; some compile a model.
SECONDS = 300
_REPOSITORY = pathlib.Path(__file__).parents[2]
_TOOLS = {
    "altered_lines": altered_lines,
    "benchmarks": benchmarks,
    "benchmarks.beams": beams,
    "benchmarks.everyday": everyday,
    "benchmarks.losses": losses,
    "build_corpus": build_corpus,
    "build_speech": build_speech,
    "collective_times": collective_times,
    "confidence": confidence,
    "copied_words": copied_words,
    "english_lines": english_lines,
    "gpu_bench.make": make,
    "import_speech": import_speech,
    "kernel_times": kernel_times,
    "launch_processes": launch_processes,
    "launch_tpu": launch_tpu,
    "launcher_check": launcher_check,
    "layer_pairs": layer_pairs,
    "layout_searches": layout_searches,
    "lost_placeholders": lost_placeholders,
    "model_card": model_card,
    "needed_annotations": needed_annotations,
    "operator_table": operator_table,
    "partial_products": partial_products,
    "plan_zoo": plan_zoo,
    "quickstart": quickstart,
    "rank_layouts": rank_layouts,
    "report": report,
    "soak": soak,
    "study": study,
    "tpu_graph": tpu_graph,
    "train_embeddings": train_embeddings,
    "train_tokenizer": train_tokenizer,
    "windowed_products": windowed_products,
    "write_golden": write_golden,
}


class _Timeout(BaseException):
    """A case ran too long. It is no Exception, so that no entry point catches it."""


def flags_of(tool: str) -> flags.FlagValues:
    """Returns the flags of a tool."""
    module = _TOOLS[tool]
    return module.FLAGS if hasattr(module, "FLAGS") else module._VALUES


def _load_program(arguments: list[str]):
    """Loads a program bundle as a serving program does; no command does."""
    Engine(2, "cpu").compile(Program.load(arguments[1]))


def _read_ranking(arguments: list[str]):
    """Reads the results that tools.partitioning.rank_layouts continues; the tool itself would compile for minutes."""
    rank_layouts.report(rank_layouts.read(pathlib.Path(arguments[1]), {}))


def _read_package(arguments: list[str]):
    """Reads a package as presets of Debian packages do, which also checks its hash."""
    for file in debian.Package(pathlib.Path(arguments[1])).files():
        list(file.entries)


def _tool(name: str) -> Callable[[list[str]], int]:
    return lambda arguments: app.execute(_TOOLS[name].main, [name, *arguments], flags_of(name))


def _function(function: Callable[[list[str]], None]) -> Callable[[list[str]], int]:
    return lambda arguments: app.execute(function, ["program", "--", *arguments], flags.FlagValues())


ENTRY_POINTS: dict[str, Callable[[list[str]], int]] = {
    "lingvo_moe": lambda arguments: main.main(["lingvo_moe", *arguments]),
    **{name: _tool(name) for name in _TOOLS},
    "load_program": _function(_load_program),
    "read_package": _function(_read_package),
    "read_ranking": _function(_read_ranking),
}


def call(case: Case, directory: pathlib.Path, fixtures: pathlib.Path) -> Outcome:
    """Runs a case in this process, in `directory`."""
    stdout, stderr = io.BytesIO(), io.BytesIO()
    status, raised = None, ""
    with contextlib.chdir(directory), _streams(case.input, stdout, stderr), _time_limit():
        try:
            status = ENTRY_POINTS[case.entry_point](_arguments(case, fixtures))
        except _Timeout:
            raised = f"not finished within {SECONDS} s"
        except BaseException:  # every exception is a finding
            raised = traceback.format_exc()
    return Outcome(status, _decode(stdout.getvalue()), _decode(stderr.getvalue()), raised)


def can_be_a_process(case: Case) -> bool:
    """Returns whether a shell could run the case."""
    has_module = case.entry_point == "lingvo_moe" or case.entry_point in _TOOLS
    return has_module and not any("\0" in argument for argument in case.arguments)


def spawn(case: Case, directory: pathlib.Path, fixtures: pathlib.Path) -> Outcome:
    """Runs a case in a process of its own, as a user would."""
    module = "lingvo_moe" if case.entry_point == "lingvo_moe" else _TOOLS[case.entry_point].__name__
    path = os.pathsep.join([str(_REPOSITORY), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", module, *_arguments(case, fixtures)],
            cwd=directory,
            input=case.input,
            capture_output=True,
            timeout=SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, "", "", f"not finished within {SECONDS} s")
    return Outcome(ended.returncode, _decode(ended.stdout), _decode(ended.stderr))


def _decode(output: bytes) -> str:
    return output.decode("utf-8", "replace")


def _arguments(case: Case, fixtures: pathlib.Path) -> list[str]:
    return [argument.replace("FIXTURES/", f"{fixtures}/") for argument in case.arguments]


@contextlib.contextmanager
def _streams(given: bytes, stdout: io.BytesIO, stderr: io.BytesIO) -> Iterator[None]:
    """Replaces the standard streams, with the error handling of a process's own."""

    def text(stream: io.BytesIO, errors: str) -> io.TextIOWrapper:
        return io.TextIOWrapper(stream, "utf-8", errors, write_through=True)

    own = text(io.BytesIO(given), "strict"), text(stdout, "strict"), text(stderr, "backslashreplace")
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = own
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
        for stream in own:
            stream.detach()


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(number, frame):
        raise _Timeout

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
