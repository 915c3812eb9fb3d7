"""Searches layouts for models of the papers with the cost model alone, as `plan NAME --search=layout --top=0` does.

    python -m tools.partitioning.layout_searches [--output=docs/layout_searches.json]

Each search takes 8 to 52 seconds of one core. tools.report shows the results beside compiled plans, of which
tools.plan_zoo makes those named `found`.
"""

from __future__ import annotations

import math
import pathlib
import time

from absl import flags

from lingvo_moe import experiment
from lingvo_moe.analysis import layout_search
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice, v3_slice
from lingvo_moe.utils import output_files, progress
from tools.report import searches
from tools.report.searches import LayoutSearch

_VALUES = flags.FlagValues()
flags.DEFINE_string("output", "docs/layout_searches.json", "the file of results", flag_values=_VALUES)
# Of GSPMD's tables 2, 7, 3 and 4, and of GShard's table 1.
MODELS = (
    "dense_lm.Dense64BMesh8x16",
    "hybrid_lm.MoE33B8E",
    "dense_lm.Narrow16BMesh32x8",
    "dense_lm.Pipelined16BMesh4x16x4",
    "m4.MoE2048E36L",
    "m4.MoE2048E60L",
)


def search(model: str) -> LayoutSearch:
    """Predicts every legal layout of a registered model on its own TPU v3 slice."""
    own = experiment.get(model)
    target = Slice.of(v3_slice(own.mesh.size))
    space = layout_search.space_of(own, own.mesh.size, (), None, varies_batch=False)
    started = time.process_time()
    ranking = layout_search.rank(own, target, space)
    seconds = time.process_time() - started
    best, registered = ranking.best[0], ranking.own
    assert registered is not None  # `experiment.get` has checked it
    is_own = math.isclose(best.estimate.seconds, registered.estimate.seconds, rel_tol=1e-3)
    return LayoutSearch(
        model=model,
        layouts=ranking.num_candidates,
        faster=ranking.num_faster(registered),
        cpu_seconds=seconds,
        own_seconds=registered.estimate.seconds,
        found_seconds=best.estimate.seconds,
        found=() if is_own else tuple(sorted(best.changes)),
    )


def main(arguments: list[str]):
    """Writes the file."""
    app.no_arguments(arguments[1:])
    output_files.check_path("--output", _VALUES.output)
    found = [search(model) for model in progress.track(MODELS, "searching layouts", unit="models")]
    searches.save(found, pathlib.Path(_VALUES.output))


if __name__ == "__main__":
    app.run(main, _VALUES)
