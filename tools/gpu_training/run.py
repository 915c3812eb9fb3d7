"""Trains with programs of `tools.gpu_training.make`; needs no TensorFlow.

    python -m tools.gpu_training.feed build/gpu_training --corpus=DIR --tokenizers=DIR --output=/dev/shm/feed &
    python -m tools.gpu_training.run build/gpu_training --corpus=DIR --tokenizers=DIR --feed=/dev/shm/feed
        --output=DIR (--seconds=500 | --steps=20000) [--cooldown=0,1] [--state=FILE] [--platform=gpu] [--trace=DIR]

After the warm-up, the learning rate follows the schedule's cool-down from the first of the shares of --cooldown to the
second, over the given time or steps; `cooldown_steps` must be above the number of steps. --state is a file to continue
from, if it exists, and to write, every 150 seconds and at the end; continue with another --seed of the feed, or the
same examples are read again. Ctrl-C, SIGTERM and a feed that ends save state and weights. The log says which --cooldown
continues a run: with each state that is written during it, and where it is stopped. In the last sixth of a run that
ends its cool-down, the mean of up to 100 weights is taken. The output is `log.jsonl` and `weights.safetensors`, in
int8: of all weights that were evaluated (the initial ones, some in between, the last, the mean), those with the lowest
held-out loss. --trace writes the profiler's trace of two further steps, whose weights are not kept, after all else; a
run that is stopped writes none.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import pathlib
import signal
import sys
import threading
import time
from typing import TextIO

import jax
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from lingvo_moe import tree
from lingvo_moe.data.pipeline import EvalInput
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.engines.pjrt import Engine, Executable
from lingvo_moe.errors import UserError
from lingvo_moe.program import Program
from lingvo_moe.ranges import ABOVE_0
from lingvo_moe.training import weights_file
from lingvo_moe.training.loss import total_loss
from lingvo_moe.training.quantization import quantize
from lingvo_moe.utils import output_files
from lingvo_moe.utils.exit_status import INTERRUPTED
from tools import traced_steps
from tools.gpu_training import PROGRAMS, WEIGHTS, count, read_facts, seed
from tools.gpu_training.batches import Batches
from tools.gpu_training.meter import Every, Meter

_WEIGHTS, _SAVE_EVERY = "weights.safetensors", 150  # seconds
_MAX_SKIPPED = 10  # updates in a row that are not finite, as `training.max_skipped`
_MEAN_FROM, _MEANS = 5 / 6, 100  # share of the run, number of weights


def main(arguments: list[str] | None = None) -> int:
    """Trains; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_training.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", type=pathlib.Path, help="directory that tools.gpu_training.make wrote")
    parser.add_argument("--corpus", required=True, help="for its held-out pairs")
    parser.add_argument("--tokenizers", required=True)
    parser.add_argument("--feed", type=pathlib.Path, required=True, help="the output of tools.gpu_training.feed")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=_positive, help="of the run, without compilation")
    length.add_argument("--steps", type=count, help="of the run")
    parser.add_argument(
        "--cooldown", type=_shares, default=(0.0, 1.0), help="its shares at the start and at the end, as 0,0.5"
    )
    parser.add_argument(
        "--state", type=pathlib.Path, help="file to continue from, and to write, every 150 seconds and at the end"
    )
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory of weights and log")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), default="gpu")
    parser.add_argument("--seed", type=seed, help="of dropout and of the routers' random choices; a state has its own")
    parser.add_argument("--evaluate_every", type=_positive, default=60, help="seconds")
    parser.add_argument("--max_pairs", type=count, default=40, help="held-out pairs of each language")
    parser.add_argument("--trace", type=pathlib.Path, help="directory for the profiler's trace of two further steps")
    given = parser.parse_args(arguments)
    if given.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")  # or JAX starts, and reports, what it cannot use
    try:
        _prepare(given)
        with (given.output / "log.jsonl").open("a", encoding="utf-8") as log:
            return 0 if Run(given, log).train(_stop_at_signals()) else INTERRUPTED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        print(f"error: {error.filename or given.output}: {error.strerror or error}.", file=sys.stderr)
        return 2


