"""The command export: writes a program to a file."""

from __future__ import annotations

import logging
import os

from lingvo_moe.cli.run_config import ExportConfig
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import get as get_experiment
from lingvo_moe.utils import counts, output_files

_logger = logging.getLogger(__name__)


def export(config: ExportConfig):
    """`export`: lowers a program from specs alone and writes its bundle."""
    if config.output is None:
        raise UserError("--output is missing: the file to write the program to.")
    output_files.check_path("--output", config.output, is_text=False)
    name = config.full_name()
    experiment = get_experiment(name, config.assignments, config.device_mesh())
    if config.program == "decode" and not experiment.decodes:
        raise UserError(f"--program=decode: {name} neither translates nor generates; export another program.")
    steps, specs = experiment.steps, experiment.input.specs()
    program = {
        "init": steps.init,
        "train": lambda: steps.train(specs),
        "evaluate": lambda: steps.evaluate(specs),
        "decode": lambda: steps.decode(experiment.decoding_specs(), experiment.search),
    }[config.program]()
    program.save(config.output)
    devices, size = counts.counted(experiment.mesh.size, "device"), counts.file_size(os.path.getsize(config.output))
    _logger.info("%s: %s of %s for %s, %s", config.output, program.name, name, devices, size)
