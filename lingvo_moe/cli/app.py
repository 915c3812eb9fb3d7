"""Runs the command lines of this project: parses flags, prints errors in one line, returns an exit status.

Exit status: 0 for success, 2 for a mistake that the user can correct (`error: MESSAGE` on standard error), 3 when
another process of the same run is gone (`distributed`), 130 when interrupted, 141 when the reader of the output has
closed it. A bug keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from absl import flags

from lingvo_moe.cli import logging_setup, process_setup
from lingvo_moe.errors import OutOfMemory, UserError, did_you_mean
from lingvo_moe.utils import error_numbers, standard_error
from lingvo_moe.utils.exit_status import BROKEN_PIPE, INTERRUPTED, USER_ERROR

_logger = logging.getLogger(__name__)

Main = Callable[[list[str]], int | None]
_MAY_BE_EMPTY = "empty for none"  # in the help of a flag
_HELP_FLAGS = ("--help", "-help", "-h", "-?")
# How Python decodes bytes of the command line that are not UTF-8; they cannot be printed.
_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROL_CHARACTERS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")
# XLA's error where a device has too little memory, as JAX and TensorFlow name it. Not all commands import these.
_OF_XLA = {"JaxRuntimeError": "RESOURCE_EXHAUSTED: ", "ResourceExhaustedError": ""}
_NO_BACKEND = "Unable to initialize backend"  # JAX's RuntimeError for a platform that it does not have
_OUT_OF_MEMORY = re.compile(r".*(?:[Oo]ut of memory|OOM|allocat).*")
_REASONS = {
    errno.ENOSPC: "no space left on the device; free disk space and run the same command again",
    errno.EFBIG: "the file would be larger than this system or `ulimit -f` allows",
    errno.EIO: "the disk or device reports an input/output error",
    errno.EDQUOT: "the disk quota is used up; free disk space and run the same command again",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "no such file or directory",
    errno.ENOTDIR: "a part of this path is not a directory",
    errno.EISDIR: "this is a directory, a file was expected",
}


def run(main: Main, flag_values: flags.FlagValues = flags.FLAGS) -> NoReturn:
    """Runs `main` on the process's arguments and exits with its status."""
    run_process(lambda: execute(main, sys.argv, flag_values))


def run_process(command: Callable[[], int]) -> NoReturn:
    """Sets this process up for a command line, calls `command` and exits with the status it returns."""
    process_setup.set_up_process()
    _prepare_streams()
    # Python's own; `lingvo_moe.__main__` has another during imports. A shell ignores Ctrl-C for jobs in the background.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _exit(command())


def _prepare_streams():
    """Opens closed standard streams; what is written is UTF-8, whatever the locale is.

    Closed standard output ends the process: the results would be lost. Messages may be lost: standard error that can
    no longer be written to ends nothing.
    """
    if sys.stdout is None:
        os.write(2, b"error: standard output is closed; redirect it to a file, or to /dev/null.\n")
        os._exit(USER_ERROR)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  (open until the process ends)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    with contextlib.suppress(io.UnsupportedOperation):  # a stream in memory, of a program that embeds this one, stays
        descriptor = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()
        sys.stderr = standard_error.lossy(descriptor)


def _exit(status: int) -> NoReturn:
    """Exits; after an error at once, because threads of a library may wait for ever for what failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    sys.exit(0)


def execute(
    main: Main,
    argv: Sequence[str],
    flag_values: flags.FlagValues = flags.FLAGS,
    description: str | None = None,
    shown_from: int = logging.INFO,
) -> int:
    """Parses `argv` into `flag_values`, calls `main` and returns the exit status.

    Args:
      main: called with the program's name and the arguments that are not flags; returning None means status 0.
      argv: the program's name and its arguments.
      flag_values: the flags; a command with subcommands passes those of the subcommand.
      description: what --help shows above the flags; None for the docstring of the module that defines `main`.
      shown_from: the lowest level of messages that are shown, until `main` changes it.
    """
    if description is None:
        description = inspect.getdoc(inspect.getmodule(main)) or ""
    with logging_setup.plain_lines():
        logging_setup.show_from(shown_from)
        return _execute(main, argv, flag_values, description)


def _execute(main: Main, argv: Sequence[str], flag_values: flags.FlagValues, description: str) -> int:
    try:
        if any(argument in _HELP_FLAGS for argument in _before_double_dash(argv)):
            print(_help(description, flag_values))
            status = 0
        else:
            status = main(parse(argv, flag_values)) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which would raise the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.filename is None and error.errno not in error_numbers.OF_WRITES:
            raise
        reason = _REASONS.get(error.errno or 0, str(error.strerror))
        return _fail(f"{error.filename}: {reason}" if error.filename is not None else reason)
    except MemoryError as error:
        return _fail(
            f"out of memory: {str(error) or 'an allocation failed'}. Pass smaller numbers, or free some memory."
        )
    except Exception as error:
        if "JAX_PLATFORMS" in os.environ and str(error).startswith(_NO_BACKEND):
            return _fail(f"the environment variable JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}: {error}")
        reason = str(error) if isinstance(error, OutOfMemory) else _out_of_memory(error)
        if reason is None:
            raise
        return _fail(
            f"the program does not fit into a device's memory: {reason}. Use --set with a smaller input.batch_size, "
            "decoding_batch or search.max_length, or more devices; `plan` shows what a program needs."
        )


def _out_of_memory(error: Exception) -> str | None:
    """Returns the first line of XLA's error where a device has too little memory; None for any other error."""
    text, prefix = str(error), _OF_XLA.get(type(error).__name__)
    if prefix is None or not text.startswith(prefix):
        return None
    match = _OUT_OF_MEMORY.match(text.removeprefix(prefix))
    return match[0].rstrip(".") if match else None