def _prepare(given: argparse.Namespace):
    """Makes the output; raises UserError if what is written at the end would be lost, or replace something else."""
    if given.state:
        output_files.check_path("--state", str(given.state), is_text=False)
        if given.seed is not None and given.state.exists():
            raise UserError(f"--seed={given.seed}: --state={given.state} has the seed of its run; leave --seed out.")
    if (given.output / _WEIGHTS).exists():
        raise UserError(f"--output={given.output} has the weights of an earlier run; name a new directory.")
    if given.trace:
        traced_steps.prepare(given.trace)
    given.output.mkdir(parents=True, exist_ok=True)


def _stop_at_signals() -> threading.Event:
    """Returns what the first SIGINT or SIGTERM sets; the second one ends the process."""
    stop = threading.Event()

    def handle(number: int, frame: object):
        stop.set()
        signal.signal(number, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def _positive(text: str) -> float:
    """Returns a number above 0; argparse prints the error behind the flag's name."""
    with contextlib.suppress(ValueError):
        if (value := float(text)) in ABOVE_0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: expected {ABOVE_0}")


def _shares(text: str) -> tuple[float, float]:
    with contextlib.suppress(ValueError):
        first, last = map(float, text.split(","))
        if 0 <= first < last <= 1:
            return first, last
    raise argparse.ArgumentTypeError(f"{text!r}: expected two shares from 0 to 1, the smaller first, as 0,0.5")


class Run:
    """A training run: programs, state and log."""

    def __init__(self, given: argparse.Namespace, log: TextIO):
        """Compiles the programs and reads the held-out pairs.

        Raises:
          UserError: the programs, corpus or tokenizers cannot be read, there is no such device, or the cool-down is too
            short for --steps.
        """
        self._given, self._begin = given, time.time()
        self._log_file = log
        facts = read_facts(given.directory)
        Tokenizers.load_for(facts.vocabularies, given.tokenizers)
        self._tokenizer_hashes = list(facts.config.fingerprints(given.tokenizers))
        self._model, self._config, self._schedule = facts.model, facts.config, facts.schedule
        self._check_steps()
        held_out = EvalInput(given.corpus, given.tokenizers, self._config, max_pairs=given.max_pairs)
        self._held_out = list(held_out.batches())
        if not self._held_out:
            raise UserError(
                f"--corpus={given.corpus}: none of --max_pairs={given.max_pairs} held-out pairs of each language fits "
                "into a row; raise --max_pairs, or use another corpus."
            )
        self._train, self._evaluate = _compile(given.directory, Engine(1, given.platform))
        self._mean, self._means = None, 0
        self._lowest, self._at_lowest, self._steps_at_lowest = np.inf, {}, 0
        self._average = jax.jit(_average, donate_argnums=0)
        device = self._train.shardings("batch")["target"]["ids"].mesh.devices.flat[0]
        self._log(device=device.device_kind, jax=jax.__version__, compiled=True)

    def train(self, stop: threading.Event) -> bool:
        """Trains, and writes weights and state.

        Args:
          stop: ends training after the current step when it is set.

        Returns:
          Whether training has reached its end.

        Raises:
          UserError: the feed has ended, or steps are no longer finite (in both cases weights and state are written), or
            the state is of other programs.
        """
        given = self._given
        state = self._initial_state()
        self._log(held_out=(first := self._keep_lowest(state["theta"], steps=0)))
        if not np.isfinite(first):
            raise UserError(f"{self._initial_file()}: the held-out loss of these weights is {first}; use others.")
        batches = Batches(given.feed, self._config, self._train.shardings("batch"))
        batch, tokens = batches.next()
        position = int(np.asarray(state["step"]))
        warmup = max(0, self._schedule["warmup_steps"] - position)  # a run that stopped within it goes on with it
        meter, evaluates, saves, failed = Meter(), Every(given.evaluate_every), Every(_SAVE_EVERY), None
        while (share := self._share(meter)) < 1 and not (failed or stop.is_set()):
            try:
                batch, tokens = batches.next() if meter.steps else (batch, tokens)
            except UserError as error:
                failed = error
                break
            # Each step has another position: the random numbers of dropout and routers depend on it.
            position = max(position + 1, 0 if meter.steps < warmup else self._position(share))
            outputs = self._train({"state": {**state, "step": np.int32(position)}, "batch": batch})
            state = outputs["state"]
            meter.add(tokens, outputs["metrics"])
            if given.cooldown[1] == 1 and share >= _MEAN_FROM + (1 - _MEAN_FROM) * self._means / _MEANS:
                self._add_to_mean(state["theta"])
            if meter.is_due():
                self._log(position=position, **meter.read(), waiting=batches.waiting)
                failed = _not_finite(state)
            if evaluates.passed():
                self._log(steps=meter.steps, held_out=self._keep_lowest(state["theta"], meter.steps))
            if saves.passed():
                self._save()
                if given.state:
                    self._save_state(state, continue_with=self._remainder(share))
        self._finish(state, meter)
        if share < 1:
            self._log(stopped=True, continue_with=self._remainder(share))
        if failed:
            raise failed
        if given.trace and not stop.is_set():
            self._trace(state, batch)
        return share >= 1

    def _finish(self, state: dict, meter: Meter):
        """Evaluates the last weights and the mean, and writes weights and state."""
        jax.block_until_ready(state["theta"])
        self._log(steps=meter.steps, tokens=meter.tokens, seconds=meter.elapsed)
        last = self._keep_lowest(state["theta"], meter.steps)
        mean = self._keep_lowest(self._mean, meter.steps) if self._mean is not None else None
        self._log(held_out=last, held_out_of_mean=mean, means=self._means, lowest=self._lowest)
        self._save()
        if self._given.state:
            self._save_state(state)

    def _trace(self, state: dict, batch: dict):
        def step():
            nonlocal state
            state = jax.block_until_ready(self._train({"state": state, "batch": batch})["state"])

        traced_steps.trace(self._given.trace, step)
        self._log(traced=str(self._given.trace))

    def _share(self, meter: Meter) -> float:
        """Returns how much of the run is done, 0 to 1."""
        return meter.steps / self._given.steps if self._given.steps else meter.elapsed / self._given.seconds

    def _remainder(self, share: float) -> str:
        """Returns the flag of a run that continues this one after this share of it."""
        first, last = self._given.cooldown
        return f"--cooldown={first + (last - first) * share:.6f},{last:g}"

    def _check_steps(self):
        first, last = self._given.cooldown
        most = round((last - first) * self._schedule["cooldown_steps"])
        if self._given.steps is not None and self._given.steps > most:
            raise UserError(
                f"--steps={self._given.steps}: expected 1 to {most}, the steps of this part of the cool-down; for "
                "more, pass another --set=optimizer.learning_rate.cooldown_steps=N to tools.gpu_training.make."
            )

    def _position(self, share: float) -> int:
        """Returns the step of the schedule after this share of the run."""
        first, last = self._given.cooldown
        passed = first + (last - first) * share
        return int(self._schedule["cooldown_after"] + passed * self._schedule["cooldown_steps"])

    def _initial_file(self) -> pathlib.Path:
        """Returns the file that the run starts from: --state if it exists, else the initial weights."""
        state = self._given.state
        return state if state and state.exists() else self._given.directory / WEIGHTS

    def _initial_state(self) -> dict:
        """Returns the state of --state if there is one; else the initial weights and an optimizer state of zeros."""
        specs = {a.path: a for a in self._train.program.inputs if a.path.startswith("state/")}
        shapes = {path.removeprefix("state/"): (a.shape, a.dtype) for path, a in specs.items()}
        file = self._initial_file()
        try:
            if file == self._given.state:
                flat = load_file(file)
            else:
                flat = {path.removeprefix("state/"): np.zeros(a.shape, a.dtype) for path, a in specs.items()}
                flat["seed"] = np.array([0, self._given.seed or 0], np.int32)
                with safetensors.safe_open(file, "numpy") as opened:
                    for path in shapes:
                        if path.startswith("theta/"):
                            flat[path] = weights_file.read_tensor(opened, path.removeprefix("theta/"))
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{file}: not the weights or the state of these programs ({error}).") from None
        except ValueError:
            raise UserError(f"{file}: a weight and its scale do not fit; make it again.") from None
        described = {path: (value.shape, value.dtype.name) for path, value in flat.items()}
        if described != shapes:
            raise UserError(f"{file}: its tensors are not those of the programs in {self._given.directory}.")
        return tree.unflatten(flat)

    def _held_out_loss(self, theta: dict) -> float:
        """Returns the held-out cross-entropy in nats per target token."""
        tokens, nats = total_loss(
            lambda batch: self._evaluate({"theta": theta, "batch": batch})["metrics"], self._held_out
        )
        return nats / tokens

    def _keep_lowest(self, theta: dict, steps: int) -> float:
        """Returns the held-out loss, and keeps the weights if it is the lowest so far; `steps` is the step's number."""
        loss = self._held_out_loss(theta)
        if loss < self._lowest:
            self._lowest, self._at_lowest = loss, jax.tree.map(jax.numpy.copy, theta)
            self._steps_at_lowest = steps
        return loss

    def _add_to_mean(self, theta: dict):
        self._means += 1
        copy = jax.tree.map(jax.numpy.copy, theta)
        self._mean = copy if self._mean is None else self._average(self._mean, copy, float(self._means))

    def _save(self):
        """Writes the weights with the lowest held-out loss so far."""
        steps = self._steps_at_lowest
        theta = {path: np.asarray(value) for path, value in tree.flatten(self._at_lowest).items()}
        with output_files.atomic_path(self._given.output / _WEIGHTS) as partial:
            known = weights_file.Facts(self._model, steps, self._tokenizer_hashes)
            save_file(quantize(theta), partial, weights_file.metadata(known))
        self._log(saved=True, steps=steps)

    def _save_state(self, state: dict, **logged: str):
        """Writes the state that another run can continue from."""
        with output_files.atomic_path(self._given.state) as partial:
            save_file({path: np.asarray(value) for path, value in tree.flatten(state).items()}, partial)
        self._log(state=str(self._given.state), **logged)

    def _log(self, **values):
        line = json.dumps({"t": round(time.time() - self._begin, 1), **values})
        print(line, flush=True)
        print(line, file=self._log_file, flush=True)


def _compile(directory: pathlib.Path, engine: Engine) -> list[Executable]:
    """Compiles the programs at the same time."""
    try:
        programs = [Program.load(str(directory / f"{name}.zip")) for name in PROGRAMS]
    except UserError as error:
        raise UserError(f"{error} Here, tools.gpu_training.make writes it.") from None
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(engine.compile, programs))


def _not_finite(state: dict) -> UserError | None:
    """Returns an error if the last updates were skipped because loss or gradients were not finite."""
    if (skipped := int(np.asarray(state["skipped_in_a_row"]))) < _MAX_SKIPPED:
        return None
    return UserError(
        f"the last {skipped} updates were skipped as non-finite. Start again from the weights of the output, with a "
        "lower --set=optimizer.learning_rate.peak_value of tools.gpu_training.make."
    )


def _average(mean: dict, theta: dict, number: float) -> dict:
    return jax.tree.map(lambda old, new: old + (new - old) / number, mean, theta)


if __name__ == "__main__":
    sys.exit(main())
