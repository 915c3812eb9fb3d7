"""The files of docs/extending.md work as they are printed, from a directory outside the repository."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lingvo_moe import experiment, registry, tree
from lingvo_moe.cli import app, main
from lingvo_moe.data.corpora import sources
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.engines.registry import ENGINES
from lingvo_moe.extensions import import_module
from lingvo_moe.layers.base import Context, Weight
from lingvo_moe.layers.feed_forward import FEED_FORWARDS
from lingvo_moe.layers.routers.base import ROUTERS
from lingvo_moe.lazy import tf
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import LAYOUTS
from lingvo_moe.testing import experiments, harness
from lingvo_moe.training.callbacks import CALLBACKS
from lingvo_moe.training.checkpoint_reader import Reader
from tools import build_corpus

pytestmark = pytest.mark.slow

_DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "extending.md"
FILES = dict(
    re.findall(
        r"^`(\w+\.py)`\n\n```python\n(.*?)^```$", _DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
)


_PAIRS = (
    re.search(r"^`pairs.jsonl`\n\n```json\n(.*?)^```$", _DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL) or ""
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Iterator[pathlib.Path]:
    """The files of the document; what they register is removed again."""
    directory = tmp_path_factory.mktemp("extensions")
    for name, text in FILES.items():
        (directory / name).write_text(text, encoding="utf-8")
    registry.names()  # imports the models of the repository
    with contextlib.ExitStack() as stack:
        for extensions in (registry.MODELS, LAYOUTS, FEED_FORWARDS, ROUTERS, sources.PRESETS, CALLBACKS, ENGINES):
            stack.enter_context(extensions.isolated())
        yield directory


@pytest.fixture(scope="module")
def corpus(directory) -> Corpus:
    """A corpus that `tools.build_corpus` reads through the document's data source, and tokenizers beside it."""
    random = np.random.RandomState(0)
    with (directory / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(600):
            english = " ".join(random.choice(experiments.WORDS, random.randint(2, 8)))
            file.write(json.dumps({"language": "de", "source": english[::-1], "english": english}) + "\n")
    arguments = [
        "build_corpus",
        f"--import={directory}/json_lines.py",
        "--preset=json_lines",
        f"--output={directory}/corpus",
    ]
    assert app.execute(build_corpus.main, arguments, build_corpus.FLAGS) == 0
    corpus = Corpus.open(directory / "corpus")
    tokenizer_trainer.train(corpus, directory / "tokenizers", {"source": 500, "target": 200}, 5.0, 5000)
    return corpus


def test_every_extension_is_one_short_file():
    """One file each, under 60 lines."""
    extensions = {"penalized.py", "fully_sharded.py", "swiglu.py", "sigmoid.py", "json_lines.py"}
    assert FILES.keys() == extensions | {"slow_steps.py", "dump_hlo.py", "adamw.py"}
    assert all(len(text.splitlines()) < 60 for text in FILES.values())


def test_data_source(corpus):
    """The builder cleans and splits the entries of a user's source."""
    assert corpus.languages == ("de",) and corpus.count("train") > 300 and corpus.manifest["inputs"] == ["pairs.jsonl"]


def test_data_source_reports_its_own_mistakes(corpus, directory, capsys, monkeypatch):
    """A user's source names the file and the line, as the repository's own do."""
    (directory / "bad.jsonl").write_text('{"language": "de"}\n')
    monkeypatch.setattr(sys.modules["json_lines"], "PAIRS", directory / "bad.jsonl")
    arguments = ["build_corpus", "--preset=json_lines", f"--output={directory}/unused"]
    assert app.execute(build_corpus.main, arguments, build_corpus.FLAGS) == 2
    assert "bad.jsonl:1: not an entry (KeyError('english'))" in capsys.readouterr().err


def test_the_printed_pairs_are_a_corpus(corpus, directory, monkeypatch):
    """The lines that the document prints for the file beside the data source."""
    (directory / "printed.jsonl").write_text(_PAIRS[1], encoding="utf-8")
    monkeypatch.setattr(sys.modules["json_lines"], "PAIRS", directory / "printed.jsonl")
    arguments = ["build_corpus", "--preset=json_lines", f"--output={directory}/printed"]
    assert app.execute(build_corpus.main, arguments, build_corpus.FLAGS) == 0
    printed = Corpus.open(directory / "printed")
    assert sum(printed.count(split) for split in ("train", "valid", "test")) == len(_PAIRS[1].splitlines()) == 2


def test_show_knows_the_fields_of_a_users_model_and_optimizer(directory, capsys):
    """A model from outside is configured like any other, and so is its optimizer."""
    arguments = ["show", "penalized.Tiny", f"--import={directory}/penalized.py", "--set=embedding_penalty=0.5"]
    assert main.main(["lingvo_moe", *arguments]) == 0
    assert "model.embedding_penalty = 0.5\n" in capsys.readouterr().out
    arguments = ["show", "adamw.Small", f"--import={directory}/adamw.py", "--set=optimizer.weight_decay=0.25"]
    assert main.main(["lingvo_moe", *arguments]) == 0
    assert "optimizer.weight_decay = 0.25\n" in capsys.readouterr().out


def test_adamw_is_the_papers(directory):
    """Compared with a transcription of algorithm 2; a step that is not finite changes nothing."""
    import_module(f"{directory}/adamw.py")
    optimizer = sys.modules["adamw"].AdamW(learning_rate=InverseSquareRoot(peak_value=0.1), beta2=0.9, weight_decay=0.2)
    weights = {"layer": {"wi": Weight((4, 3), "MH", "M")}, "scale": Weight((3,), "M")}
    random, declared = np.random.default_rng(0), tree.flatten(weights)
    theta, *gradients = (
        {path: random.normal(size=weight.shape).astype(np.float32) for path, weight in declared.items()}
        for _ in range(4)
    )
    found, state = as_tensors(theta), tree.map_leaves(lambda weight: tf.zeros(weight.shape), optimizer.state(weights))
    for step, is_finite in ((0, True), (1, True), (2, True), (3, False)):
        gradient = as_tensors(gradients[step] if is_finite else {path: theta[path] * np.nan for path in theta})
        arguments = gradient, state, tf.constant(step), tf.constant(is_finite), Context()
        found, state = optimizer.update(weights, found, *arguments)
    for path, value in theta.items():
        expected, first, second = value.astype(np.float64), 0.0, 0.0
        for count, gradient in enumerate(gradients, 1):
            first, second = 0.9 * first + 0.1 * gradient[path], 0.9 * second + 0.1 * gradient[path] ** 2
            update = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.9**count)) + 1e-8)
            expected = expected - 0.1 * (update + 0.2 * expected)
        # Three steps of about ten roundings; the differences 1 - 0.9^t are less precise by a factor of ten.
        np.testing.assert_allclose(tree.flatten(found)[path], expected, rtol=0, atol=300 * harness.FLOAT32_ROUNDING)


