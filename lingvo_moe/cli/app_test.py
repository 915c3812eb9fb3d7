"""Mistakes and errors of the environment are one line and an exit status; only a bug has a traceback."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys

import jax
import pytest
from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.errors import OutOfMemory, UserError


@pytest.fixture
def values() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_integer("steps", 3, "How many steps.", flag_values=values)
    flags.DEFINE_float("rate", 0.5, "How fast.", lower_bound=0.0, flag_values=values)
    flags.DEFINE_bool("force", False, "Do it anyway.", flag_values=values)
    flags.DEFINE_multi_string("input", [], "What to read.", flag_values=values)
    return values


def _raising(error: BaseException):
    def main(argv):
        raise error

    return main


def test_main_gets_flags_and_arguments(values):
    seen = []
    assert app.execute(lambda argv: seen.append((argv, values.steps)), ["tool", "--steps=7", "word"], values) == 0
    assert seen == [(["tool", "word"], 7)]


def test_flags_are_reset_for_the_next_call(values):
    app.execute(lambda argv: 0, ["tool", "--steps=7"], values)
    seen = []
    app.execute(lambda argv: seen.append(values.steps), ["tool"], values)
    assert seen == [3]


def test_a_flag_given_twice_is_named(values, capsys):
    """Of a flag with one value the first is not used; one that may be repeated has all, and a script may append."""
    flags.DEFINE_list("languages", [], "Which.", flag_values=values)
    argv = ["tool", "--languages=de", "--languages=fr,nl", "--input=a", "--input=b", "--force", "--steps=4"]
    assert app.execute(lambda _: 0, argv, values) == 0
    assert capsys.readouterr().err == "warning: --languages is given 2 times; only the last value, fr,nl, counts.\n"


def test_the_status_is_returned(values):
    assert app.execute(lambda argv: 4, ["tool"], values) == 4


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--stpes=4", "error: unknown flag --stpes. Did you mean steps? --help lists the flags.\n"),
        (
            "--steps=four",
            "error: flag --steps=four: expected a whole number, not 'four'. --help lists the flags.\n",
        ),
        ("--force=maybe", "error: flag --force=maybe: Non-boolean argument to boolean flag. --help lists the flags.\n"),
        ("--rate=nan", "error: --rate=nan: expected a number.\n"),
        ("--input=a\0b", "error: --input holds a NUL character; expected text.\n"),
        ("--input=", "error: --input=: expected a value; give it one, or leave the flag out.\n"),
        ("--input=a\udcff", "error: --input=a\\udcff holds bytes that are not UTF-8; rename what it names.\n"),
        ("--flagfile=/", "error: Unable to open flagfile: [Errno 21] Is a directory: '/'. --help lists the flags.\n"),
    ],
)
def test_bad_flags_are_one_line(values, capsys, argument, message):
    assert app.execute(lambda argv: 0, ["tool", argument], values) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "error, status, message",
    [
        (UserError("no such thing."), 2, "error: no such thing.\n"),
        (UserError("no \x1b[31msuch\nthing\x7f."), 2, "error: no \\x1b[31msuch\nthing\\x7f.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            MemoryError("Unable to allocate 745. GiB"),
            2,
            "error: out of memory: Unable to allocate 745. GiB. Pass smaller numbers, or free some memory.\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left", "big.bin"),
            2,
            "error: big.bin: no space left on the device; free disk space and run the same command again\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left"),
            2,
            "error: no space left on the device; free disk space and run the same command again\n",
        ),
        (
            OSError(errno.EFBIG, "File too large"),
            2,
            "error: the file would be larger than this system or `ulimit -f` allows\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "secret"), 2, "error: secret: permission denied\n"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nBFC Allocator"),
            2,
            "error: the program does not fit into a device's memory: Out of memory allocating 8 bytes. Use --set with "
            "a smaller input.batch_size, decoding_batch or search.max_length, or more devices; `plan` shows what a "
            "program needs.\n",
        ),
        (
            OutOfMemory(20 * 2**30, 31 * 2**29),  # of a program that is compiled for devices that are not here
            2,
            "error: the program does not fit into a device's memory: 20.00 GiB of a device's 15.50 GiB are needed. Use "
            "--set with a smaller input.batch_size, decoding_batch or search.max_length, or more devices; `plan` shows "
            "what a program needs.\n",
        ),
    ],
)
def test_errors_of_the_environment_are_one_line(values, capsys, error, status, message):
    assert app.execute(_raising(error), ["tool"], values) == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "error, reason",
    [
        ("Out of memory while trying to allocate 1.50GiB.\nBFC Allocator", "while trying to allocate 1.50GiB. Use"),
        ("Error allocating device buffer: Attempting to allocate 16.00G.", "Attempting to allocate 16.00G. Use"),
    ],
)
def test_out_of_memory_of_gpus_and_tpus_is_reported(values, capsys, error, reason):
    """Each platform words it in its own way, and the size that it could not allocate is in the message."""
    assert app.execute(_raising(jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {error}")), ["tool"], values) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError(),
        jax.errors.JaxRuntimeError("INTERNAL: failed to allocate a register"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too many open files"),
    ],
)
def test_a_bug_keeps_its_traceback(values, error):
    with pytest.raises(type(error)):
        app.execute(_raising(error), ["tool"], values)


def test_a_platform_of_the_environment_that_jax_lacks_is_named(values, capsys, monkeypatch):
    """Any command that uses JAX ends with its error."""
    error = RuntimeError("Unable to initialize backend 'foo': not in the list of known backends: ['cpu'].")
    monkeypatch.setenv("JAX_PLATFORMS", "foo")
    assert app.execute(_raising(error), ["tool"], values) == 2
    assert capsys.readouterr().err == f"error: the environment variable JAX_PLATFORMS=foo: {error}\n"


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGHUP])
def test_a_context_ends_before_the_process(name):
    """Of a terminal that was closed, 130 MB of unpacked weights stayed behind each time."""
    ignored = signal.signal(name, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), app.terminated_as_interrupted():
            signal.raise_signal(name)
        assert signal.getsignal(name) is signal.SIG_DFL
        signal.signal(name, signal.SIG_IGN)
        with app.terminated_as_interrupted():
            signal.raise_signal(name)
    finally:
        signal.signal(name, ignored)


def test_a_flag_is_written_with_one_dash_or_two():
    """As absl reads it; a launcher looks for flags of the command that it starts."""
    named = ("--model=m4.Small", "-model=m4.Small", "--model", "-model")
    assert {app.flag_name(argument) for argument in named} == {"model"}
    assert [app.flag_name(argument) for argument in ("model=x", "--modelled=x", "--")] == [None, "modelled", ""]


_NAMES = ["m4.Small", "m4.Large", "dense_lm.Small"]


def _chosen(*given: str) -> list[str]:
    return app.chosen_names("--only", given, _NAMES, lambda prefix, name: name.startswith(prefix))


def test_a_list_flag_chooses_names_by_parts_of_them():
    """In the order of the names, each once; all without an item."""
    assert _chosen() == _NAMES and _chosen("m4.L", "m4") == _NAMES[:2]


@pytest.mark.parametrize(
    "given, message",
    [
        (("m4.Small", ""), "--only=m4.Small,: an item is empty; write names with one comma between them"),
        (("m4", "dense_ml"), "--only=m4,dense_ml: dense_ml chooses none of the 3 names. Did you mean dense_lm"),
        (("zzz",), "--only=zzz: zzz chooses none of the 3 names. For instance: m4.Small, m4.Large, dense_lm.Small."),
    ],
)
def test_an_item_of_a_list_flag_that_chooses_nothing_is_an_error(given, message):
    """An empty one is a part of every name: `--only=m4.Small,` would choose all."""
    with pytest.raises(UserError, match=re.escape(message)):
        _chosen(*given)


def test_help_shows_the_module_and_its_flags(values, capsys):
    assert app.execute(_raising(AssertionError()), ["tool", "--help"], values) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Mistakes and errors of the environment") and "--steps: How many steps." in shown


def test_help_after_a_double_dash_is_an_argument(values):
    seen = []
    assert app.execute(seen.append, ["tool", "--", "--help"], values) == 0
    assert seen == [["tool", "--help"]]


def test_a_closed_pipe_is_not_an_error():
    """`tool | head -1`: no message, and the status of a program that SIGPIPE ended."""
    code = (
        "from lingvo_moe.cli import app\nfrom absl import flags\n"
        "def main(argv):\n    for _ in range(100000): print('line')\n"
        "app.run(main, flags.FlagValues())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_a_lost_log_ends_nothing():
    """`train 2>&1 | head`, a closed terminal: the command goes on, and its status is its own."""
    code = (
        "import sys\nfrom lingvo_moe.cli import app\nfrom absl import flags\n"
        "def main(argv):\n    for _ in range(100000): print('line', file=sys.stderr)\n    print('done')\n"
        "app.run(main, flags.FlagValues())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stderr.readline()
    process.stderr.close()
    assert process.stdout.read() == b"done\n"
    process.stdout.close()
    assert process.wait() == 0


def test_closed_streams_and_other_encodings():
    """Closed standard output is an error, as results would be lost; in every locale the output is UTF-8."""
    code = (
        "import sys\nfrom lingvo_moe.cli import app\n"
        "def main(arguments):\n    print(sys.stdin.read(), '\\u00df'); print('\\u00df\\udcff', file=sys.stderr)\n"
        "app.run(main)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=b"text", capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "text ß\n".encode(), "ß\\udcff\n".encode())
    for closed, status in (("<&- 2>&-", 0), (">&-", 2)):
        closing = ["sh", "-c", f'exec "$0" "$@" {closed}', *command]
        done = subprocess.run(closing, capture_output=True, check=False, env=environment, stdin=subprocess.DEVNULL)
        assert done.returncode == status, done.stderr
    assert done.stderr == b"error: standard output is closed; redirect it to a file, or to /dev/null.\n"


def test_a_stream_in_memory_stays():
    """A program that embeds this one may collect the messages."""
    code = (
        "import io, sys\nfrom lingvo_moe.cli import app\nsys.stderr = collected = io.StringIO()\n"
        "def main(arguments):\n    print('note', file=sys.stderr)\n    print(repr(collected.getvalue()))\n"
        "app.run(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "'note\\n'\n", "")


@pytest.mark.parametrize("status", [0, 2])
def test_the_process_exits_at_once_after_an_error(status):
    """A library's thread that waits for what failed must not block the exit; after success all threads may end."""
    code = (
        "import threading, time\nfrom lingvo_moe.cli import app\nfrom lingvo_moe.errors import UserError\n"
        "def work():\n    time.sleep(1 if not STATUS else 1000)\n    print('ended')\n"
        "def main(arguments):\n    threading.Thread(target=work).start()\n"
        "    if STATUS:\n        raise UserError('mistake')\n"
        "app.run(main)"
    ).replace("STATUS", str(status))
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    expected = (2, "", "error: mistake\n") if status else (0, "ended\n", "")
    assert (found.returncode, found.stdout, found.stderr) == expected


def test_a_flag_that_may_be_empty_says_so(values):
    flags.DEFINE_string("extra", "file", "A file; empty for none.", flag_values=values)
    assert app.execute(lambda argv: 0, ["tool", "--extra="], values) == 0 and values.extra == ""


def test_a_flagfile_that_is_no_text_is_named(values, tmp_path, capsys):
    (tmp_path / "flags").write_bytes(b"--steps=3\n\xff\n")
    assert app.execute(lambda argv: 0, ["tool", f"--flagfile={tmp_path / 'flags'}"], values) == 2
    assert capsys.readouterr().err.startswith("error: --flagfile: a file that is not UTF-8 (byte ")
