"""Trains for a number of seconds with programs of `tools.gpu_training.make`; needs no TensorFlow.

    python -m tools.gpu_training.feed build/gpu_training --corpus=DIR --tokenizers=DIR --output=/dev/shm/feed &
    python -m tools.gpu_training.run build/gpu_training --corpus=DIR --tokenizers=DIR --feeds=/dev/shm/feed
        --seconds=500 --output=DIR [--fractions=0,1] [--state=FILE] [--platform=gpu]

The cool-down of the learning rate follows the clock: it goes from the first of the --fractions to the second. --state
is a file to continue from, if it exists, and to write at the end. In the last sixth of a training that ends its
cool-down, the mean of the weights is taken. The output is `weights.N`, the parts of a safetensors file in int8 (`cat
weights.* > weights.safetensors`), of the mean or of the last weights, whichever have the lower held-out loss; and
`log.jsonl`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import sys
import time

import jax
import numpy as np
from safetensors.numpy import load_file, save

from lingvo_moe import tree
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.data.pipeline import EvalInput
from lingvo_moe.engines.pjrt import Engine, Executable
from lingvo_moe.program import Program
from lingvo_moe.training.quantization import SCALE, dequantize, quantize
from tools.gpu_training import FACTS, PROGRAMS, WEIGHTS
from tools.gpu_training.feed import Feeds

_PART = 15_000_000  # bytes of a part of the weights
_LOG_EVERY, _SAVE_EVERY = 5, 150  # seconds
_READ_LOSS_EVERY = 10  # steps
_MEAN_FROM, _MEANS = 5 / 6, 100  # share of the time, number of weights


def main(arguments: list[str] | None = None) -> int:
    """Trains; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_training.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", type=pathlib.Path, help="directory that tools.gpu_training.make wrote")
    parser.add_argument("--corpus", required=True, help="for its held-out pairs")
    parser.add_argument("--tokenizers", required=True)
    parser.add_argument("--feeds", required=True, help="directories of tools.gpu_training.feed; the last is preferred")
    parser.add_argument("--workers", type=int, default=14, help="of each feed")
    parser.add_argument("--seconds", type=float, required=True, help="of training, without compilation")
    parser.add_argument("--fractions", default="0,1", help="of the cool-down, at the start and at the end")
    parser.add_argument("--state", type=pathlib.Path, help="file to continue from, and to write")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), default="gpu")
    parser.add_argument("--seed", type=int, default=0, help="of dropout")
    parser.add_argument("--evaluate_every", type=float, default=60, help="seconds")
    parser.add_argument("--max_pairs", type=int, default=40, help="held-out pairs of each language")
    parser.add_argument("--wait_for", type=pathlib.Path, help="file without which training does not start")
    given = parser.parse_args(arguments)
    given.output.mkdir(parents=True, exist_ok=True)
    Run(given).train()
    return 0


