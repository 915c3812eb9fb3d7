"""Tests that a training without TensorFlow reads the pairs of the input pipeline, learns, and can be continued."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.data import tokenizer_trainer
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.steps import weight_specs
from lingvo_moe.testing.corpora import write_corpus
from lingvo_moe.training import checkpoint_tools
from tools.gpu_training import FACTS, PROGRAMS, WEIGHTS, feed, make

_SHALLOW = ("model.num_layers=4", "model.num_encoder_layers=0", "model.encoder_layer_pattern=")
_TINY = (
    "model.model_dim=16",
    "model.hidden_dim=32",
    "model.num_heads=2",
    "model.head_dim=8",
    "model.num_experts=2",
    "model.num_groups=2",
    "model.num_layers=5",
    "model.num_encoder_layers=3",
    "model.encoder_layer_pattern=dense,dense,moe",
    "model.source_vocabulary=400",
    "model.target_vocabulary=400",
    "input.batch_size=4",
    "input.source_length=48",
    "input.target_length=48",
    "optimizer.learning_rate.warmup_steps=2",
    "optimizer.learning_rate.cooldown_after=4",
    "optimizer.learning_rate.cooldown_steps=1000",
)
_DEEP = _TINY
_WORKERS = 2
# A machine without TensorFlow, on which one command feeds and another one trains.
_BARE = """
import runpy, sys
sys.modules.update(dict.fromkeys(("tensorflow", "tensorflow_text", "orbax", "pytest"), None))
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("data")
    pairs = [(f"Haus Nummer {i} steht dort.", f"House number {i} stands there.") for i in range(300)]
    split = {"train": pairs[:260], "valid": pairs[260:280], "test": pairs[280:]}
    corpus = Corpus.open(write_corpus(directory / "corpus", {"de": split, "fr": split}))
    tokenizer_trainer.train(corpus, directory / "tokenizers", {"source": 300, "target": 60}, 5.0, 300)
    return directory


def _experiment(data: pathlib.Path, *settings: str) -> Experiment:
    paths = (f"corpus={data / 'corpus'}", f"tokenizers={data / 'tokenizers'}")
    return experiment.get("m4.Pocket", [*settings, *paths], DeviceMesh((1,)))


def _bare(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", _BARE, module, *map(str, arguments)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_feed_has_the_examples_of_the_input_pipeline(data, tmp_path):
    """A worker's batch is one shard of what TensorFlow's pipeline reads with as many shards."""
    config = _experiment(data, *_TINY).input
    (tmp_path / FACTS).write_text(json.dumps({"input": dataclasses.asdict(config)}))
    whole = dataclasses.replace(config, batch_size=config.batch_size * _WORKERS, shards=_WORKERS)
    expected = TrainInput(data / "corpus", data / "tokenizers", whole).batches()
    sides = (f"--corpus={data / 'corpus'}", f"--tokenizers={data / 'tokenizers'}")
    with subprocess.Popen(
        _bare("tools.gpu_training.feed", tmp_path, *sides, f"--output={tmp_path / 'feed'}", f"--workers={_WORKERS}"),
        env=_environment(),
        start_new_session=True,
    ) as process:
        try:
            for number in range(3):
                batch, _ = next(expected)
                for worker in range(_WORKERS):
                    file = feed.path(tmp_path / "feed", worker, number)
                    while not file.exists():
                        assert process.poll() is None, "the feed ended"
                        time.sleep(0.01)
                    rows = slice(worker * config.batch_size, (worker + 1) * config.batch_size)
                    fed = tree.flatten(feed.unpack(np.load(file), config))
                    for path, array in tree.flatten(batch).items():
                        np.testing.assert_array_equal(fed[path], array[rows], err_msg=path)
        finally:
            os.killpg(process.pid, 9)
    expected.close()


@pytest.mark.slow
def test_training_learns_and_continues(data, tmp_path):
    """From shallower weights; the second training begins where the first one ended, and its mean is of this model."""
    shallow, deep = _experiment(data, *_TINY, *_SHALLOW), _experiment(data, *_DEEP, "platform=gpu")
    _write_initial(shallow, tmp_path / "shallow.safetensors")
    make.make(deep, "m4.Pocket", tmp_path)
    make.write_weights(deep, "m4.Pocket", tmp_path / "shallow.safetensors", list(_SHALLOW), tmp_path / WEIGHTS)
    assert {path.name for path in tmp_path.iterdir()} >= {f"{name}.zip" for name in PROGRAMS}
    first, second = (_train(data, tmp_path, fractions) for fractions in ("0,0.5", "0.5,1"))
    losses = [line["held_out"] for line in first if "held_out" in line]
    assert losses[-1] < losses[0] - 0.2
    assert next(line["held_out"] for line in second if "held_out" in line) == pytest.approx(losses[-1], abs=1e-3)
    assert second[-3]["means"] > 0 and second[-3]["held_out_of_mean"] < losses[0]
    parts = sorted((tmp_path / "output").glob("weights.*"))
    (tmp_path / "trained.safetensors").write_bytes(b"".join(part.read_bytes() for part in parts))
    specs = weight_specs(deep.model.weights())
    steps, values = checkpoint_tools.read_safetensors(tmp_path / "trained.safetensors", "m4.Pocket", specs, "file")
    assert steps > 0 and all(np.isfinite(value).all() for value in values.values())


def test_models_without_texts(tmp_path):
    """Are an error that names another model."""
    with pytest.raises(UserError, match="unet.* reads no texts; name a model that does, for instance m4.Pocket"):
        make.make(experiment.get("unet.Small"), "unet.Small", tmp_path)


def _write_initial(shallow: Experiment, file: pathlib.Path):
    """Writes random weights of a model as a file."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    specs = tree.flatten(weight_specs(shallow.model.weights()))
    metadata = {"lingvo_moe": json.dumps({"format": 1, "model": "m4.Pocket", "step": 7})}
    save_file(
        {path: random.normal(0, 0.1, spec.shape).astype(np.float32) for path, spec in specs.items()}, file, metadata
    )


def _train(data: pathlib.Path, directory: pathlib.Path, fractions: str) -> list[dict]:
    """Returns the lines of the log of a training of four seconds."""
    sides = (f"--corpus={data / 'corpus'}", f"--tokenizers={data / 'tokenizers'}")
    feed_directory = directory / f"feed_{fractions.replace(',', '_')}"  # a comma separates feeds
    with subprocess.Popen(
        _bare("tools.gpu_training.feed", directory, *sides, f"--output={feed_directory}", f"--workers={_WORKERS}"),
        env=_environment(),
        start_new_session=True,
    ) as process:
        try:
            trained = subprocess.run(
                _bare(
                    "tools.gpu_training.run",
                    directory,
                    *sides,
                    f"--feeds={feed_directory}",
                    f"--workers={_WORKERS}",
                    "--seconds=4",
                    f"--fractions={fractions}",
                    f"--state={directory / 'state'}",
                    f"--output={directory / 'output'}",
                    "--platform=cpu",
                ),
                capture_output=True,
                text=True,
                env=_environment(),
                timeout=300,
            )
        finally:
            os.killpg(process.pid, 9)
    assert trained.returncode == 0, trained.stderr
    return [json.loads(line) for line in trained.stdout.splitlines()]
