"""What tests of training, inference and the command line share: a generated corpus, its tokenizers, and a tiny model."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from lingvo_moe.data import corpus_builder, tokenizer_trainer
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.experiment import Experiment, TrainingSchedule
from lingvo_moe.layout import DeviceMesh
from lingvo_moe.models.translation import Translation

WORDS = ("red blue green old new big small house tree river stone bird horse child letter window garden table road bread "
         "water fire music winter summer morning evening carries finds sees keeps paints buys sells opens the a every").split()
SETTINGS = {"model.num_layers": 4, "model.model_dim": 16, "model.hidden_dim": 32, "model.num_heads": 2, "model.head_dim": 8,
            "model.num_experts": 4, "model.num_groups": 4, "model.source_vocabulary": 512, "model.target_vocabulary": 256,
            "input.batch_size": 4, "input.source_length": 48, "input.target_length": 32, "decoding_batch": 4,
            "search.beam_size": 2, "search.max_length": 12}


@dataclasses.dataclass(frozen=True)
class Data:
    """Directories of a small corpus of two made-up languages and of its tokenizers."""

    corpus: pathlib.Path
    tokenizers: pathlib.Path


def make_data(directory: pathlib.Path) -> Data:
    """Generates the corpus (English words, spelt backwards, and turned around) and trains tokenizers on it."""
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


def tiny(data: Data, mesh: DeviceMesh = DeviceMesh((2,)), **schedule: int) -> Experiment:
    """An experiment that compiles and steps in seconds; `schedule` are fields of `TrainingSchedule`."""
    sizes = {path.split(".")[-1]: value for path, value in SETTINGS.items()}

    def pick(*names: str) -> dict:
        return {name: sizes[name] for name in names}

    model = Translation(residual_dropout=0.1, word_dropout=0.1, **pick(
        "num_layers", "model_dim", "hidden_dim", "num_heads", "head_dim", "num_experts", "num_groups", "source_vocabulary",
        "target_vocabulary"))
    return Experiment(
        model=model, input=InputConfig(**pick("batch_size", "source_length", "target_length")),
        search=BeamSearch(**pick("beam_size", "max_length")), decoding_batch=sizes["decoding_batch"], mesh=mesh,
        training=TrainingSchedule(**{"steps": 12, "log_every": 1, "evaluate_every": 6, "evaluation_batches": 2,
                                     "checkpoint_every": 4, "keep": 2, **schedule}),
        corpus=str(data.corpus), tokenizers=str(data.tokenizers))


def flags(data: Data) -> list[str]:
    """Flags that make `m4.Quickstart` such an experiment."""
    return ["--model=m4.Quickstart", f"--tokenizers={data.tokenizers}", "--set=model.unroll=false",
            *(f"--set={path}={value}" for path, value in SETTINGS.items())]
