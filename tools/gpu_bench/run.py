"""Trains and decodes with programs of `tools.gpu_bench.make`; needs JAX, NumPy and this repository.

    python -m tools.gpu_bench.run build/gpu_bench [--platform=gpu] [--steps=20] [--peak=TFLOP/S] [--json=FILE]
        [--trace=DIR]

Trains on one batch of random sentences, whose loss must fall, and translates random sentences; prints tokens per second
and model FLOPs utilisation: the operations that the model asks for (lingvo_moe/analysis/flops.py), per second of the
fastest step, over the device's peak. --trace writes the profiler's trace of two further steps, for XProf or Perfetto.
The status is 1 if the loss did not fall.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

from lingvo_moe import tree
from lingvo_moe.engines.pjrt import Engine, Executable
from lingvo_moe.errors import UserError
from lingvo_moe.program import Program
from lingvo_moe.utils import output_files
from tools import traced_steps
from tools.gpu_bench import FACTS, PROGRAMS

# Dense TFLOP/s by JAX's name of the device and the type of the activations, from the data sheets; others need --peak.
PEAKS = {
    ("NVIDIA H200", "bfloat16"): 989.0,
    ("NVIDIA H100 80GB HBM3", "bfloat16"): 989.0,
    ("NVIDIA A100-SXM4-80GB", "bfloat16"): 312.0,
    ("NVIDIA A100-SXM4-40GB", "bfloat16"): 312.0,
}
_BEGIN, _FIRST_WORD = 2, 4  # the id that starts a target; lower ids than the first word's are special tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_bench.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", type=pathlib.Path, help="directory that tools.gpu_bench.make wrote")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="default: the one that JAX prefers")
    parser.add_argument("--steps", type=int, default=20, help="measured training steps, after a warm-up step")
    parser.add_argument("--peak", type=float, help="the device's peak TFLOP/s; default: by its name, for bfloat16")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--trace", type=pathlib.Path, help="directory for the profiler's trace of two steps")
    given = parser.parse_args(arguments)
    try:
        if given.platform == "cpu":
            jax.config.update("jax_platforms", "cpu")  # or JAX starts, and reports, what it cannot use
        if given.steps < 1:
            raise UserError(f"--steps={given.steps}: at least one step is needed.")
        if given.peak is not None and not (math.isfinite(given.peak) and given.peak > 0):
            raise UserError(f"--peak={given.peak:g}: expected TFLOP/s above 0.")
        output_files.check_path("--json", given.json and str(given.json))
        if given.trace:
            traced_steps.prepare(given.trace)
        figures = run(given.directory, given.platform, given.steps, given.peak, given.trace)
        _print(figures)
        if given.json:
            with output_files.atomic_writer(str(given.json)) as file:
                file.write(json.dumps(figures, indent=1) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if figures["last loss"] < figures["first loss"]:
        return 0
    print("error: the loss did not fall, so the figures are not those of training.", file=sys.stderr)
    return 1


def run(
    directory: pathlib.Path,
    platform: str | None,
    steps: int,
    peak: float | None,
    trace: pathlib.Path | None,
) -> dict:
    """Measures and returns the figures by name; then traces two further steps if `trace` names a directory.

    Raises:
      UserError: the directory holds something else, there is no such device, or a loss is not finite.
    """
    facts, programs = _facts(directory), {name: Program.load(str(directory / f"{name}.zip")) for name in PROGRAMS}
    engine = Engine(1, platform)
    init, train, decode = (_loaded(engine, programs[name]) for name in PROGRAMS)
    state = init({"seed": np.array([0, 1], np.int32)})["state"]
    source = _sentences(programs["decode"], facts["vocabulary"])["source"]
    decoding, lengths = _decode(decode, state["theta"], source)
    losses, seconds = _train(train, state, _sentences(programs["train"], facts["vocabulary"]), steps, trace)
    fastest = min(seconds)
    return {
        "model": facts["model"],
        "weights": facts["weights"],
        "activations": facts["dtype"],
        "device": engine.devices[0].device_kind,
        "jax": jax.__version__,
        "TensorFlow in the process": sys.modules.get("tensorflow") is not None,
        "first loss": losses[0],
        "last loss": losses[-1],
        "seconds a step, fastest": fastest,
        "seconds a step, median": float(np.median(seconds)),
        "tokens a second": facts["tokens"] / fastest,
        **_utilisation(facts["flop"] / fastest / 1e12, engine.devices[0].device_kind, facts["dtype"], peak),
        "sentences decoded": len(lengths),
        "seconds of decoding": decoding,
        "tokens decoded a second": float(lengths[:, 0].sum() / decoding),
    }


def _utilisation(speed: float, device: str, dtype: str, peak: float | None) -> dict[str, float | None]:
    """Returns the figures of a speed in TFLOP/s; None for those that follow from a peak that is not known."""
    peak = peak or PEAKS.get((device, dtype))
    return {"model TFLOP/s": speed, "peak TFLOP/s": peak, "utilisation, %": 100 * speed / peak if peak else None}


def _train(
    train: Executable, state: dict, batch: dict, steps: int, trace: pathlib.Path | None
) -> tuple[list[float], list[float]]:
    """Returns (losses, seconds of each step after the first); the steps that are traced are further ones."""
    losses, seconds = [], []
    batch = tree.map_leaves(jax.device_put, batch, train.shardings("batch"))

    def step() -> float:
        nonlocal state
        outputs = train({"state": state, "batch": batch})
        state = outputs["state"]
        return float(outputs["metrics"]["cross_entropy"])  # waits for the step

    for _ in range(steps + 1):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
    if not all(map(math.isfinite, losses)):
        raise UserError(f"the losses are {losses}; expected finite ones; this device computes wrongly.")
    if trace:
        traced_steps.trace(trace, step)
    return losses, seconds[1:]


def _decode(decode: Executable, theta: dict, source: dict) -> tuple[float, np.ndarray]:
    """Returns (seconds of the faster of two searches, tokens of each hypothesis)."""
    seconds, lengths = [], np.empty(0)
    for _ in range(2):
        start = time.perf_counter()
        lengths = np.asarray(decode({"theta": theta, "source": source})["lengths"])
        seconds.append(time.perf_counter() - start)
    return min(seconds), lengths


def _sentences(program: Program, vocabulary: int) -> dict:
    """Returns random sentences for every input of a program but its state and weights; rows have no padding."""
    random, sides = np.random.default_rng(0), {}
    for argument in program.inputs:
        *groups, side, name = argument.path.split("/")
        if groups not in ([], ["batch"]) or side not in ("source", "target"):
            continue
        if name == "segment_ids":
            values = np.ones(argument.shape)
        elif name == "positions":
            values = np.tile(np.arange(argument.shape[1]), (argument.shape[0], 1))
        else:
            values = random.integers(_FIRST_WORD, vocabulary, argument.shape)
        sides.setdefault(side, {})[name] = values.astype(argument.dtype)
    if "target" in sides:
        labels = sides["target"]["labels"]
        sides["target"]["ids"] = np.concatenate([np.full_like(labels[:, :1], _BEGIN), labels[:, :-1]], axis=1)
    return sides


def _loaded(engine: Engine, program: Program) -> Executable:
    print(f"compiling {program.name} for {engine.devices[0].device_kind} ...", file=sys.stderr, flush=True)
    return engine.compile(program)


def _facts(directory: pathlib.Path) -> dict:
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        return {name: facts[name] for name in ("model", "weights", "flop", "tokens", "dtype", "vocabulary")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{directory / FACTS}: not what tools.gpu_bench.make writes ({error}); make it again."
        ) from None


def _print(figures: dict):
    for name, value in figures.items():
        print(f"{name:28} {'not known' if value is None else f'{value:,.4g}' if isinstance(value, float) else value}")


if __name__ == "__main__":
    sys.exit(main())
