"""Tests that training without TensorFlow reads the pairs of the input pipeline, learns, and can be continued."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lingvo_moe import experiment, tree
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.steps import weight_specs
from lingvo_moe.testing.corpora import write_corpus
from lingvo_moe.training import weights_conversion, weights_file
from tools.gpu_training import FACTS, PROGRAMS, WEIGHTS, batches, feed, make, run

_SHALLOW = ("model.num_layers=4", "model.num_encoder_layers=0", "model.encoder_layer_pattern=")
_SCHEDULE = {"warmup_steps": 2, "cooldown_after": 4, "cooldown_steps": 1000}
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
    *(f"optimizer.learning_rate.{name}={steps}" for name, steps in _SCHEDULE.items()),
)
_WORKERS, _STEPS = 2, 120
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


def _environment(directory: pathlib.Path) -> dict[str, str]:
    """Returns the variables of processes that compile each program once."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(directory / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, **cache, "PYTHONPATH": os.pathsep.join(sys.path)}


@contextlib.contextmanager
def _feeding(data: pathlib.Path, directory: pathlib.Path, output: pathlib.Path) -> Iterator[subprocess.Popen]:
    """Runs a feed of the programs in `directory` as long as the context lasts."""
    sides = (f"--corpus={data / 'corpus'}", f"--tokenizers={data / 'tokenizers'}")
    command = _bare("tools.gpu_training.feed", directory, *sides, f"--output={output}", f"--workers={_WORKERS}")
    with subprocess.Popen(command, env=_environment(directory), start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_feed_has_the_examples_of_the_input_pipeline(data, tmp_path):
    """A worker's batch is one shard of what TensorFlow's pipeline reads with as many shards."""
    config = _experiment(data, *_TINY).input
    (tmp_path / FACTS).write_text(
        json.dumps(
            {"model": "m4.Pocket", "input": dataclasses.asdict(config), "schedule": _SCHEDULE, "vocabularies": {}}
        )
    )
    whole = dataclasses.replace(config, batch_size=config.batch_size * _WORKERS, shards=_WORKERS)
    with (
        contextlib.closing(TrainInput(data / "corpus", data / "tokenizers", whole).batches()) as expected,
        _feeding(data, tmp_path, tmp_path / "feed") as process,
    ):
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


@pytest.mark.slow
def test_training_learns_and_continues(data, tmp_path):
    """The second run begins where the first one ended, and the weights that it writes are of this model."""
    own = _experiment(data, *_TINY, "platform=gpu")
    made = tmp_path / "made"
    make.make(own, "m4.Pocket", _random_weights(own), made)
    assert {path.name for path in made.iterdir()} == {*(f"{name}.zip" for name in PROGRAMS), FACTS, WEIGHTS}
    first, second = (_train(data, tmp_path, cooldown) for cooldown in ("0,0.5", "0.5,1"))
    losses = [line["held_out"] for line in first if "held_out" in line]
    assert losses[-1] < losses[0] - 0.2
    assert next(line["held_out"] for line in second if "held_out" in line) == pytest.approx(losses[-1], abs=1e-3)
    rates = [line["learning_rate"] for line in (*first, *second) if "learning_rate" in line]
    assert rates == sorted(rates, reverse=True)
    (end,) = (line for line in second if "means" in line)
    assert end["means"] == _STEPS // 6
    evaluated = [line["held_out"] for line in second if "held_out" in line]
    assert end["lowest"] == min(*evaluated, end["held_out_of_mean"]) < losses[0]
    trained = tmp_path / "output 0.5,1" / "weights.safetensors"
    specs = weight_specs(own.model.weights())
    steps, values, tokenizer_hashes = weights_conversion.read_safetensors(trained, "m4.Pocket", specs, "file")
    assert tokenizer_hashes == list(own.texts.open_readers("", data / "tokenizers").fingerprints)
    assert steps == _STEPS and all(np.isfinite(value).all() for value in values.values())
    assert "traced" in second[-1] and next((tmp_path / "trace").rglob("*.xplane.pb")).stat().st_size > 0
    _interrupt(data, tmp_path)
    _lose_feed(data, tmp_path)
    _end_with_feed(data, tmp_path)


def _interrupt(data: pathlib.Path, directory: pathlib.Path):
    """Ends a run and then its feed by signals; neither leaves a process, and weights and state are saved."""
    fed, state = directory / "feed", directory / "state"
    state.unlink()
    with _feeding(data, directory / "made", fed) as feeding:
        command = _run(data, directory, fed, "interrupted", "--seconds=1000", "--cooldown=0.2,0.7")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(directory)) as process:
            lines = (json.loads(line) for line in process.stdout)
            assert any("learning_rate" in line for line in lines)
            process.send_signal(signal.SIGINT)
            assert next(line["continue_with"] for line in lines if "stopped" in line).startswith("--cooldown=0.2")
        assert process.returncode == 130
        assert state.exists() and (directory / "interrupted" / "weights.safetensors").exists()
        feeding.terminate()
        assert feeding.wait() == 130
        with pytest.raises(ProcessLookupError):  # no worker is left in its group
            while True:
                os.killpg(feeding.pid, 0)
                time.sleep(0.01)