class Run:
    """A training: programs, state and log."""

    def __init__(self, given: argparse.Namespace):
        self._given, self._begin = given, time.time()
        self._log_file = (given.output / "log.jsonl").open("a", encoding="utf-8")
        self._facts = json.loads((given.directory / FACTS).read_text(encoding="utf-8"))
        self._config = InputConfig(**self._facts["input"])
        self._train, self._evaluate = _compile(given.directory, Engine(1, given.platform))
        held_out = EvalInput(given.corpus, given.tokenizers, self._config, max_pairs=given.max_pairs)
        self._held_out = list(held_out.batches())
        self._mean, self._means = None, 0
        self._lowest, self._at_lowest = np.inf, None
        self._average = jax.jit(_average, donate_argnums=0)
        device = self._train.shardings("batch")["target"]["ids"].mesh.devices.flat[0]
        self._log(device=device.device_kind, jax=jax.__version__, compiled=True)

    def train(self):
        """Trains, and writes weights and state."""
        given = self._given
        state = self._initial_state()
        self._log(held_out=self._held_out_loss(state["theta"]))
        feeds = Feeds(given.feeds.split(","), given.workers, self._config, self._train.shardings("batch"))
        batch, count = feeds.next()
        while given.wait_for and not given.wait_for.exists():
            time.sleep(0.1)
        position = int(np.asarray(state["step"]))
        warmup = 0 if position else self._facts["schedule"]["warmup_steps"]
        meter, evaluates, saves = _Meter(), _Every(given.evaluate_every), _Every(_SAVE_EVERY)
        while (share := meter.elapsed / given.seconds) < 1:
            position = position + 1 if meter.steps < warmup else max(position, self._position(share))
            outputs = self._train({"state": {**state, "step": np.int32(position)}, "batch": batch})
            state = outputs["state"]
            meter.add(count, outputs["metrics"])
            if given.fractions.endswith(",1") and share > _MEAN_FROM + (1 - _MEAN_FROM) * self._means / _MEANS:
                self._add_to_mean(state["theta"])
            if meter.is_due:
                self._log(position=position, **meter.read(), waiting=feeds.waiting, feed=feeds.current)
            if evaluates.is_due:
                self._log(steps=meter.steps, held_out=self._keep_lowest(state["theta"]))
            if saves.is_due:
                self._save(self._at_lowest or state["theta"], meter.steps)
            batch, count = feeds.next()
        jax.block_until_ready(state["theta"])
        self._log(steps=meter.steps, tokens=meter.tokens, seconds=meter.elapsed)
        self._save(self._best(state["theta"]), meter.steps)
        if given.state:
            given.state.write_bytes(save({path: np.asarray(value) for path, value in tree.flatten(state).items()}))
            self._log(state=str(given.state))

    def _position(self, share: float) -> int:
        """Returns the step of the schedule after this share of the time."""
        schedule = self._facts["schedule"]
        first, last = map(float, self._given.fractions.split(","))
        return schedule["cooldown_after"] + int((first + (last - first) * share) * schedule["cooldown_steps"])

    def _initial_state(self) -> dict:
        """Returns the state of --state if there is one; else the initial weights and an optimizer state of zeros."""
        if self._given.state and self._given.state.exists():
            return tree.unflatten(load_file(self._given.state))
        specs = {a.path: a for a in self._train.program.inputs if a.path.startswith("state/")}
        flat = {path.removeprefix("state/"): np.zeros(a.shape, a.dtype) for path, a in specs.items()}
        flat["seed"] = np.array([0, self._given.seed], np.int32)
        stored = load_file(self._given.directory / WEIGHTS)
        for path in flat:
            if path.startswith("theta/"):
                name = path.removeprefix("theta/")
                value = dequantize(stored[name], stored[name + SCALE]) if name + SCALE in stored else stored[name]
                assert value.shape == flat[path].shape, path
                flat[path] = value
        return tree.unflatten(flat)

    def _held_out_loss(self, theta: dict) -> float:
        """Returns the held-out cross-entropy in nats per target token."""
        metrics = [self._evaluate({"theta": theta, "batch": batch})["metrics"] for batch in self._held_out]
        losses, tokens = zip(*((float(each["cross_entropy"]), float(each["tokens"])) for each in metrics))
        return float(np.average(losses, weights=tokens))

    def _add_to_mean(self, theta: dict):
        self._means += 1
        copy = jax.tree.map(jax.numpy.copy, theta)
        self._mean = copy if self._mean is None else self._average(self._mean, copy, float(self._means))

    def _keep_lowest(self, theta: dict) -> float:
        """Returns the held-out loss, and keeps the weights if it is the lowest so far."""
        loss = self._held_out_loss(theta)
        if loss < self._lowest:
            self._lowest, self._at_lowest = loss, jax.tree.map(jax.numpy.copy, theta)
        return loss

    def _best(self, theta: dict) -> dict:
        """Returns the weights with the lowest held-out loss: these last ones, the mean, or those of an evaluation."""
        last = self._keep_lowest(theta)
        mean = self._keep_lowest(self._mean) if self._mean is not None else None
        self._log(held_out=last, held_out_of_mean=mean, means=self._means, lowest=self._lowest)
        assert self._at_lowest is not None
        return self._at_lowest

    def _save(self, theta: dict, steps: int):
        metadata = {"lingvo_moe": json.dumps({"format": 1, "model": self._facts["model"], "step": steps})}
        data = save(quantize({path: np.asarray(value) for path, value in tree.flatten(theta).items()}), metadata)
        for number, offset in enumerate(range(0, len(data), _PART)):
            (self._given.output / f"weights.{number}").write_bytes(data[offset : offset + _PART])
        self._log(saved_bytes=len(data), steps=steps)

    def _log(self, **values):
        line = json.dumps({"t": round(time.time() - self._begin, 1), **values})
        print(line, flush=True)
        print(line, file=self._log_file, flush=True)


class _Every:
    """Whether a number of seconds has passed since it last had."""

    def __init__(self, seconds: float):
        self._seconds, self._last = seconds, time.time()

    @property
    def is_due(self) -> bool:
        """True once after each period."""
        if time.time() - self._last < self._seconds:
            return False
        self._last = time.time()
        return True


class _Meter:
    """Counts steps and tokens, and reads the metrics of some steps."""

    def __init__(self):
        self.steps = self.tokens = 0
        self._start, self._every = time.time(), _Every(_LOG_EVERY)
        self._then = (self._start, 0, 0)
        self._losses: list[jax.Array] = []
        self._metrics: dict = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.time() - self._start

    @property
    def is_due(self) -> bool:
        """Whether to log."""
        return bool(self._losses) and self._every.is_due

    def add(self, tokens: int, metrics: dict):
        """Adds a step; waits for an earlier one, so that few are dispatched ahead of the device."""
        self.steps, self.tokens, self._metrics = self.steps + 1, self.tokens + tokens, metrics
        if self.steps % _READ_LOSS_EVERY == 0:
            self._losses.append(metrics["cross_entropy"])
            jax.block_until_ready(self._losses[-2:][0])

    def read(self) -> dict:
        """Returns the values to log, of the steps since the last time."""
        values = {name: float(self._metrics[name]) for name in ("learning_rate", "skipped")}
        loss, self._losses = float(np.mean([float(loss) for loss in self._losses])), []
        (then, steps, tokens), self._then = self._then, (time.time(), self.steps, self.tokens)
        seconds = self._then[0] - then
        rates = {"steps_a_second": (self.steps - steps) / seconds, "tokens_a_second": (self.tokens - tokens) / seconds}
        return {"steps": self.steps, "tokens": self.tokens, "loss": loss, **values, **rates}


def _compile(directory: pathlib.Path, engine: Engine) -> list[Executable]:
    """Compiles the programs at the same time."""
    programs = [Program.load(str(directory / f"{name}.zip")) for name in PROGRAMS]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(engine.load, programs))


def _average(mean: dict, theta: dict, number: float) -> dict:
    return jax.tree.map(lambda old, new: old + (new - old) / number, mean, theta)


if __name__ == "__main__":
    sys.exit(main())
