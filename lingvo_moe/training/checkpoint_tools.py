"""Operations on checkpoints besides training: inspect, verify, average, convert to safetensors and back."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors
from jax import numpy as jnp

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.training import (
    checkpoint_arrays,
    checkpoint_manifest,
    disk_errors,
    logdir_lock,
    quantization,
    weights_file,
)
from lingvo_moe.training.checkpoint import Checkpoints, first_difference, summary
from lingvo_moe.training.checkpoint_errors import CorruptCheckpoint, RefusedCheckpoint, check_refused, check_there
from lingvo_moe.training.checkpoint_reader import ARRAYS, WEIGHTS, Reader
from lingvo_moe.training.hyperparameters import Recorded
from lingvo_moe.training.hyperparameters import load as load_hyperparameters
from lingvo_moe.training.hyperparameters import save as save_hyperparameters
from lingvo_moe.utils import progress, temporary_directories, tensor_files

_logger = logging.getLogger(__name__)
SUFFIX = ".safetensors"
# The dtypes of safetensors files by their names there.
_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}
_INT8 = "int8"


@dataclasses.dataclass(frozen=True)
class Overview:
    """A checkpoint at a glance.

    Attributes:
      step: the training step.
      bytes: the size of its files; None if that cannot be read.
      problem: what is wrong as far as sizes and metadata show; empty for a valid checkpoint.
      model, weights, date: the registered name, the number of weights, when it was complete; None if that cannot be
        read.
      origin: where the weights come from, in a checkpoint of weights only; None for one that training wrote.
    """

    step: int
    bytes: int | None
    problem: str
    model: str | None = None
    weights: int | None = None
    date: datetime.datetime | None = None
    origin: str | None = None


class FileWeights(NamedTuple):
    """What a file of weights holds.

    Attributes:
      step: of the weights.
      theta: the weights by path, in the model's dtypes.
      readers: see `checkpoint_reader.Reader.readers`.
    """

    step: int
    theta: dict[str, np.ndarray]
    readers: list[str] | None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the finite values of an array, in float64; NaN if there is none.

    Attributes:
      mean, rms, least, greatest: of the finite values.
      not_finite: the number of other values.
    """

    mean: float
    rms: float
    least: float
    greatest: float
    not_finite: int

    @staticmethod
    def of(array: np.ndarray) -> Statistics:
        """Returns the statistics of an array of numbers."""
        values = array[np.isfinite(array)].astype(np.float64)
        not_finite = array.size - values.size
        if not values.size:
            return Statistics(np.nan, np.nan, np.nan, np.nan, not_finite)
        return Statistics(
            float(values.mean()),
            float(np.sqrt(np.mean(values**2))),
            float(values.min()),
            float(values.max()),
            not_finite,
        )


def overview(checkpoints: Checkpoints, step: int) -> Overview:
    """Returns what sizes and metadata show; reads no array. Raises RemovedCheckpoint if it is removed meanwhile."""
    try:
        return _overview(checkpoints.path(step), step)
    except RefusedCheckpoint as error:
        return Overview(step, None, f"cannot be read ({error.why})")


def _overview(directory: pathlib.Path, step: int) -> Overview:
    found = checkpoint_manifest.problems(directory, hashes=False)
    problem = f"no {checkpoint_manifest.MANIFEST}" if found is None else summary(found) if found else ""
    try:
        size = checkpoint_manifest.size(directory)
    except OSError as error:
        check_there(directory)
        check_refused(directory, error)
        raise
    try:
        reader = Reader(directory)
        meta, date = reader.meta, reader.date()
    except CorruptCheckpoint as error:
        return Overview(step, size, problem or str(error))
    weights = sum(int(np.prod(shape)) for shape in meta["weights"].values())
    return Overview(step, size, problem, meta["model"], weights, date, meta.get("origin"))


