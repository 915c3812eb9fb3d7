"""The command `checkpoint`: inspect, verify, average and convert."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from lingvo_moe import experiment, registry
from lingvo_moe.cli.run_config import CheckpointConfig
from lingvo_moe.data.tokenizer import SIDES, UNKNOWN_LANGUAGE, hashes
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.importing import export, hugging_face, tokenizer_files
from lingvo_moe.importing.model_directory import CONFIG
from lingvo_moe.steps import weight_specs
from lingvo_moe.training import checkpoint_average, checkpoint_manifest, hyperparameters, weights_conversion
from lingvo_moe.training import checkpoint_tools as tools
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_errors import CorruptCheckpoint, RemovedCheckpoint, UnreadableCheckpoint
from lingvo_moe.training.checkpoint_reader import WEIGHTS, Reader, num_bytes
from lingvo_moe.training.tokenizer_match import uses_tokenizers
from lingvo_moe.utils import columns, progress
from lingvo_moe.utils.counts import counted
from lingvo_moe.utils.exit_status import USER_ERROR

_logger = logging.getLogger(__name__)
_EVERYWHERE = {"help", "import"}


class _Action(NamedTuple):
    """An action of `checkpoint`: the function that runs it, and the flags that it takes."""

    run: Callable[[CheckpointConfig], int | None]
    flags: tuple[str, ...]


def run(config: CheckpointConfig, arguments: list[str]) -> int | None:
    """Runs the action that is named after the command; returns 2 if `verify` found a corrupt or unreadable step."""
    words = ", ".join(_ACTIONS)
    if len(arguments) != 1:
        raise UserError(f"checkpoint takes one of {words}, got {len(arguments)}; see --help.")
    if arguments[0] not in _ACTIONS:
        raise UserError(
            f"checkpoint {arguments[0]}: no such action.{did_you_mean(arguments[0], _ACTIONS)} There are {words}."
        )
    action = _ACTIONS[arguments[0]]
    for name in sorted(config.given - {*action.flags, *_EVERYWHERE}):
        raise UserError(
            f"--{name} is not for checkpoint {arguments[0]}, which takes "
            f"{', '.join(f'--{flag}' for flag in action.flags)}."
        )
    # Arrays are read on the host, so that an accelerator on which training runs stays free.
    jax.config.update("jax_platforms", "cpu")
    return action.run(config)


def _inspect(config: CheckpointConfig):
    checkpoints = _existing(_logdir(config))
    print(checkpoints.directory)
    header = ("step", "date (UTC)", "model", "weights", "MiB", "state")
    _print_table([header, *_overviews(checkpoints)])
    for path in sorted(checkpoints.directory.glob("*.corrupt*")):
        print(f"{path.name}: set aside as corrupt")
    step = checkpoints.steps()[-1] if config.step is None else _require_step(checkpoints, config.step)
    try:
        _inspect_arrays(Reader(checkpoints.path(step)), _pattern(config.grep), config.stats)
    except CorruptCheckpoint as error:
        raise UserError(f"{checkpoints.path(step)} is corrupt: {error}. Pass --step to inspect another.") from None


def _inspect_arrays(reader: Reader, pattern: re.Pattern, stats: bool):
    specs = {path: spec for path, spec in reader.specs().items() if pattern.search(path)}
    if not specs:
        raise UserError(
            f"--grep={pattern.pattern}: no path of step {reader.directory.name} matches; without it, all are listed."
        )
    header = ("array", "dtype", "shape", "bytes")
    rows = [
        (path, spec.dtype, "x".join(map(str, spec.shape)) or "scalar", f"{num_bytes(spec):,}")
        for path, spec in specs.items()
    ]
    if stats:
        header += ("mean", "rms", "min", "max", "not finite")
        read = progress.track(specs, f"reading step {reader.directory.name}", unit="arrays")
        rows = [row + _statistics(reader, path) for path, row in zip(read, rows)]
    print(f"\nstep {reader.directory.name}: {len(specs)} arrays, {sum(map(num_bytes, specs.values())):,} bytes")
    _print_table([header, *rows])


def _verify(config: CheckpointConfig) -> int:
    checkpoints = _existing(_logdir(config))
    steps = checkpoints.steps() if config.step is None else [_require_step(checkpoints, config.step)]
    bad = 0
    for step in steps:
        try:
            problems = tools.verify(checkpoints, step)
        except RemovedCheckpoint:
            print(f"{checkpoints.path(step)}: removed meanwhile; training keeps the newest checkpoints", flush=True)
            continue
        except UnreadableCheckpoint as error:
            print(f"{checkpoints.path(step)}: cannot be read ({error.why})", flush=True)
            bad += 1
            continue
        bad += bool(problems)
        if problems:
            status = "corrupt"
        elif (checkpoints.path(step) / checkpoint_manifest.MANIFEST).exists():
            status = "valid"
        else:
            status = f"every array can be read and is finite; no {checkpoint_manifest.MANIFEST} to compare files with"
        print("\n  ".join([f"{checkpoints.path(step)}: {status}", *problems]), flush=True)
    return USER_ERROR if bad else 0


def _average(config: CheckpointConfig):
    if not config.output:
        raise UserError("--output is missing: the log directory to write the average to.")
    if config.logdirs:
        _average_logdirs(config, config.output)
        return
    checkpoints = _existing(_logdir(config))
    if (config.last is None) == (not config.steps):
        raise UserError("which checkpoints? Pass either --last=N or --steps=A,B,C.")
    steps = checkpoints.steps()[-config.last :] if config.last is not None else list(map(_step_number, config.steps))
    if config.last is not None and len(steps) < config.last:
        raise UserError(f"--last={config.last}: {checkpoints.directory} holds {counted(len(steps), 'checkpoint')}.")
    checkpoint_average.of_steps(checkpoints, steps, config.output)
    _logger.info("%s: average of steps %s, as step %d", config.output, ", ".join(map(str, steps)), max(steps))


def _average_logdirs(config: CheckpointConfig, output: str):
    if config.logdir or config.last is not None or config.steps:
        raise UserError("--logdirs averages the newest checkpoints; leave --logdir, --last and --steps out.")
    if len({os.path.realpath(name) for name in config.logdirs if name}) < len(config.logdirs):
        raise UserError(
            f"--logdirs={','.join(config.logdirs)}: one is empty or named twice; expected different log directories."
        )
    logdirs = {name: _existing(name, "--logdirs") for name in config.logdirs}
    checkpoint_average.of_logdirs(logdirs, output)
    _logger.info("%s: average of the newest weights of %s", output, ", ".join(logdirs))


def _convert(config: CheckpointConfig):
    if config.like is not None and (config.input or not config.output):
        raise UserError(
            f"--like={config.like} is for export: pass --output=DIRECTORY, the directory to write, and not --input."
        )
    if config.output and not config.input:
        _to_output(config, config.output)
    elif config.input and not config.output:
        _from_input(config, config.input)
    else:
        raise UserError(
            "which way? Pass --output=FILE.safetensors to write a file, --input=FILE.safetensors to read one, "
            "--input=DIRECTORY to import a model in Hugging Face's format, or --output=DIRECTORY with --like to export "
            "one."
        )


def _from_input(config: CheckpointConfig, name: str):
    if os.path.isdir(name):
        _from_directory(config, pathlib.Path(name))
    elif os.path.exists(name) or name.endswith(weights_conversion.SUFFIX):
        _from_safetensors(config, name)
    else:
        raise UserError(
            f"--input={name}: there is no such file or directory; expected FILE.safetensors, or the directory of a "
            f"model in Hugging Face's format."
        )


def _to_output(config: CheckpointConfig, output: str):
    if config.model or config.assignments:
        raise UserError("--model and --set are for --input; with --output, the checkpoint says what it holds.")
    if config.like is None:
        _to_safetensors(config, output)
    else:
        _to_directory(config, output, config.like)


def _to_safetensors(config: CheckpointConfig, file: str):
    checkpoints = _existing(_logdir(config))
    step = tools.choose(checkpoints, config.step, WEIGHTS)
    weights_conversion.to_safetensors(checkpoints, step, file, config.dtype, _values(checkpoints.directory.parent))
    _logger.info("%s: weights of step %d, %s", file, step, config.dtype)


def _to_directory(config: CheckpointConfig, output: str, like: str):
    """Exports a model in Hugging Face's format."""
    if output.endswith(weights_conversion.SUFFIX):
        raise UserError(
            f"--output={output} is the name of a file, but with --like={like}, a directory is written; name one, or "
            f"leave --like out to write a file in this program's format."
        )
    if config.dtype not in export.DTYPES:
        raise UserError(
            f"--dtype={config.dtype} is not for --like={like}: pass {' or '.join(export.DTYPES)}, which Hugging Face's "
            f"library quantizes itself."
        )
    directory, where = pathlib.Path(output).absolute(), f"--logdir={_logdir(config)}"
    export.check_output(directory)
    checkpoints = _existing(_logdir(config))
    step = tools.choose(checkpoints, config.step, WEIGHTS)
    reader = Reader(checkpoints.path(step))
    found = hugging_face.describe(pathlib.Path(like), f"--like={like}")
    export.check(_trained(reader, checkpoints.directory.parent, where), where, found, f"--like={like}")
    export.write(directory, pathlib.Path(like), found, functools.partial(tools.read_finite, reader), config.dtype)
    _logger.info("%s: weights of step %d, %s, in Hugging Face's format", output, step, config.dtype)