def as_tensors(arrays: dict[str, np.ndarray]) -> dict:
    """Returns the tree of arrays by path."""
    return tree.unflatten({path: tf.constant(array) for path, array in arrays.items()})


def penalized_with_adamw(directory: pathlib.Path) -> str:
    """Registers the document's own model with its own optimizer, to compile both in one program; returns the name."""
    for name in ("penalized", "adamw"):
        import_module(f"{directory}/{name}.py")

    class PenalizedAdamW(sys.modules["penalized"].Tiny):
        def experiment(self) -> experiment.Experiment:
            return dataclasses.replace(super().experiment(), optimizer=sys.modules["adamw"].AdamW())

    registry.register(PenalizedAdamW)
    return f"{__name__.rpartition('.')[2]}.PenalizedAdamW"


def test_training_with_all_extensions(corpus, directory, monkeypatch):
    """A training step is compiled and run with all that the files define, and reports the metrics that they declare."""
    names = ("fully_sharded.py", "swiglu.py", "sigmoid.py", "slow_steps.py", "dump_hlo.py")
    model = penalized_with_adamw(directory)
    monkeypatch.chdir(directory)
    changes = ["layout=fully_sharded", "layer_pattern=swiglu,moe", "router=sigmoid:scale=2", "platform=cpu"]
    flags = [
        *(f"--import={directory}/{name}" for name in names),
        *(f"--set={change}" for change in (*changes, "training.evaluate_every=0")),
        f"--model={model}",
        "--engine=dump_hlo",
        "--devices=2",
        "--steps=2",
        "--cache=off",
        f"--logdir={directory}/run",
        f"--corpus={corpus.directory}",
        f"--tokenizers={directory}/tokenizers",
    ]
    assert main.main(["lingvo_moe", "train", *flags]) == 0
    curves = experiments.curves(directory / "run")
    for metric in ("embedding_penalty", "open_gates", "aux_loss", "overflow"):
        assert set(curves[metric]) == {1, 2}, metric
    (open_gates,) = curves["open_gates"][1]
    assert 0.2 < open_gates < 0.8
    assert any(
        name.startswith("optimizer_state/second/") for name in Reader(directory / "run/checkpoints/2").specs(["rest"])
    )
    config = experiment.get(model, changes)
    assert config.steps.layout.mesh_axes("MH") == ("x", None)
    assert {cls.__name__ for cls in config.model.registered_classes} >= {"SwiGLU", "Sigmoid"}
    assert "all-to-all" in (directory / "train.hlo.txt").read_text()


def test_callback_warns_about_slow_steps(directory, monkeypatch, caplog):
    """Eleven steps of one second, then one of five."""
    import_module(f"{directory}/slow_steps.py")
    callback, clock = CALLBACKS.get("slow_steps")(), iter([*range(12), 16])
    monkeypatch.setattr(sys.modules["slow_steps"], "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    run: Any = None  # this callback needs none
    callback.on_start(run)
    for step in range(1, 13):
        result: Any = types.SimpleNamespace(step=step, metrics={"loss": 1.0})
        callback.on_step(run, result)
    assert caplog.messages == ["step 12 took 5.00 s, the median is 1.00 s"]