def verify(checkpoints: Checkpoints, step: int) -> list[str]:
    """Compares every file with the manifest and reads every array, whose checksums are verified.

    Returns:
      One line for each file or array that is corrupt, missing or not finite; empty for a valid checkpoint.

    Raises:
      RemovedCheckpoint: it was removed meanwhile.
      RefusedCheckpoint: it cannot be read for a reason that may pass.
    """
    directory = checkpoints.path(step)
    reader = Reader(directory)
    found = checkpoint_manifest.problems(directory) or []
    found += reader.problems(finite=True)
    if not found and (manifest := checkpoint_manifest.load(directory)) and manifest.arrays != len(reader.specs()):
        found.append(f"there are {len(reader.specs())} arrays instead of {manifest.arrays}")
    return found


def choose(checkpoints: Checkpoints, step: int | None, items: tuple[str, ...] | None = None) -> int:
    """Returns `step`, or the newest valid one for None; raises UserError if it is absent or corrupt."""
    step = checkpoints.latest(items) if step is None else step
    if step not in checkpoints.steps():
        there = ", ".join(map(str, checkpoints.steps())) or "none"
        raise UserError(
            f"{checkpoints.directory}: there is no checkpoint{'' if step is None else f' of step {step}'}. Existing "
            f"steps: {there}."
        )
    if found := checkpoints.problems(step, items):
        check_there(checkpoints.path(step))
        raise UserError(f"{checkpoints.path(step)} is corrupt: {summary(found)}. Choose another step.")
    return step


def average(checkpoints: Checkpoints, steps: list[int], output: str | pathlib.Path):
    """Writes the mean of the weights of several steps as the log directory `output`, under the newest step's number.

    The mean is computed in float64, array by array, and saved in float32.

    Args:
      checkpoints: to read from.
      steps: two or more.
      output: the log directory to write.

    Raises:
      UserError: a step is absent or corrupt, the models differ, or `output` has checkpoints.
    """
    if len(steps) < 2 or len(set(steps)) < len(steps):
        raise UserError(f"--steps={','.join(map(str, steps))}: expected two or more different steps.")
    origin = f"average of steps {', '.join(map(str, steps))}"
    _average({f"step {step}": (checkpoints, step) for step in steps}, output, origin)


def average_logdirs(logdirs: Mapping[str, Checkpoints], output: str | pathlib.Path):
    """Writes the mean of the newest weights of several log directories as the log directory `output`.

    As `average`, of training runs that began with the same weights (Wortsman et al. 2022, "Model soups").

    Args:
      logdirs: two or more by name, each with a checkpoint.
      output: the log directory to write.

    Raises:
      UserError: a log directory has no valid checkpoint, the models differ, or `output` has checkpoints.
    """
    if len(logdirs) < 2:
        raise UserError(f"--logdirs={','.join(logdirs)}: expected two or more different log directories.")
    members = {name: (checkpoints, choose(checkpoints, None, WEIGHTS)) for name, checkpoints in logdirs.items()}
    steps = ", ".join(str(step) for _, step in members.values())
    _average(members, output, f"average of {len(logdirs)} log directories, steps {steps}")


def _average(members: Mapping[str, tuple[Checkpoints, int]], output: str | pathlib.Path, origin: str):
    check_new(output, "--output")
    read = {name: Reader(each.path(choose(each, step, WEIGHTS))) for name, (each, step) in members.items()}
    _check_one_model(read)
    recorded = _common_hyperparameters(members)
    readers = _common_readers(read)
    meta = next(iter(read.values())).meta
    shapes, theta = meta["weights"], {}
    for path in progress.track(sorted(shapes), f"averaging {len(read)} checkpoints", unit="arrays"):
        total = np.zeros(shapes[path], np.float64)
        for reader in read.values():
            total += read_finite(reader, path)
        theta[path] = (total / len(read)).astype(np.float32)
    newest = max(step for _, step in members.values())
    with _new_checkpoints(output, "--output") as target:
        target.save_weights(newest, meta["model"], tree.unflatten(theta), origin, readers)
        target.wait()
        if recorded is not None:
            save_hyperparameters(pathlib.Path(output), recorded)


