"""Weights from and into files: safetensors, and those of other programs."""

from __future__ import annotations

import contextlib
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
from lingvo_moe.training import checkpoint_arrays, quantization, weights_file
from lingvo_moe.training.checkpoint import Checkpoints, first_difference
from lingvo_moe.training.checkpoint_reader import ARRAYS, WEIGHTS, Reader
from lingvo_moe.training.checkpoint_tools import check_new, choose, new_checkpoints, read_weight
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


class FileWeights(NamedTuple):
    """What a file of weights holds.

    Attributes:
      step: of the weights.
      theta: the weights by path, in the model's dtypes.
      tokenizer_hashes: see `checkpoint_reader.Reader.tokenizer_hashes`.
    """

    step: int
    theta: dict[str, np.ndarray]
    tokenizer_hashes: list[str] | None


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
        path: np.asarray(read_weight(reader, path), None if dtype == _INT8 else jnp.dtype(dtype), order="C")
        for path in progress.track(paths, f"reading step {step}", unit="arrays")
    }
    _check_finite(theta, reader.directory, dtype)
    if dtype == _INT8:
        theta = quantization.quantize(theta)
    facts = weights_file.Facts(reader.meta["model"], step, reader.tokenizer_hashes, hyperparameters)
    tensor_files.save(f"--output={file}", file, theta, weights_file.metadata(facts))


def from_safetensors(
    file: str | pathlib.Path,
    model: str,
    specs: Mapping[str, object],
    logdir: str | pathlib.Path,
    write_others: Callable[[], None] = lambda: None,
) -> int:
    """Writes the log directory `logdir` with the weights of --input, a file that `to_safetensors` wrote.

    The checkpoint comes last, so that none lacks a file. Weights are copied bit for bit; `verify` and what uses weights
    refuse values that are not finite.

    Args:
      file: the file to read.
      model: the registered name.
      specs: the tree of the `Spec`s of the model's weights.
      logdir: the log directory to write.
      write_others: writes the other files of `logdir`, which exists then, and in which nothing else saves meanwhile.

    Returns:
      The step of the weights.

    Raises:
      UserError: no such file, one of other weights, or `logdir` has checkpoints.
    """
    check_new(logdir, "--logdir")
    found = read_safetensors(file, model, specs, f"--input={file}")
    with new_checkpoints(logdir, "--logdir") as target:
        write_others()
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
    with new_checkpoints(logdir, "--logdir") as target:
        write_others()
        target.save_weights(found.step, model, tree.unflatten(found.theta), origin, found.tokenizer_hashes)


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
        return FileWeights(facts.step, theta, facts.tokenizer_hashes)


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
    target.save_weights(found.step, model, tree.unflatten(found.theta), origin, found.tokenizer_hashes)


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
