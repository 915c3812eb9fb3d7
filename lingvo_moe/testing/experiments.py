"""For tests of training, inference and the command line: a generated corpus, its tokenizers, and tiny models."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lingvo_moe import experiment, program_cache
from lingvo_moe.data.corpora import corpus_builder
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.engines.compilation import use_compilation_cache
from lingvo_moe.engines.pjrt import Engine, Executable
from lingvo_moe.experiment import Experiment
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.steps import Steps

if TYPE_CHECKING:
    import pytest  # tools.soak and tools.fuzz use this module without it

MODEL = "m4.Quickstart"
LANGUAGE_MODEL = "sparse_lm.Small"
WORDS = (
    "red blue green old new big small house tree river stone bird horse child letter window garden table road bread "
    "water fire music winter summer morning evening carries finds sees keeps paints buys sells opens the a every"
).split()
# As small as all kinds of layers allow: an encoder of one dense layer, a decoder of one layer with experts. A step
# takes milliseconds, and compiling it some seconds.
_SETTINGS = (
    "model.num_layers=2",
    "model.encoder_layer_pattern=dense",
    "model.layer_pattern=moe",
    "model.model_dim=16",
    "model.hidden_dim=32",
    "model.num_heads=2",
    "model.head_dim=8",
    "model.num_experts=4",
    "model.num_groups=4",
    "model.source_vocabulary=512",
    "model.target_vocabulary=256",
    "model.tied_embeddings=false",
    "model.input_dropout=0.1",
    "model.residual_dropout=0.2",
    "model.word_dropout=0.3",
    "model.label_smoothing=0.1",
    "optimizer.beta1=0",
    "optimizer.learning_rate.peak_value=0.05",
    "optimizer.learning_rate.decay_after=400",
    "optimizer.learning_rate.warmup_steps=100",
    "optimizer.learning_rate.cooldown_after=2200",
    "optimizer.learning_rate.cooldown_steps=800",
    "input.batch_size=4",
    "input.source_length=48",
    "input.target_length=32",
    "decoding_batch=4",
    "search.beam_size=2",
    "search.max_length=12",
    "training.log_every=1",
    "training.evaluation_batches=2",
    "training.keep=2",
    "platform=cpu",
)
# The same for a language model. Its one layer is traced and compiled in half the time of the registered four.
_LANGUAGE_MODEL_SETTINGS = (
    "model.num_layers=1",
    "model.layer_pattern=moe",
    "model.model_dim=16",
    "model.hidden_dim=32",
    "model.num_heads=2",
    "model.head_dim=8",
    "model.num_experts=4",
    "model.num_groups=4",
    "model.target_vocabulary=256",
    "model.unroll=true",
    "model.remat=none",
    "input.batch_size=4",
    "input.target_length=32",
    "decoding_batch=4",
    "search.beam_size=2",
    "search.max_length=12",
    "training.log_every=1",
    "training.evaluation_batches=2",
    "training.keep=2",
    "optimizer.learning_rate.warmup_steps=10",
    "platform=cpu",
)


_MOST_EXECUTABLES = 6  # in memory; each takes some 50 MB


@dataclasses.dataclass(frozen=True)
class Data:
    """Directories of a small corpus of two synthetic languages and of its tokenizers."""

    corpus: pathlib.Path
    tokenizers: pathlib.Path


def make_data(directory: pathlib.Path) -> Data:
    """Generates a corpus (English words, reversed as `de` and rotated as `fr`) and trains tokenizers on it."""
    random = np.random.RandomState(0)
    texts = directory / "texts"
    texts.mkdir(parents=True)
    english = [" ".join(random.choice(WORDS, random.randint(2, 8))) for _ in range(600)]
    for language, spell in (("de", lambda word: word[::-1]), ("fr", lambda word: f"{word[1:]}{word[0]}ux")):
        lines = [f"{' '.join(map(spell, line.split()))}\t{line}\n" for line in english]
        (texts / f"{language}.tsv").write_text("".join(lines), encoding="utf-8")
    corpus, _ = corpus_builder.build("none", [texts], directory / "corpus")
    tokenizer_trainer.train(corpus, directory / "tokenizers", {"source": 500, "target": 200}, 5.0, 5000)
    return Data(directory / "corpus", directory / "tokenizers")


def settings(*changes: str) -> list[str]:
    """Returns flags that make `m4.Quickstart` tiny; `changes` are further `field=value`s."""
    return [f"--model={MODEL}", "--devices=2", *(f"--set={assignment}" for assignment in (*_SETTINGS, *changes))]


def tiny(data: Data, *changes: str, mesh: DeviceMesh = DeviceMesh((2,))) -> Experiment:
    """Returns the experiment of `settings`, on `data`."""
    directories = (f"corpus={data.corpus}", f"tokenizers={data.tokenizers}")
    return experiment.get(MODEL, [*_SETTINGS, *directories, *changes], mesh)


def tiny_language_model(data: Data, *changes: str, mesh: DeviceMesh = DeviceMesh((2,))) -> Experiment:
    """Returns the experiment of a language model with experts, as small as `tiny`."""
    directories = (f"corpus={data.corpus}", f"tokenizers={data.tokenizers}")
    return experiment.get(LANGUAGE_MODEL, [*_LANGUAGE_MODEL_SETTINGS, *directories, *changes], mesh)


def language_model_settings(*changes: str) -> list[str]:
    """Returns the flags of `tiny_language_model`."""
    return [f"--model={LANGUAGE_MODEL}", "--devices=2", *(f"--set={a}" for a in (*_LANGUAGE_MODEL_SETTINGS, *changes))]


def compile_once(patch: pytest.MonkeyPatch):
    """Makes this process lower and compile equal programs only once, and not if another test file has done so already.

    `conftest.py` makes the cache directory, and deletes it. In memory, programs and the last executables are kept until
    the patch ends.
    """
    programs: dict[str, Program] = {}
    executables: dict[tuple, Executable] = {}
    patch.setattr(program_cache._settings, "directory", None)  # restored when the patch ends
    program_cache.use(program_cache.default())
    if directory := program_cache.executables():
        use_compilation_cache(directory)
    for name in ("init", "train", "evaluate", "diagnose", "decode", "segment"):
        patch.setattr(Steps, name, _lowering_once(getattr(Steps, name), programs))
    compile_program = Engine.compile

    def compile_once(self, program: Program) -> Executable:
        key = (*self.devices, program)
        if key not in executables:
            if len(executables) == _MOST_EXECUTABLES:
                del executables[next(iter(executables))]
            executables[key] = compile_program(self, program)
        return executables[key]

    patch.setattr(Engine, "compile", compile_once)


def _lowering_once(lower: Callable[..., Program], programs: dict[str, Program]) -> Callable[..., Program]:
    def lower_once(self, *arguments) -> Program:
        key = f"{lower.__name__} of {self} for {arguments}"
        if key not in programs:
            programs[key] = lower(self, *arguments)
        return programs[key]

    return lower_once


class Uncompiled(Engine):
    """An engine for tests of errors that must be raised before anything is compiled."""

    def compile(self, program: Program) -> Any:
        """Fails the test."""
        raise AssertionError(f"{program.name} was compiled before the error was raised")


def curves(logdir: pathlib.Path, run: str = "train") -> dict[str, dict[int, set[float]]]:
    """Reads curves as TensorBoard does; returns every value that was reported, by scalar and step."""
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.util import tensor_util

    values: dict[str, dict[int, set[float]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for path in sorted((logdir / run).iterdir()):
        for event in event_file_loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                values[value.tag][event.step].add(tensor_util.make_ndarray(value.tensor).item())
    return values