def _check_one_model(members: Mapping[str, Reader]):
    """Raises UserError if members are of several models; the name says more than a field that differs."""
    (first_name, first), *others = members.items()
    model = first.meta["model"]
    for name, member in others:
        if member.meta["model"] != model:
            raise UserError(
                f"{first_name} is of {model}, {name} of {member.meta['model']}; the mean is of one model, so name "
                f"checkpoints of the same one."
            )


def _common_hyperparameters(members: Mapping[str, tuple[Checkpoints, int]]) -> Recorded | None:
    """Returns the hyperparameters of the first log directory that has them; raises UserError if models differ."""
    found = {name: load_hyperparameters(each.directory.parent) for name, (each, _) in members.items()}
    knowing = {name: recorded for name, recorded in found.items() if recorded is not None}
    models = {name: recorded.completed.of_weights for name, recorded in knowing.items()}
    for name, model in models.items():
        if model != (first := next(iter(models.values()))):
            raise UserError(
                f"{name}: its hyperparameters are not those of {next(iter(models))}: {first_difference(model, first)}. "
                f"The mean is of one model."
            )
    return next(iter(knowing.values()), None)


def _common_readers(members: Mapping[str, Reader]) -> list[str] | None:
    """Returns `Reader.readers` of those members that have them.

    Raises:
      UserError: weights or readers differ.
    """
    (first_name, first), *_ = members.items()
    shapes = first.meta["weights"]
    knowing = [member for member in members.values() if member.readers is not None]
    for member in members.values():
        if member.meta["weights"] != shapes:
            raise UserError(
                f"{member.directory}: its weights are not those of {first_name}: "
                f"{first_difference(member.meta['weights'], shapes)}."
            )
    for member in knowing:
        if member.readers != knowing[0].readers:
            raise UserError(
                f"{member.directory} was trained with other tokenizers than {knowing[0].directory}, so its numbers "
                f"stand for other pieces. Leave one of them out."
            )
    return knowing[0].readers if knowing else None


def to_safetensors(
    checkpoints: Checkpoints,
    step: int,
    file: str | pathlib.Path,
    dtype: str = "float32",
    hyperparameters: Mapping[str, Any] | None = None,
):
    """Writes the weights of a step under their paths, with `weights_file.metadata`.

    Args:
      checkpoints: of a log directory.
      step: the one to read.
      file: to write.
      dtype: of the weights in the file. `bfloat16` halves it and rounds each weight to 8 significant bits; `int8`
        quarters it, see `quantization`.
      hyperparameters: see `weights_file.Facts`.

    Raises:
      UserError: the step is absent or corrupt, its weights are not finite and `dtype` is `int8`, or the file exists or
        cannot be written there.
    """
    _check_suffix(f"--output={file}", file, "With --like, the directory of an imported model, a directory is written.")
    if pathlib.Path(file).exists():
        raise UserError(f"--output={file} exists already; name a new file, or delete this one first.")
    if not pathlib.Path(file).absolute().parent.is_dir():
        raise UserError(f"--output={file}: there is no directory {pathlib.Path(file).parent}; create it first.")
    reader = Reader(checkpoints.path(choose(checkpoints, step, WEIGHTS)))
    paths = [path.removeprefix(ARRAYS["theta"]) for path in reader.specs(WEIGHTS)]
    theta = {
        path: np.asarray(_read_weight(reader, path), None if dtype == _INT8 else jnp.dtype(dtype), order="C")
        for path in progress.track(paths, f"reading step {step}", unit="arrays")
    }
    _check_finite(theta, reader.directory, dtype)
    if dtype == _INT8:
        theta = quantization.quantize(theta)
    facts = weights_file.Facts(reader.meta["model"], step, reader.readers, hyperparameters)
    tensor_files.save(f"--output={file}", file, theta, weights_file.metadata(facts))


