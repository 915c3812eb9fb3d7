"""The command eval for models that segment volumes."""

from __future__ import annotations

from lingvo_moe.cli import run_setup
from lingvo_moe.cli.run_config import EvalConfig
from lingvo_moe.cli.scores import write_scores
from lingvo_moe.errors import UserError
from lingvo_moe.inference import segmenter
from lingvo_moe.inference.segmenter import ClassScore
from lingvo_moe.utils import output_files


def evaluate(config: EvalConfig):
    """Prints the Dice coefficient of each class, then their mean, beside those of the baseline."""
    for flag in ("languages", "beam_size"):
        if flag in config.given:
            raise UserError(
                f"--{flag} is for texts; {config.full_name()} segments volumes that a program makes. Leave it out."
            )
    name, experiment, engine = run_setup.set_up(config, "decode", {})
    model = segmenter.Segmenter(name, experiment, engine, config.log_directory())
    scores = segmenter.evaluate(model, experiment, config.max_pairs, config.split)
    print(table(scores, summary=config.summary), file=output_files.table_stream(config.json))
    write_scores(config, name, model.step, scores)


def table(scores: list[ClassScore], summary: bool = False) -> str:
    """Returns the scores by class, unless a `summary`, and their mean."""
    row = "{:12} {:>12} {:>8} {:>16}".format
    rows = (
        row(score.name, _count(score.voxels), f"{score.dice:.3f}", f"{score.threshold_dice:.3f}")
        for score in (scores[-1:] if summary else scores)
    )
    return "\n".join([row("class", "voxels", "Dice", "threshold's Dice"), *rows])


def _count(voxels: int | None) -> str:
    return "" if voxels is None else f"{voxels:,}"
