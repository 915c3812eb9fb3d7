"""Plans the whole zoo at full scale, one model after another, into docs/plans; tools.report makes a page of them.

    python -m tools.plan_zoo [--only=m4,sparse_lm.MoE10B32E] [--again]

A plan that is already there is left alone, unless --again. Each is a process of its own, `python -m lingvo_moe plan NAME`,
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
flags.DEFINE_list("only", [], "beginnings of names of plans; default: all", flag_values=_VALUES)
flags.DEFINE_boolean("again", False, "make plans that are there already once more", flag_values=_VALUES)
_SMALLEST_SLICE = 32  # cores; what runs at home is not planned

_M4_ROWS = ("MoE128E12L", "MoE128E36L", "MoE512E12L", "MoE512E36L", "MoE2048E12L", "MoE2048E36L")
_M4_BATCH = {"128": 4096, "512": 4096, "2048": 16_384}


def variants() -> dict[str, tuple[str, tuple[str, ...]]]:
    """By the name of the plan: the model and what is changed of it, for the questions that the tables leave open."""
    found = {}
    for row in _M4_ROWS:
        cores = row[3:].partition("E")[0]
        # The other reading of "batch tokens": so many on each side. Twice the activations: less is kept.
        found[f"m4.{row}.each_side"] = (f"m4.{row}", (f"input.batch_size={2 * _M4_BATCH[cores]}", "model.remat=full"))
    # As many tokens per core as 2048 cores have with 4M on each side, where an expert's capacity is exactly 1: memory against
    # the number of experts. (With 4M of both sides it is a half, and rounded up.)
    for row in ("MoE128E12L", "MoE128E36L"):
        found[f"m4.{row}.tokens_per_core"] = (f"m4.{row}", ("input.batch_size=2048", "model.remat=full"))
    for attempt in ("gspmd_attempt_1", "gspmd_attempt_2"):
        for mesh in ("8x16", "16x32", "32x64"):
            found[f"dense_lm.Dense64BMesh{mesh}.{attempt}"] = (f"dense_lm.Dense64BMesh{mesh}", (f"layout={attempt}",))
    found["m4.MoE2048E60L.replicated"] = ("m4.MoE2048E60L", ("layout=gshard",))
    return found


def plans() -> dict[str, tuple[str, tuple[str, ...]]]:
    """All plans: every registered model for a slice, and `variants`."""
    giants = {name: (name, ()) for name in registry.names() if experiment.get(name).mesh.size >= _SMALLEST_SLICE}
    return giants | variants()


def main(arguments: list[str]):
    """Makes the plans that are missing; one that fails does not keep the others from being made."""
    app.no_arguments(arguments[1:])
    wanted = {name: plan for name, plan in plans().items() if not _VALUES.only or name.startswith(tuple(_VALUES.only))}
    if not wanted:
        raise UserError(
            f"--only={','.join(_VALUES.only)}: no plan's name begins so; the names are {', '.join(plans())}."
        )
    missing = {
        name: plan for name, plan in wanted.items() if _VALUES.again or not (DIRECTORY / f"{name}.json").exists()
    }
    print(f"{len(wanted) - len(missing)} plans are there, {len(missing)} to make")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    failed = []
    with progress.bar("planning", len(missing), "models") as advance:
        for name, (model, changes) in missing.items():
            if subprocess.run(command(name, model, changes), stdout=subprocess.DEVNULL).returncode:
                failed.append(name)
            advance(note=name)
    if failed:
        raise UserError(f"no plan could be made of {', '.join(failed)}; what is wrong stands above.")


def command(name: str, model: str, changes: tuple[str, ...]) -> list[str]:
    """The command that makes one plan."""
    sets = [f"--set={change}" for change in changes]
    return [sys.executable, "-m", "lingvo_moe", "plan", model, *sets, f"--json={DIRECTORY / name}.json"]


if __name__ == "__main__":
    app.run(main, _VALUES)