def from_safetensors(
    file: str | pathlib.Path, model: str, specs: Mapping[str, object], logdir: str | pathlib.Path
) -> int:
    """Writes the log directory `logdir` with the weights of --input, a file that `to_safetensors` wrote.

    They are copied bit for bit; `verify` and what uses weights refuse values that are not finite.

    Args:
      file: the file to read.
      model: the registered name.
      specs: the tree of the `Spec`s of the model's weights.
      logdir: the log directory to write.

    Returns:
      The step of the weights.

    Raises:
      UserError: no such file, one of other weights, or `logdir` has checkpoints.
    """
    check_new(logdir, "--logdir")
    found = read_safetensors(file, model, specs, f"--input={file}")
    with _new_checkpoints(logdir, "--logdir") as target:
        _save_converted(target, model, found, pathlib.Path(file))
    return found.step


def save_imported(
    logdir: str | pathlib.Path, model: str, found: FileWeights, origin: str, write_others: Callable[[], None]
):
    """Writes a new log directory with weights of another program; the checkpoint comes last, so that none lacks a file.

    Args:
      logdir: the log directory to write, `--logdir`.
      model: the registered name.
      found: the weights.
      origin: where they come from, which `checkpoint inspect` shows.
      write_others: writes the other files of `logdir`, which exists then, and in which nothing else saves meanwhile.

    Raises:
      UserError: `logdir` has checkpoints, or cannot be written.
    """
    with _new_checkpoints(logdir, "--logdir") as target:
        write_others()
        target.save_weights(found.step, model, tree.unflatten(found.theta), origin, found.readers)


def read_safetensors(
    file: str | pathlib.Path, model: str, specs: Mapping[str, object], name: str, remedy: str = ""
) -> FileWeights:
    """Reads a file that `to_safetensors` wrote.

    Args:
      file: the file to read.
      model: the registered name.
      specs: the tree of the `Spec`s of the model's weights.
      name: what messages call the file, like `--input=FILE`.
      remedy: what the message about other weights advises besides another --model, --set or file.

    Raises:
      UserError: no such file, or one of other weights.
    """
    with _opened(file, name) as opened:
        facts = weights_file.facts(name, opened)
        flat = tree.flatten(specs)
        _check_tensors(name, opened, model, flat, remedy)
        theta = {
            path: weights_file.read_tensor(opened, path).astype(flat[path].dtype, copy=False)
            for path in progress.track(sorted(flat), f"reading {pathlib.Path(file).name}", unit="arrays")
        }
        return FileWeights(facts.step, theta, facts.readers)


def facts_of_safetensors(file: str | pathlib.Path, name: str) -> weights_file.Facts:
    """Returns the metadata of a file that `to_safetensors` wrote; arguments and errors as of `read_safetensors`."""
    with _opened(file, name) as opened:
        return weights_file.facts(name, opened)


@contextlib.contextmanager
def _opened(file: str | pathlib.Path, name: str) -> Iterator[safetensors.safe_open]:
    _check_suffix(name, file)
    if not pathlib.Path(file).is_file():
        raise UserError(f"{name}: there is no such file.")
    try:
        with safetensors.safe_open(file, "numpy") as opened:
            yield opened
    except safetensors.SafetensorError as error:
        raise UserError(f"{name}: not a complete safetensors file ({error}).") from None


@contextlib.contextmanager
def as_logdir(file: pathlib.Path, model: str, specs: Mapping[str, object]) -> Iterator[pathlib.Path]:
    """Yields a temporary log directory with the weights of a file; no message names the directory.

    Raises:
      UserError: as `read_safetensors`, weights are not finite, or the temporary directory cannot be written to.
    """
    found = read_safetensors(file, model, specs, str(file))
    checkpoint_arrays.check_finite(found.theta, str(file), "use another file")
    with temporary_directories.make("lingvo_moe-") as logdir:
        try:
            with contextlib.closing(Checkpoints(logdir, keep=1)) as target:
                _save_converted(target, model, found, file)
        except UserError:
            raise UserError(
                f"{tempfile.gettempdir()}: a temporary copy of {file} could not be written there. Free disk space, or "
                f"set TMPDIR to another directory."
            ) from None
        yield logdir