def _trained(reader: Reader, logdir: pathlib.Path, where: str) -> export.Trained:
    """Returns the model of a checkpoint, with the hyperparameters that its log directory records."""
    recorded = hyperparameters.load(logdir) or hyperparameters.Recorded(reader.meta["model"], {})
    name, settings = recorded.resolve(where)
    return export.Trained(
        name, experiment.unchecked(name, settings).model, reader.meta["weights"], reader.tokenizer_hashes
    )


def _values(logdir: pathlib.Path) -> Mapping[str, Any] | None:
    """Returns the hyperparameters for a file of weights; None if the log directory has none."""
    recorded = hyperparameters.load(logdir)
    return recorded.portable.values if recorded else None


def _from_safetensors(config: CheckpointConfig, file: str):
    for flag, question in (("step", "which step it is of"), ("dtype", "which dtype it has")):
        if flag in config.given:
            raise UserError(f"--{flag} is for --output; with --input, the file says {question}.")
    logdir, given = _logdir(config), registry.full_name(config.model) if config.model else None
    facts = weights_conversion.facts_of_safetensors(file, f"--input={file}")
    if given in (None, facts.model):
        recorded = hyperparameters.Recorded(facts.model, facts.hyperparameters or {})
        name, settings = recorded.resolve(f"--input={file}")
    else:
        _logger.warning("--model=%s: %s has the hyperparameters of %s, which are not used.", given, file, facts.model)
        name, settings = given, ()
    trained = experiment.unchecked(name, (*settings, *config.assignments))  # the mesh does not matter here
    recorded = hyperparameters.of(name, trained).portable
    save = functools.partial(hyperparameters.save, pathlib.Path(logdir), recorded)
    step = weights_conversion.from_safetensors(file, name, weight_specs(trained.model.weights()), logdir, save)
    if facts.tokenizer_hashes is None and uses_tokenizers(trained):
        _logger.warning(
            "--input=%s does not say which tokenizers its weights were trained with; commands with --logdir=%s will "
            "not check --tokenizers.",
            file,
            logdir,
        )
    elif uses_tokenizers(trained):
        _logger.info(
            "the file has no tokenizers: pass --tokenizers=DIR, with those of the training, to later commands."
        )
    _logger.info("%s: weights of %s, step %d", logdir, name, step)


