"""Compares the cost model of layouts with the compiler: over random legal layouts, and over the plans of docs/plans.

    python -m tools.partitioning.rank_layouts --count=60 --output=build/rank_layouts.json [--seed=1]
    python -m tools.partitioning.rank_layouts --calibration

The first command compiles random layouts of a model of medium size for a slice, one after another, and prints
Spearman's rank correlation of predicted and compiled step times; it continues a file that exists. The second one
predicts the registered large models, which have plans.
"""

from __future__ import annotations

import json
import math
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from lingvo_moe import experiment
from lingvo_moe.analysis import layout_space, plan
from lingvo_moe.analysis.cost_model import CostModel
from lingvo_moe.analysis.layout_space import Candidate, Space
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import output_files, progress
from tools import correlation, plan_zoo

_VALUES = flags.FlagValues()
flags.DEFINE_boolean("calibration", False, "compare with docs/plans, and compile nothing", flag_values=_VALUES)
flags.DEFINE_string("model", "hybrid_lm.Small", "the registered model of random layouts", flag_values=_VALUES)
flags.DEFINE_multi_string("set", [], "override FIELD=VALUE, after those of SIZES", flag_values=_VALUES)
flags.DEFINE_string("topology", "v3:4x4x1", "the TPU slice to compile for", flag_values=_VALUES)
flags.DEFINE_integer("count", 60, "number of layouts that fit to compile", lower_bound=2, flag_values=_VALUES)
flags.DEFINE_integer("seed", 1, "random seed", flag_values=_VALUES)
flags.DEFINE_string("output", "build/rank_layouts.json", "the file of results", flag_values=_VALUES)
# Large enough that no term of a step is negligible, small enough that most layouts fit.
SIZES = (
    "model.num_layers=8",
    "model.model_dim=2048",
    "model.hidden_dim=8192",
    "model.num_heads=16",
    "model.head_dim=128",
    "model.num_experts=16",
    "model.target_vocabulary=32000",
    "model.num_groups=64",
    "model.residual_dropout=0",
    "model.activation_dtype=bfloat16",
    "input.batch_size=64",
    "input.target_length=512",
)


def choose(config: Experiment, devices: int, seed: int) -> Iterator[Candidate]:
    """Yields all legal layouts in random order: each mesh is as likely as any other, and so is each of its layouts.

    Without pipelines and microbatches, of which there are many more than of others.
    """
    space = Space(devices, (config.input.batch_size,), pipelines=("none",), microbatches=1)
    by_mesh: dict[tuple, list[Candidate]] = {}
    for candidate in layout_space.candidates(config, space):
        by_mesh.setdefault(candidate.mesh.shape, []).append(candidate)
    generator = random.Random(seed)
    while by_mesh:
        mesh = generator.choice(sorted(by_mesh))
        left = by_mesh[mesh]
        yield left.pop(generator.randrange(len(left)))
        if not left:
            del by_mesh[mesh]


def main(arguments: list[str]):
    """Prints the comparison."""
    app.no_arguments(arguments[1:])
    if _VALUES.calibration:
        _calibrate()
        return
    target, output = Slice.of(_VALUES.topology), pathlib.Path(_VALUES.output)
    devices = len(target.devices)
    assignments = [*SIZES, *_VALUES.set]
    config = experiment.unchecked(_VALUES.model, assignments)
    model = CostModel(config, target)
    settings = {"model": _VALUES.model, "set": assignments, "topology": _VALUES.topology, "seed": _VALUES.seed}
    results = read(output, settings) if output.exists() else []
    output.parent.mkdir(parents=True, exist_ok=True)
    output_files.check_path("--output", str(output))
    done = sum(result["fits"] for result in results)
    with progress.bar("compiling random layouts", _VALUES.count, "layouts", done) as advance:
        for number, candidate in enumerate(choose(config, devices, _VALUES.seed)):
            if sum(result["fits"] for result in results) >= _VALUES.count:
                break
            if number < len(results):
                continue
            results.append(_compared(config, candidate, model, target, assignments))
            with output_files.atomic_writer(str(output)) as file:
                file.write(json.dumps({**settings, "results": results}, indent=1) + "\n")
            advance(int(results[-1]["fits"]))
    print(report(results))