def _check_finite(theta: Mapping[str, np.ndarray], directory: pathlib.Path, dtype: str):
    """Warns of weights that are not finite; raises UserError for those that become int8."""
    remedy = "what uses such weights refuses them, so choose another step"
    problem = checkpoint_arrays.finite_problem(dict(theta), str(directory), remedy)
    if problem is not None and dtype == _INT8:
        raise UserError(problem)
    if problem is not None:
        _logger.warning("%s", problem)


def _save_converted(target: Checkpoints, model: str, found: FileWeights, file: pathlib.Path):
    origin = f"converted from {file.name}"
    target.save_weights(found.step, model, tree.unflatten(found.theta), origin, found.readers)


def read_finite(reader: Reader, path: str) -> np.ndarray:
    """Returns the weight with this path; raises UserError if it is corrupt or not finite."""
    weight = _read_weight(reader, path)
    checkpoint_arrays.check_finite({path: weight}, f"{reader.directory}", "choose another step")
    return weight


def _read_weight(reader: Reader, path: str) -> np.ndarray:
    try:
        return reader.read(ARRAYS["theta"] + path)
    except CorruptCheckpoint as error:
        raise UserError(f"{reader.directory} is corrupt: {error}. Choose another step.") from None


def _check_tensors(name: str, opened: safetensors.safe_open, model: str, specs: Mapping[str, Spec], remedy: str):
    """Raises UserError if names, shapes or dtypes are not those of the model; smaller dtypes stand for float32 too."""
    stored = {path: opened.get_slice(path) for path in list(opened.keys())}  # the object is no dict
    there = {path: _describe(_dtype(each), each.get_shape()) for path, each in stored.items()}
    here = {path: _describe(spec.dtype, spec.shape) for path, spec in specs.items()}
    for path in there.keys() & {path for path, spec in specs.items() if spec.dtype == "float32"}:
        shape = stored[path].get_shape()
        if _dtype(stored[path]) == "bfloat16":  # each is a float32 as well
            there[path] = _describe("float32", shape)
        if _dtype(stored[path]) == _INT8 and there.get(path + quantization.SCALE) == _describe("float32", shape[:-1]):
            there[path] = _describe("float32", shape)
            del there[path + quantization.SCALE]
    if there != here:
        raise UserError(
            f"{name} does not hold the weights of {model}: {first_difference(there, here)}. Pass that "
            f"--model (with the --set it was trained with), or another file.{remedy and f' {remedy}'}"
        )


def _dtype(stored: Any) -> str:
    """Returns the dtype's name in NumPy of a tensor in a safetensors file."""
    name: str = stored.get_dtype()
    return _DTYPES.get(name, name)


def _describe(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype} {list(shape)}"


def _check_suffix(name: str, file: str | pathlib.Path, remedy: str = ""):
    if pathlib.Path(file).suffix != SUFFIX or pathlib.Path(file).is_dir():
        raise UserError(f"{name}: expected the name of a file that ends with {SUFFIX}.{remedy and f' {remedy}'}")


@contextlib.contextmanager
def _new_checkpoints(logdir: str | pathlib.Path, flag: str) -> Iterator[Checkpoints]:
    """Yields the checkpoints of a new log directory, in which nothing else saves meanwhile, and closes them.

    Raises:
      UserError: there are checkpoints in it, or a training, or nothing can be written there.
    """
    path = pathlib.Path(logdir).absolute()
    disk_errors.require_directory(f"{flag}={logdir}", path, flag)
    with logdir_lock.locked(path, flag), contextlib.closing(Checkpoints(path, keep=1)) as checkpoints:
        check_new(logdir, flag)
        yield checkpoints


def check_new(logdir: str | pathlib.Path, flag: str):
    """Raises UserError if there are checkpoints in a log directory, or nothing can be written to it; makes nothing."""
    path = pathlib.Path(logdir).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise UserError(f"{flag}={logdir}: {there} is a file; expected a directory, or a name for a new one.")
    disk_errors.require_directory(f"{flag}={logdir}", there, flag)
    if Checkpoints(logdir).steps():  # not what a write that failed has left, which the next one removes
        raise UserError(f"{flag}={logdir} already has checkpoints; name a new directory.")