def _from_directory(config: CheckpointConfig, directory: pathlib.Path):
    """Imports a model in Hugging Face's format."""
    for flag in sorted(config.given & {"step", "dtype", "model", "set"}):
        raise UserError(f"--{flag} is not for --input={directory}: {CONFIG} there says what the model is.")
    logdir = _logdir(config)
    tools.check_new(logdir, "--logdir")
    tokenizers = pathlib.Path(logdir) / hyperparameters.OWN_TOKENIZERS
    tokenizer_files.check_new(tokenizers, f"--logdir={logdir}")
    found = hugging_face.read(directory, f"--input={directory}")
    tokenizer_hashes = list(hashes(found.tokenizers))
    origin = f"imported from {directory.resolve().name}"
    imported = experiment.unchecked(found.name, (*found.settings, f"tokenizers={tokenizers}"))

    def write_others():
        tokenizer_files.write(found.tokenizers, tokenizers, f"--logdir={logdir}")
        hyperparameters.save(pathlib.Path(logdir), hyperparameters.of(found.name, imported))

    weights_conversion.save_imported(
        logdir, found.name, weights_conversion.FileWeights(0, found.theta, tokenizer_hashes), origin, write_others
    )
    source, target = (found.tokenizers[side] for side in SIDES)
    if source.languages:
        named = "" if source.names_target else "--source_language and "
        languages = f"{counted(len(source.languages), 'language')}; `translate` takes {named}--target_language"
    elif {source.own_language, target.own_language} == {UNKNOWN_LANGUAGE}:
        languages = "an unknown language"
    else:
        languages = f"{source.own_language} and {target.own_language}"
    _logger.info("%s: weights of %s, and tokenizers of %s.", logdir, found.name, languages)