def test_make_takes_the_weights_of_a_shallower_model(tmp_path, monkeypatch):
    """As `train --initial_weights --initial_set` does; without weights there is nothing to train."""
    shallow = experiment.get("m4.Pocket", [*_TINY, *_SHALLOW], DeviceMesh((1,)))
    file = tmp_path / "shallow.safetensors"
    save_file(_random_weights(shallow), file, weights_file.metadata(weights_file.Facts("m4.Pocket", 7)))
    seen = {}
    monkeypatch.setattr(make, "make", lambda own, name, weights, directory: seen.update(weights))
    (tmp_path / "made").mkdir()
    flags = [f"--directory={tmp_path / 'made'}", *(f"--set={text}" for text in _TINY)]
    make._VALUES(["make", *flags, f"--initial_weights={file}", *(f"--initial_set={text}" for text in _SHALLOW)])
    make.main(["make"])
    deep = experiment.get("m4.Pocket", _TINY, DeviceMesh((1,))).model
    assert {path: value.shape for path, value in seen.items()} == {
        path: spec.shape for path, spec in tree.flatten(weight_specs(deep.weights())).items()
    }
    make._VALUES(["make", *flags])
    make._VALUES["initial_weights"].unparse()
    make._VALUES["initial_set"].unparse()
    with pytest.raises(UserError, match="--initial_weights is missing: a file of weights; make one"):
        make.main(["make"])


def test_errors(data, tmp_path, capsys):
    """Of other directories, of a feed's directory that was used before, and of models without texts."""
    with pytest.raises(UserError, match="unet.* reads no texts; name a model that does, for instance m4.Pocket"):
        make.make(experiment.get("unet.Small"), "unet.Small", {}, tmp_path)
    with pytest.raises(UserError, match="conformer.* reads no texts"):
        make.make(experiment.get("conformer.Small"), "conformer.Small", {}, tmp_path)
    with pytest.raises(UserError, match="--model=m4.Pocket: its learning rate has no cool-down .*cooldown_steps=M"):
        make.make(_experiment(data, *_TINY, "optimizer.learning_rate.cooldown_steps=0"), "m4.Pocket", {}, tmp_path)
    sides = [f"--corpus={data / 'corpus'}", f"--tokenizers={data / 'tokenizers'}", f"--output={tmp_path}"]
    for main, arguments in ((feed.main, sides), (run.main, [*sides, "--feed=none", "--steps=1"])):
        assert main([str(tmp_path), *arguments]) == 2
        assert "facts.json: not what tools.gpu_training.make writes" in capsys.readouterr().err
    with pytest.raises(UserError, match="--output=.*: expected a new directory, for batches of this feed alone"):
        feed.feed(data / "corpus", data / "tokenizers", _experiment(data, *_TINY).input, 1, tmp_path)