def read(output: pathlib.Path, settings: Mapping[str, Any]) -> list[dict]:
    """Returns the results in a file; raises UserError if they are of other flags than `settings`, or no results."""
    try:
        content = json.loads(output.read_text(encoding="utf-8"))
        results = content.pop("results")
        for result in results:
            _check(result)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"--output={output} is not a file of this tool ({error}); name another file.") from None
    for name, value in settings.items():
        if content.get(name) != value:
            raise UserError(
                f"--output={output} has results of --{name}={content.get(name)}, not of {value}; pass the same flags, "
                f"or name another file."
            )
    return results


def _check(result: Any):
    """Raises ValueError, KeyError or TypeError for what `_compared` does not return."""
    if not isinstance(result["fits"], bool):
        raise ValueError("`fits` is neither true nor false")
    needed = ["predicted_bytes", "predicted_seconds", *(["bytes", "seconds"] if result["fits"] else [])]
    for name in [*needed, *(["bytes"] if "bytes" in result else [])]:
        if isinstance(result[name], bool) or not 0 < result[name] < math.inf:
            raise ValueError(f"`{name}` is not a number above 0")


def _compared(
    config: Experiment, candidate: Candidate, model: CostModel, target: Slice, assignments: Sequence[str]
) -> dict:
    """The prediction and the plan of a candidate as plain values."""
    changes, estimate = candidate.changes(config), model.estimate(candidate)
    result: dict = {"changes": changes, "predicted_seconds": estimate.seconds, "predicted_bytes": estimate.bytes}
    try:
        made = plan.make(_VALUES.model, experiment.get(_VALUES.model, [*assignments, *changes]), target)
    except UserError as error:
        return result | {"fits": False, "refusal": str(error)}
    result |= {"fits": made.fits, "bytes": made.memory.needed or made.memory.total}
    if made.fits:
        result |= {"seconds": made.step_seconds, "compute_seconds": made.compute_seconds}
        result |= {"predicted_compute_seconds": sum(estimate.compute.values())}
    return result


def report(results: Sequence[dict]) -> str:
    """Returns the correlations of what was compiled and fits, and the errors of the memory of all.

    Raises:
      UserError: fewer than two layouts fit, so that there is nothing to rank.
    """
    timed = [result for result in results if result["fits"]]
    if len(timed) < 2:
        raise UserError(
            f"{len(timed)} of {len(results)} layouts fit, and a comparison needs two; name a larger --topology, or "
            f"pass --set with a smaller model or batch."
        )
    pairs = [(result["predicted_seconds"], result["seconds"]) for result in timed]
    ratios = np.array([predicted / compiled for predicted, compiled in pairs])
    memory = [(result["predicted_bytes"], result["bytes"]) for result in results if "bytes" in result]
    refused = sum("refusal" in result for result in results)
    best = min(timed, key=lambda result: result["predicted_seconds"])
    lines = [
        f"{len(results)} random layouts: {len(timed)} fit, {refused} refused",
        f"rank correlation of step times: {_rank_correlation(pairs)}",
        f"rank correlation of memory: {_rank_correlation(memory)}",
        f"predicted / compiled time: median {np.median(ratios):.2f}, from {ratios.min():.2f} to {ratios.max():.2f}",
        f"the predicted best takes {best['seconds'] / min(second for _, second in pairs):.2f} of the fastest's time",
    ]
    return "\n".join(lines)


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> str:
    predicted, compiled = zip(*pairs)
    return correlation.text({"predicted": predicted, "compiled": compiled}, 3)


def _calibrate():
    """Prints predicted and compiled figures of every plan of a training step on a slice."""
    print(f"{'plan':42}{'compute s':>18}{'collectives s':>18}{'GiB':>16}")
    for path in sorted(plan_zoo.DIRECTORY.glob("*.json")):
        made = plan.Plan.load(path)
        generation, _, chips = made.topology.partition(":")
        if made.program != "train" or generation != "v3":
            continue
        config = experiment.get(made.model, made.changes, DeviceMesh.parse(made.mesh))
        if not isinstance(config.model, Transformer) or config.recognises:
            continue
        target = Slice(made.topology, generation, tuple(map(int, chips.split("x"))), tuple(range(made.devices)))
        estimate = CostModel(config, target).estimate(layout_space.registered(config))
        compute, collectives = sum(estimate.compute.values()), sum(estimate.collectives.values())
        times = f"{compute:9.3f}{made.compute_seconds or 0:9.3f}{collectives:9.3f}{made.collective_seconds:9.3f}"
        needed = made.memory.needed or made.memory.total
        print(f"{path.stem:42}{times}{estimate.bytes / 2**30:8.2f}{needed / 2**30:8.2f}")


if __name__ == "__main__":
    app.run(main, _VALUES)
