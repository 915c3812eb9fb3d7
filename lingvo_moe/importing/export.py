"""Writes an imported model, which may have been trained further, in Hugging Face's format again.

Only the weights are ours. Their files, names and shapes are those that `save_pretrained` of Hugging Face's library
writes: without copies of the shared table and without sinusoids. Configuration and tokenizer are copied from the
directory that the model was imported from, and the model must be of these.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import numpy as jnp

from lingvo_moe.data.tokenizer import hashes
from lingvo_moe.errors import UserError
from lingvo_moe.importing.hugging_face import REGISTERED, Described
from lingvo_moe.importing.model_directory import CONFIG, FILE, INDEX
from lingvo_moe.importing.weights import Place, Places
from lingvo_moe.utils import output_directories, progress, tensor_files

_logger = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16")
MAX_FILE_BYTES = 5 * 10**9  # of the weights of a file, as Hugging Face's library has it; a larger tensor has its own
COPIED = (
    CONFIG,
    "generation_config.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "source.spm",
    "target.spm",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
# Fields on which the results of a model depend, and that all imported models of a family have alike.
_COMMON_FIELDS = (
    "biases",
    "norm_epsilon",
    "post_norm",
    "position_offset",
    "wavelengths",
    "logits_bias",
    "norm",
    "router",
    "tied_embeddings",
    "tied_softmax",
)


class Trained(NamedTuple):
    """The model of a log directory.

    Attributes:
      name: the registered name.
      model: with the hyperparameters of its training.
      shapes: of the weights in its checkpoint, by path.
      tokenizer_hashes: see `checkpoint_reader.Reader.tokenizer_hashes`.
    """

    name: str
    model: Any
    shapes: Mapping[str, Sequence[int]]
    tokenizer_hashes: Sequence[str] | None


def check(trained: Trained, where: str, like: Described, like_name: str):
    """Raises UserError unless a model is that of a directory, but for its weights.

    Args:
      trained: the model.
      where: what messages call its log directory, like `--logdir=LOGDIR`.
      like: the model of the directory.
      like_name: what messages call the directory, like `--like=DIR`.
    """
    remedy = "name the directory that the model was imported from"
    if trained.name.partition(".")[0] not in REGISTERED:
        raise UserError(
            f"{where} is of {trained.name}; only the models {', '.join(f'{family}.*' for family in REGISTERED)} have "
            f"a form in Hugging Face's format. Without --like, --output=FILE.safetensors writes the weights."
        )
    for field in (*like.fields, *_COMMON_FIELDS):
        if (ours := getattr(trained.model, field)) != (theirs := getattr(like.model, field)):
            raise UserError(
                f"{where}: model.{field} is {ours!r}, but that of {like_name}, as it is imported, is {theirs!r}; "
                f"{remedy}."
            )
    for path, spec in like.places.specs.items():
        if list(shape := trained.shapes.get(path, ())) != list(spec.shape):
            raise UserError(
                f"{where}: the weight {path} has the shape {list(shape)}, but that of {like_name} has "
                f"{list(spec.shape)}; {remedy}."
            )
    if trained.tokenizer_hashes is None:
        _logger.warning(
            "%s does not say which tokenizer its weights were trained with; %s is trusted.", where, like_name
        )
    elif tuple(trained.tokenizer_hashes) != hashes(like.tokenizers):
        raise UserError(f"{where}: its weights are those of another tokenizer than that of {like_name}; {remedy}.")


def check_output(output: pathlib.Path):
    """Raises UserError unless `output`, an absolute path, is an empty directory or the name of a new one."""
    output_directories.recover("--output", output, _check_empty)
    _check_empty(output)


def write(
    output: pathlib.Path, directory: pathlib.Path, like: Described, read: Callable[[str], np.ndarray], dtype: str
):
    """Writes a directory, completely or not at all.

    One weight and one file of weights are in memory at a time.

    Args:
      output: the directory to make, a path that `check_output` accepts.
      directory: that of `like`, from which the files COPIED come, if they are there.
      like: what it says of the model.
      read: returns the weight with a path.
      dtype: of the weights in the files, one of DTYPES.

    Raises:
      UserError: nothing can be written there, or the disk is full.
    """
    name, files = f"--output={output}", _by_file(like.places, jnp.dtype(dtype).itemsize)
    output_directories.check("--output", output)
    with (
        output_directories.atomic_directory(output, _check_empty) as partial,
        progress.bar("writing", len(like.places.specs), unit="arrays") as advance,
    ):
        for file in COPIED:
            if (directory / file).exists():
                shutil.copyfile(directory / file, partial / file)
        if len(files) > 1:
            _write_index(partial / INDEX, files, jnp.dtype(dtype).itemsize)
        tensors = _tensors(like.places, read, jnp.dtype(dtype), advance)
        for file, places in files.items():
            # As an argument alone, the tensors are freed before those of the next file are made.
            tensor_files.save(name, partial / file, dict(itertools.islice(tensors, len(places))), {"format": "pt"})


def _check_empty(output: pathlib.Path):
    output_directories.check_empty("--output", str(output))


def _by_file(places: Places, itemsize: int) -> dict[str, list[Place]]:
    """Returns the tensors of each file, in the order of `_tensors`."""
    groups: list[list[Place]] = [[]]
    size = 0
    for place in itertools.chain.from_iterable(map(places.of, places.specs)):
        added = math.prod(place.shape) * itemsize
        if groups[-1] and size + added > MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(place)
        size += added
    if len(groups) == 1:
        return {FILE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _write_index(path: pathlib.Path, files: Mapping[str, list[Place]], itemsize: int):
    count = sum(math.prod(place.shape) for places in files.values() for place in places)
    index = {
        "metadata": {"total_parameters": count, "total_size": count * itemsize},
        "weight_map": {place.tensor: file for file, places in files.items() for place in places},
    }
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tensors(
    places: Places, read: Callable[[str], np.ndarray], dtype: np.dtype, advance: Callable[[], None]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the values of each tensor."""
    for path in places.specs:
        weight = read(path)
        advance()
        for place in places.of(path):
            yield place.tensor, place.from_ours(weight, dtype)
        del weight  # before the next one is read: the largest have 52 GB