def test_errors_of_flags_of_run(data, tmp_path, capsys):
    """Before anything is compiled. Steps beyond the cool-down would have no learning rate of their own."""
    flags = [str(tmp_path), f"--corpus={data / 'corpus'}", f"--tokenizers={data / 'tokenizers'}", "--feed=none"]
    flags += [f"--output={tmp_path / 'output'}"]
    for wrong, message in (
        ("--cooldown=0.5", "argument --cooldown: '0.5': expected two shares from 0 to 1"),
        ("--cooldown=0.5,0.5", "expected two shares from 0 to 1, the smaller first"),
        ("--evaluate_every=inf", "argument --evaluate_every: 'inf': expected a number above 0"),
        ("--steps=0", "argument --steps: '0': expected at least 1 and at most 2,147,483,647"),
        ("--max_pairs=-1", "argument --max_pairs: '-1': expected at least 1 and at most 2,147,483,647"),
        ("--evaluate_every=0", "argument --evaluate_every: '0': expected a number above 0"),
    ):
        with pytest.raises(SystemExit):
            run.main([*flags, "--steps=1", wrong])
        assert message in capsys.readouterr().err
    config = dataclasses.asdict(_experiment(data, *_TINY).input)
    facts = {"model": "m4.Pocket", "input": config, "schedule": _SCHEDULE}
    for wrong in ({}, {"warmup_steps": 2}, {**_SCHEDULE, "cooldown_after": "x"}):
        (tmp_path / FACTS).write_text(json.dumps({**facts, "schedule": wrong, "vocabularies": {}}))
        assert run.main([*flags, "--steps=1"]) == 2
        assert "facts.json: not what tools.gpu_training.make writes" in capsys.readouterr().err
    (tmp_path / FACTS).write_text(json.dumps({**facts, "vocabularies": {"source": 100, "target": 400}}))
    assert run.main([*flags, "--steps=1"]) == 2
    assert "has 300 pieces, the model's source_vocabulary is 100" in capsys.readouterr().err
    assert feed.main([flag for flag in flags if not flag.startswith("--feed")]) == 2
    assert "has 300 pieces, the model's source_vocabulary is 100" in capsys.readouterr().err
    (tmp_path / FACTS).write_text(json.dumps({**facts, "vocabularies": {}}))
    for steps in ("501", "1000"):
        assert run.main([*flags, f"--steps={steps}", "--cooldown=0,0.5"]) == 2
        assert f"--steps={steps}: expected 1 to 500, the steps of this part of the cool-down" in capsys.readouterr().err
    assert run.main([*flags, "--steps=1", f"--state={tmp_path / 'no' / 'state'}"]) == 2
    assert "--state=" in (message := capsys.readouterr().err) and "there is no directory" in message
    (tmp_path / "state").touch()
    assert run.main([*flags, "--steps=1", f"--state={tmp_path / 'state'}", "--seed=1"]) == 2
    assert "has the seed of its run; leave --seed out" in capsys.readouterr().err
    assert run.main([*flags, "--steps=1", f"--trace={tmp_path / FACTS}"]) == 2
    assert f"--trace={tmp_path / FACTS}: this directory cannot be made" in capsys.readouterr().err
    (tmp_path / "output" / "weights.safetensors").touch()
    assert run.main([*flags, "--steps=1"]) == 2
    assert "has the weights of an earlier run; name a new directory" in capsys.readouterr().err


class _CountingRun(run.Run):
    """A run without programs, which notes the step of the schedule that each training step has."""

    def __init__(self, directory: pathlib.Path, monkeypatch, position: int, steps: int):
        self._given = argparse.Namespace(
            feed=None, steps=steps, cooldown=(0.0, 0.5), evaluate_every=1e9, trace=None, state=directory / "state"
        )
        self._config, self._schedule = None, {"warmup_steps": 5, "cooldown_after": 10, "cooldown_steps": 1000}
        self._train, self._position_at_start, self.positions, self.lines = self, position, [], []
        monkeypatch.setattr(run, "Batches", lambda *arguments: self)

    def shardings(self, name: str):
        return None

    def next(self):
        return {}, 1

    def __call__(self, inputs: dict) -> dict:
        self.positions.append(int(inputs["state"]["step"]))
        metrics = dict.fromkeys(("cross_entropy", "learning_rate", "skipped"), np.float32(0))
        return {"state": inputs["state"], "metrics": metrics}

    def _initial_state(self) -> dict:
        return {"theta": {"w": np.zeros(2, np.float32)}, "step": np.int32(self._position_at_start)}

    def _keep_lowest(self, theta: dict, steps: int) -> float:
        return 1.0

    def _finish(self, state: dict, meter):
        pass

    def _save(self):
        pass

    def _log(self, **values):
        self.lines.append(values)


@pytest.mark.parametrize(
    "position, expected",
    [
        (0, [1, 2, 3, 4, 5, 10 + 250]),
        (3, [4, 5, 10 + 100, 10 + 150, 10 + 200, 10 + 250]),
        (300, [301, 302, 303, 304, 305, 306]),
    ],
)
def test_a_run_that_stopped_in_the_warm_up_continues_it(tmp_path, monkeypatch, position, expected):
    """It would jump to the peak of the learning rate; one that stopped later has no further warm-up."""
    counting = _CountingRun(tmp_path, monkeypatch, position, steps=10)
    counting.train(threading.Event())
    assert counting.positions[:6] == expected


def test_the_state_is_written_during_the_run(tmp_path, monkeypatch):
    """A kill costs what came after the last one, and the log says how to continue from it."""
    counting = _CountingRun(tmp_path, monkeypatch, position=300, steps=4)
    monkeypatch.setattr(run, "Every", lambda seconds: types.SimpleNamespace(passed=lambda: seconds == run._SAVE_EVERY))
    counting.train(threading.Event())  # its _finish writes nothing
    assert load_file(tmp_path / "state")["step"] == 10 + 375
    lines = [line["continue_with"] for line in counting.lines if line.get("state") == str(tmp_path / "state")]
    assert lines == [f"--cooldown={share:.6f},0.5" for share in (0, 0.125, 0.25, 0.375)]


