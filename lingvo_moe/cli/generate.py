"""The command generate, from prompts to continued texts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

from lingvo_moe import experiment as experiments
from lingvo_moe import ranges
from lingvo_moe.cli import run_setup, text_lines
from lingvo_moe.cli.run_config import GenerateConfig
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.decoding.sampling import RANGES, Sampling
from lingvo_moe.errors import UserError
from lingvo_moe.inference.generator import Continuation, Generator
from lingvo_moe.utils import counts, output_files

_logger = logging.getLogger(__name__)
_OF_SAMPLING = ("top_k", "top_p", "seed")


def generate(config: GenerateConfig):
    """`generate`: writes each prompt with its continuation, in the order of the prompts."""
    logdir = config.log_directory()  # a missing flag is named before prompts are typed
    _check_flags(config)
    _require_language_model(config)
    changes = {"search.beam_size": config.beam_size, "search.max_length": config.max_length}
    name, experiment, engine = run_setup.set_up(config, "decode", changes, reads_batches=False)
    sampling = _sampling(config, experiment.search)
    if not sampling and config.continuations > experiment.search.beam_size:
        raise UserError(
            f"--continuations={config.continuations}: expected at most {experiment.search.beam_size}, the hypotheses "
            f"of the beam. Raise --beam_size, or draw samples with --temperature."
        )
    experiment.decoding_specs()  # reports a mistake before the prompts are read
    prompts = text_lines.read_lines(config.input, "prompt")
    if not prompts:
        _logger.warning("--input=%s is empty, and so is what is written.", config.input)
        with output_files.atomic_writer(config.output):
            return
    generator = Generator(name, experiment, engine, logdir, sampling)
    cut = _write(config, generator, prompts)
    if cut:
        _logger.warning(
            "%s: the prompt has more than %d tokens; only its end was read. A smaller --max_length leaves more tokens "
            "to prompts.",
            counts.lines(cut),
            generator.prompt_tokens,
        )


def _check_flags(config: GenerateConfig):
    """Raises UserError for flags that do not go together, and paths that cannot be used."""
    text_lines.check_file(config.input, "one prompt a line")
    if config.output != "-":
        output_files.check_own_paths({"--output": config.output}, {"--input": config.input})
    if config.temperature is None:
        for flag in _OF_SAMPLING:
            if flag in config.given:
                raise UserError(f"--{flag}={getattr(config, flag)} is for sampling: pass --temperature, too.")
    elif config.temperature == 0:
        raise UserError(
            "--temperature=0: leave it out. Beam search then finds the most probable continuations, and with "
            "--beam_size=1 it is greedy."
        )
    elif config.beam_size is not None:
        raise UserError(
            f"--beam_size={config.beam_size} is for beam search, and --temperature={config.temperature:g} for "
            f"sampling; pass one of them. --continuations is the number of samples."
        )
    else:
        ranges.check("--", config, {flag: RANGES[flag] for flag in ("temperature", "top_k", "top_p")})


def _require_language_model(config: GenerateConfig):
    """Raises UserError for a model of another kind, before anything is loaded."""
    name = config.full_name()
    experiment = experiments.get(name)
    if experiment.translates:
        raise UserError(f"{name} is a translation model; it does not generate text. `translate` translates.")
    if not experiment.generates:
        raise UserError(f"{name} is no language model; it does not generate text. `eval` scores it.")


def _sampling(config: GenerateConfig, search: BeamSearch) -> Sampling | None:
    """Returns how to draw tokens; None for a beam search. Raises UserError for too many continuations."""
    if config.temperature is None:
        return None
    return Sampling(
        samples=config.continuations,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        search=search,
    )


def _write(config: GenerateConfig, generator: Generator, prompts: Sequence[str]) -> list[int]:
    """Writes the continued prompts, on standard output as they are made; returns the numbers of lines that were cut."""
    number, cut = 0, []
    with output_files.atomic_writer(config.output) as opened:
        # A progress bar replaces sys.stdout while it is drawn on the terminal that shows both.
        file = None if config.output == "-" else opened
        with output_files.named_errors("standard output" if file is None else config.output):
            for batch in generator.stream(prompts, config.seed):
                for continuations in batch:
                    number += 1
                    cut += [number] * continuations[0].is_cut
                    _print(config, number, continuations[: config.continuations], file)
                (file or sys.stdout).flush()
    return cut


def _print(config: GenerateConfig, number: int, continuations: Sequence[Continuation], file: TextIO | None):
    """Prints the continuations of a prompt, each in a line of its own."""
    for continuation in continuations:
        columns = [str(number)] if config.continuations > 1 else []
        columns += [f"{continuation.score:.4f}"] if config.continuations > 1 or config.scores else []
        print(*columns, continuation.text, sep="\t", file=file)