_ACTIONS = {
    "inspect": _Action(_inspect, ("logdir", "step", "grep", "stats")),
    "verify": _Action(_verify, ("logdir", "step")),
    "average": _Action(_average, ("logdir", "last", "steps", "logdirs", "output")),
    "convert": _Action(_convert, ("logdir", "step", "output", "dtype", "like", "input", "model", "set")),
}


def _logdir(config: CheckpointConfig) -> str:
    if not config.logdir:
        raise UserError("--logdir is missing: the directory of checkpoints and curves.")
    return config.logdir


def _existing(logdir: str, flag: str = "--logdir") -> Checkpoints:
    checkpoints = Checkpoints(logdir)
    if not checkpoints.steps():
        if os.path.isfile(logdir):
            raise UserError(f"{flag}={logdir} is a file; expected the log directory of a training run.")
        raise UserError(f"{flag}={logdir}: there is no checkpoint in {checkpoints.directory}.")
    return checkpoints


def _require_step(checkpoints: Checkpoints, step: int) -> int:
    if step not in checkpoints.steps():
        raise UserError(
            f"--step={step}: there is no such checkpoint; existing steps: {', '.join(map(str, checkpoints.steps()))}."
        )
    return step


def _overviews(checkpoints: Checkpoints) -> Iterator[tuple[str, ...]]:
    for step in checkpoints.steps():
        try:
            seen = tools.overview(checkpoints, step)
        except RemovedCheckpoint:  # by a training that goes on
            continue
        state = seen.problem or "complete"
        yield (
            str(step),
            f"{seen.date:%Y-%m-%d %H:%M}" if seen.date else "-",
            seen.model or "-",
            "-" if seen.weights is None else f"{seen.weights:,}",
            "-" if seen.bytes is None else f"{seen.bytes / 2**20:,.1f}",
            f"{state}, weights only: {seen.origin}" if seen.origin else state,
        )


def _statistics(reader: Reader, path: str) -> tuple[str, ...]:
    found = tools.Statistics.of(reader.read(path))
    return (*(f"{value:.4g}" for value in (found.mean, found.rms, found.least, found.greatest)), str(found.not_finite))


def _pattern(text: str | None) -> re.Pattern:
    try:
        return re.compile(text or "")
    except re.error as error:
        raise UserError(f"--grep={text}: not a regular expression ({error}).") from None


def _step_number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise UserError(f"--steps: {text!r} is not a step; expected non-negative integers separated by commas.")
    return int(text)


def _print_table(rows: list[tuple[str, ...]]):
    print("\n".join(columns.aligned(rows, has_numbers=False)))