@pytest.mark.parametrize("skipped, ends", [(9, False), (10, True)])
def test_a_run_whose_steps_are_no_longer_finite_ends(skipped, ends):
    """It would spend the rest of its time on nothing."""
    error = run._not_finite({"skipped_in_a_row": np.int32(skipped)})
    assert (error is not None) == ends
    assert not ends or "the last 10 updates were skipped as non-finite" in str(error)


def test_reader_reports_a_feed_that_does_not_write(data, tmp_path, monkeypatch):
    """And a file that is no batch, instead of waiting for ever."""
    config = _experiment(data, *_TINY).input
    monkeypatch.setattr(batches, "_PATIENCE", 0)
    with pytest.raises(UserError, match="--feed=.*: no workers within 0 s; start tools.gpu_training.feed with"):
        batches.Batches(tmp_path, config, {}).next()
    (tmp_path / feed.WORKERS).write_text("1\n")
    with pytest.raises(UserError, match="--feed=.*: no 0_0.npy within 0 s"):
        batches.Batches(tmp_path, config, {}).next()
    feed.path(tmp_path, 0, 0).write_bytes(b"no array")
    with pytest.raises(UserError, match="--feed=.*: 0_0.npy is no batch of these programs: not an array"):
        batches.Batches(tmp_path, config, {}).next()
    np.save(feed.path(tmp_path, 0, 0), np.zeros((4, 3), np.int32))
    with pytest.raises(UserError, match=r"an array of int32 \[4, 3\]; expected int32 \[4, 336\]"):
        batches.Batches(tmp_path, config, {}).next()
    (tmp_path / feed.WORKERS).write_text("0\n")
    with pytest.raises(UserError, match="workers says 0; start the feed again"):
        batches.Batches(tmp_path, config, {}).next()


def _random_weights(own: Experiment) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    specs = tree.flatten(weight_specs(own.model.weights()))
    return {path: random.normal(0, 0.1, spec.shape).astype(np.float32) for path, spec in specs.items()}


def _train(data: pathlib.Path, directory: pathlib.Path, cooldown: str) -> list[dict]:
    """Returns the lines of the log of a run with the programs in `made`."""
    fed = directory / f"feed {cooldown}"
    flags = (f"--steps={_STEPS}", f"--cooldown={cooldown}", f"--trace={directory / 'trace'}")
    command = _run(data, directory, fed, f"output {cooldown}", *flags)
    with _feeding(data, directory / "made", fed):
        trained = subprocess.run(command, capture_output=True, text=True, env=_environment(directory))
    assert trained.returncode == 0, trained.stderr
    return [json.loads(line) for line in trained.stdout.splitlines()]


def _run_with_two_batches(data: pathlib.Path, directory: pathlib.Path, name: str, steps: int):
    """Trains anew with a feed that has ended after two batches."""
    fed = directory / name
    (directory / "state").unlink()
    fed.mkdir()
    (fed / feed.WORKERS).write_text("1\n")
    for number, file in enumerate(sorted((directory / "feed").glob("*.npy"))[:2]):
        file.rename(feed.path(fed, 0, number))
    command = _run(data, directory, fed, f"{name} output", f"--steps={steps}")
    command[2] = command[2].replace(
        "runpy.run_module", "import tools.gpu_training.batches as b; b._PATIENCE = 1\nrunpy.run_module"
    )
    return subprocess.run(command, capture_output=True, text=True, env=_environment(directory))


def _end_with_feed(data: pathlib.Path, directory: pathlib.Path):
    """A run that needs no batch after those of a feed is complete."""
    ended = _run_with_two_batches(data, directory, "enough", 2)
    assert ended.returncode == 0, ended.stderr


def _lose_feed(data: pathlib.Path, directory: pathlib.Path):
    """Trains with a feed that ends after two batches: an error, but weights and state are saved."""
    state, ended = directory / "state", _run_with_two_batches(data, directory, "lost", _STEPS)
    assert ended.returncode == 2 and "lost: no 0_2.npy within 1 s; start tools.gpu_training.feed" in ended.stderr
    assert "continue_with" in ended.stdout
    assert state.exists() and (directory / "lost output" / "weights.safetensors").exists()


def _run(data: pathlib.Path, directory: pathlib.Path, fed: pathlib.Path, output: str, *flags: str) -> list[str]:
    """Returns the command of a run with the programs in `made`."""
    return _bare(
        "tools.gpu_training.run",
        directory / "made",
        f"--corpus={data / 'corpus'}",
        f"--tokenizers={data / 'tokenizers'}",
        f"--feed={fed}",
        f"--state={directory / 'state'}",
        f"--output={directory / output}",
        "--platform=cpu",
        *flags,
    )