def parse(argv: Sequence[str], flag_values: flags.FlagValues, listed_by: str = "--help") -> list[str]:
    """Returns the arguments of `argv` that are not flags.

    Args:
      argv: the program's name and its arguments.
      flag_values: the flags, which get their values.
      listed_by: what lists the flags, for the errors.

    Raises:
      UserError: an unknown flag or a wrong value.
    """
    flag_values.unparse_flags()
    try:
        left = flag_values(list(argv))
    except flags.UnrecognizedFlagError as error:
        raise UserError(
            f"unknown flag --{error.flagname}.{did_you_mean(error.flagname, flag_values)} {listed_by} lists the flags."
        ) from None
    except flags.Error as error:
        # absl shows a bad boolean as the tuple of its error's arguments.
        message = re.sub(r"\('(.*?)', .*\)$", r"\1", " ".join(str(error).split())).removeprefix("ERROR:: ")
        # These two are Python's own words.
        message = message.replace("invalid literal for int() with base 10: ", "expected a whole number, not ")
        message = message.replace("could not convert string to float: ", "expected a number, not ")
        raise UserError(f"{message}. {listed_by} lists the flags.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"--flagfile: a file that is not UTF-8 (byte {error.start + 1}); expected a flag a line."
        ) from None
    _check_values(flag_values)
    _warn_of_repeated(flag_values)
    return left


def _check_values(flag_values: flags.FlagValues):
    """Raises UserError for a value that no flag has: NaN, invalid UTF-8, a NUL character, and an empty text.

    A --flagfile may hold a NUL character, which no path does. An empty text would be the current directory as a path:
    `--cache=$DIRECTORY`, where there is no such variable. Flags that may be empty say so in their help.
    """
    for name in flag_values:
        value, flag = flag_values[name].value, flag_values[name]
        for text in (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str)):
            if not text and flag.present and not _may_be_empty(flag):
                raise UserError(f"--{name}=: expected a value; give it one, or leave the flag out.")
            if "\0" in text:
                raise UserError(f"--{name} holds a NUL character; expected text.")
            if _SURROGATES.search(text):
                shown = text.encode("utf-8", "backslashreplace").decode()
                raise UserError(f"--{name}={shown} holds bytes that are not UTF-8; rename what it names.")
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"--{name}=nan: expected a number.")


def _warn_of_repeated(flag_values: flags.FlagValues):
    """Warns of a flag that is given twice and has one value: `--languages=de --languages=fr` would lose `de` silently.

    That is no error, as scripts append flags to those that they pass by default.
    """
    for name in flag_values:
        flag = flag_values[name]
        if flag.present > 1 and not isinstance(flag, flags.MultiFlag):
            value = ",".join(flag.value) if isinstance(flag.value, list) else flag.value
            _logger.warning("--%s is given %d times; only the last value, %s, counts.", name, flag.present, value)


def _may_be_empty(flag: flags.Flag) -> bool:
    """Whether its help says so, or whoever reads its list names the empty item."""
    return _MAY_BE_EMPTY in (flag.help or "") or isinstance(flag.parser, flags.ListParser)


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise KeyboardInterrupt, so that contexts end before the process does.

    SIGHUP is that of a terminal that is closed; under `nohup`, which ignores it, it stays ignored.
    """
    caught = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, signal.default_int_handler) for each in caught}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def chosen_names(
    flag: str, given: Sequence[str], known: Sequence[str], matches: Callable[[str, str], bool]
) -> list[str]:
    """Returns the known names that a list flag chooses by parts of them; all if it has no item.

    Args:
      flag: for the error, for instance `--only`.
      given: the items of the flag.
      known: all names.
      matches: whether an item, the first argument, chooses a name, the second one.

    Raises:
      UserError: an item is empty, as after a final comma, or chooses no name.
    """
    shown = f"{flag}={','.join(given)}"
    for item in given:
        if not item:
            raise UserError(f"{shown}: an item is empty; write names with one comma between them, none at the end.")
        if not any(matches(item, name) for name in known):
            modules = dict.fromkeys(name.partition(".")[0] for name in known)  # an item may be one
            hint = did_you_mean(item, [*modules, *known]) or f" For instance: {', '.join(known[:3])}."
            raise UserError(f"{shown}: {item} chooses none of the {len(known)} names.{hint}")
    return [name for name in known if not given or any(matches(item, name) for item in given)]


def no_arguments(arguments: Sequence[str]):
    """Raises UserError if there are arguments that are not flags."""
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; flags are written --name=value, see --help.")


def flag_name(argument: str) -> str | None:
    """Returns the name in `--name`, `--name=value` or the same with one dash; None for what is no flag."""
    return argument.lstrip("-").partition("=")[0] if argument.startswith("-") else None


def _before_double_dash(argv: Sequence[str]) -> Sequence[str]:
    return argv[1 : argv.index("--")] if "--" in argv else argv[1:]


def _help(description: str, flag_values: flags.FlagValues) -> str:
    """Returns the description and the flags."""
    modules = [module for module in flag_values.flags_by_module_dict() if not module.startswith("absl")]
    # The first line of a module's help is its name.
    described = [flag_values.module_help(module).strip("\n").partition("\n")[2] for module in sorted(modules)]
    return "\n".join([f"{description}\n", "Flags:", *described])


def _fail(message: str) -> int:
    # What a user passed may hold a terminal's control characters.
    shown = _CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
    print(f"error: {shown}", file=sys.stderr)
    return USER_ERROR
