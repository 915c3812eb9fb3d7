"""The command export: writes a program to a file."""

from __future__ import annotations

import logging
import os

from lingvo_moe.cli.run_config import ExportConfig
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.experiment import get as get_experiment
from lingvo_moe.utils import counts, output_files

_logger = logging.getLogger(__name__)
_OF_EVERY_MODEL = ("init", "train", "evaluate")


def export(config: ExportConfig):
    """`export`: lowers a program from specs alone and writes its bundle."""
    if config.output is None:
        raise UserError("--output is missing: the file to write the program to.")
    output_files.check_path("--output", config.output, is_text=False)
    name = config.full_name()
    experiment = get_experiment(name, config.assignments, config.device_mesh())
    _check_program(config.program, name, experiment)
    steps, specs = experiment.steps, experiment.input.specs()
    program = {
        "init": steps.init,
        "train": lambda: steps.train(specs),
        "evaluate": lambda: steps.evaluate(specs),
        "decode": lambda: steps.decode(experiment.decoding_specs(), experiment.search),
        "transcribe": lambda: steps.transcribe(specs["source"]),
        "segment": lambda: steps.segment(specs["source"]),
    }[config.program]()
    program.check_divisible()
    program.save(config.output)
    devices, size = counts.counted(experiment.mesh.size, "device"), counts.file_size(os.path.getsize(config.output))
    _logger.info("%s: %s of %s for %s, %s", config.output, program.name, name, devices, size)


def _check_program(program: str, name: str, experiment: Experiment):
    """Raises UserError for a program that models of this kind do not have, before anything is lowered."""
    kind, inference = "neither translates nor generates text", ()
    if experiment.recognises:
        kind, inference = "recognises speech", ("transcribe",)
    elif experiment.segments:
        kind, inference = "segments volumes", ("segment",)
    elif experiment.translates:
        kind, inference = "translates", ("decode",)
    elif experiment.generates:
        kind, inference = "generates text", ("decode",)
    programs = (*_OF_EVERY_MODEL, *inference)
    if program not in programs:
        raise UserError(f"--program={program}: {name} {kind}; its programs are {', '.join(programs)}.")
