"""Plans every registered giant at full scale, one after another, into docs/plans; tools.report makes a page of them.

    python -m tools.plan_zoo [--only=m4,sparse_lm.MoE10B32E] [--again]

An existing plan is kept, unless --again. Each plan is made by a process of its own, `python -m lingvo_moe plan NAME`,
and takes one to three minutes of one core.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

from absl import flags

from lingvo_moe import experiment, registry
from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.utils import progress

DIRECTORY = pathlib.Path(__file__).parent.parent / "docs" / "plans"
_VALUES = flags.FlagValues()
flags.DEFINE_list("only", [], "prefixes of names of plans; default: all", flag_values=_VALUES)
flags.DEFINE_boolean("again", False, "also make the plans that exist", flag_values=_VALUES)
_SMALLEST_SLICE = 32  # cores; smaller models run on a workstation and are not planned

_M4_ROWS = ("MoE128E12L", "MoE128E36L", "MoE512E12L", "MoE512E36L", "MoE2048E12L", "MoE2048E36L")
_M4_BATCH = {"128": 8192, "512": 8192, "2048": 32_768}


def variants() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns (model, changed settings) by the name of the plan, for the questions that the papers leave open."""
    found = {}
    for row in _M4_ROWS:
        cores = row[3:].partition("E")[0]
        # The other reading of "batch tokens": those of both sides together.
        found[f"m4.{row}.both_sides"] = (f"m4.{row}", (f"input.batch_size={_M4_BATCH[cores] // 2}",))
    # The tokens per core of 2048 cores: memory against the number of experts.
    for layers in (12, 36):
        remat = experiment.get(f"m4.MoE2048E{layers}L").model.remat
        found[f"m4.MoE128E{layers}L.tokens_per_core"] = (
            f"m4.MoE128E{layers}L",
            ("input.batch_size=2048", f"model.remat={remat}"),
        )
    # Appendix A.6's capacity, C = 2BL/(DE): with G = 2D twice that of section 2.2.
    for row in ("MoE128E12L", "MoE2048E36L"):
        found[f"m4.{row}.capacity_of_a6"] = (f"m4.{row}", ("model.capacity_factor=4",))
    for attempt in ("gspmd_attempt_1", "gspmd_attempt_2"):
        for mesh in ("8x16", "16x32", "32x64"):
            found[f"dense_lm.Dense64BMesh{mesh}.{attempt}"] = (f"dense_lm.Dense64BMesh{mesh}", (f"layout={attempt}",))
    found["m4.MoE2048E60L.replicated"] = ("m4.MoE2048E60L", ("layout=gshard",))
    return found


def plans() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns all plans: every registered model for a slice, and `variants`."""
    giants = {name: (name, ()) for name in registry.names() if experiment.get(name).mesh.size >= _SMALLEST_SLICE}
    return giants | variants()


def main(arguments: list[str]):
    """Makes the missing plans; after a failure the others are still made."""
    app.no_arguments(arguments[1:])
    wanted = {name: plan for name, plan in plans().items() if not _VALUES.only or name.startswith(tuple(_VALUES.only))}
    if not wanted:
        raise UserError(
            f"--only={','.join(_VALUES.only)}: no plan's name starts so; the names are {', '.join(plans())}."
        )
    missing = {
        name: plan for name, plan in wanted.items() if _VALUES.again or not (DIRECTORY / f"{name}.json").exists()
    }
    print(f"{len(wanted) - len(missing)} plans exist, {len(missing)} to make")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    failed = []
    with progress.bar("planning", len(missing), "models") as advance:
        for name, (model, changes) in missing.items():
            if subprocess.run(command(name, model, changes), stdout=subprocess.DEVNULL).returncode:
                failed.append(name)
            advance(note=name)
    if failed:
        raise UserError(f"no plan could be made of {', '.join(failed)}; see the errors above.")


def command(name: str, model: str, changes: tuple[str, ...]) -> list[str]:
    """Returns the command that makes one plan."""
    sets = [f"--set={change}" for change in changes]
    return [sys.executable, "-m", "lingvo_moe", "plan", model, *sets, f"--json={DIRECTORY / name}.json"]


if __name__ == "__main__":
    app.run(main, _VALUES)
