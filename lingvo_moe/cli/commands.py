"""The commands eval, translate, plan and export, from flags to results."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys

from absl import flags

from lingvo_moe import experiment, registry
from lingvo_moe.analysis import plan as planning
from lingvo_moe.analysis import plan_text, search
from lingvo_moe.cli import run_flags
from lingvo_moe.data.batching import input_specs
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.engines import topology
from lingvo_moe.errors import UserError
from lingvo_moe.inference import perplexity
from lingvo_moe.inference.evaluation import LanguageScore, groups, mean
from lingvo_moe.inference.evaluation import evaluate as evaluate_languages
from lingvo_moe.inference.translator import Translator
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import output_files


def evaluate(values: flags.FlagValues):
    """`eval`: one row per language, then groups and the average; of a language model, its perplexity."""
    output_files.check_path("--json", values.json)
    if not experiment.get(values.model).translates:
        return _evaluate_language_model(values)
    name, config, engine = run_flags.set_up(values, {"search.beam_size": values.beam_size})
    corpus = Corpus.open(config.corpus)
    translator = Translator(name, config, engine, run_flags.logdir(values))
    scores, left_out = evaluate_languages(translator, corpus, values.languages, values.max_pairs, values.split)
    print(table(scores, summary=values.summary))
    if left_out:
        run_flags.say(f"{left_out} sentences of {config.input.source_length} tokens or more were left out.")
    if values.json:
        rows = {"model": name, "step": translator.step, "scores": [dataclasses.asdict(score) for score in scores]}
        with output_files.atomic_writer(values.json) as file:
            json.dump(rows, file, indent=1, ensure_ascii=False)


def _evaluate_language_model(values: flags.FlagValues):
    for flag in ("languages", "max_pairs", "summary", "beam_size"):
        if values[flag].present:
            raise UserError(
                f"--{flag} is for translation; {registry.full_name(values.model)} is a language model, of which "
                f"eval measures the perplexity over the whole split. Leave it out."
            )
    name, config, engine = run_flags.set_up(values, {})
    found = perplexity.measure(name, config, engine, run_flags.logdir(values), values.split)
    print(
        f"{found.cross_entropy:.4f} nats per token, perplexity {found.perplexity:.2f}, over {found.tokens:,} tokens of the "
        f"{values.split} split, after {found.step} steps"
    )
    if found.left_out:
        run_flags.say(f"{found.left_out} texts of {config.input.target_length} tokens or more were left out.")
    if values.json:
        with output_files.atomic_writer(values.json) as file:
            measured = {**dataclasses.asdict(found), "perplexity": found.perplexity}
            json.dump({"model": name, "split": values.split, **measured}, file, indent=1)


def _require_translation(values: flags.FlagValues):
    """Raises UserError for a language model, before anything is loaded."""
    if not experiment.get(values.model).translates:
        raise UserError(
            f"{registry.full_name(values.model)} is a language model; it has nothing to translate. `eval` measures "
            f"its perplexity."
        )


def translate(values: flags.FlagValues):
    """`translate`: as many lines out as in, in the same order; an empty line stays one."""
    _require_translation(values)
    output_files.check_path("--output", values.output)
    name, config, engine = run_flags.set_up(values, {"search.beam_size": values.beam_size})
    if not 1 <= values.n_best <= config.search.beam_size:
        raise UserError(
            f"--n_best={values.n_best}: the beam has {config.search.beam_size} hypotheses; raise --beam_size."
        )
    sentences = _read_lines(values.input)
    if not sentences:
        raise UserError(f"--input={values.input}: nothing to translate; expected one sentence a line.")
    results = Translator(name, config, engine, run_flags.logdir(values)).translate(sentences)
    with output_files.atomic_writer(values.output) as file:
        for number, hypotheses in enumerate(results, start=1):
            for hypothesis in hypotheses[: values.n_best]:
                prefix = f"{number}\t{hypothesis.score:.4f}\t" if values.n_best > 1 else ""
                print(prefix + hypothesis.text, file=file)


def plan(values: flags.FlagValues):
    """`plan`: compiles for a slice that nobody has here, and says what that tells."""
    output_files.check_path("--json", values.json)
    search.check_dimensions(values.search)
    if values.program != "train" and values.search:
        raise UserError(f"--search compares training steps; leave out --program={values.program}.")
    config = experiment.get(values.model, values.set)
    if values.program == "decode" and not config.translates:
        raise UserError(f"--program=decode: {values.model} is a language model; plan its training.")
    tpu = topology.Slice.of(values.topology or topology.v3_slice(config.mesh.size))
    mesh = DeviceMesh.parse(values.mesh) if values.mesh else _mesh_of(tpu, config.mesh)
    tpu.check(mesh)
    config = experiment.get(values.model, values.set, mesh)
    run_flags.say(
        f"compiling {values.model}, {config.model.num_weights():,} weights, for {len(tpu.devices)} cores of "
        f"{tpu.name} ..."
    )
    if values.search:
        found = _search(values, tpu, mesh)
    else:
        found = planning.make(values.model, config, tpu, values.program, values.set)
    if values.json:
        found.save(values.json)
    print(plan_text.text(found, values.tokens), end="")


def _search(values: flags.FlagValues, tpu: topology.Slice, mesh: DeviceMesh) -> planning.Plan:
    """Prints every trial as it comes; returns the plan of the fastest that fits, or of the settings as they are."""
    trials = []
    for trial in search.search(
        values.model,
        tpu,
        values.search,
        [f"mesh={mesh}", *values.set],
        lambda assignments: experiment.get(values.model, assignments),
    ):
        trials.append(trial)
        print(plan_text.trial(trial), flush=True)
    best = max(trials, key=lambda trial: trial.tokens_per_second)
    if not best.plan.fits:
        print("nothing that was tried fits; the settings as they are:\n")
    else:
        print(
            f"\nfastest of {len(trials)} that fits: {' '.join(f'--set {c}' for c in best.changes) or 'the settings as they are'}\n"
        )
    return best.plan


def export(values: flags.FlagValues):
    """`export`: lowers a program from specs alone and writes its bundle."""
    if values.output is None:
        raise UserError("--output is missing: the file to write the program to.")
    output_files.check_path("--output", values.output)
    if values.program == "decode":
        _require_translation(values)
    config = experiment.get(values.model, values.set, run_flags.mesh(values))
    steps, specs = config.steps, input_specs(config.input)
    decoding = input_specs(dataclasses.replace(config.input, batch_size=config.decoding_batch))
    program = {
        "init": steps.init,
        "train": lambda: steps.train(specs),
        "evaluate": lambda: steps.evaluate(specs),
        "decode": lambda: steps.decode(decoding["source"], config.search),
    }[values.program]()
    program.save(values.output)
    run_flags.say(
        f"{values.output}: {program.name} of {registry.full_name(values.model)} for {config.mesh.size} device(s), "
        f"{os.path.getsize(values.output) / 2**20:.1f} MiB"
    )


def table(scores: list[LanguageScore], summary: bool = False) -> str:
    """BLEU and chrF per language (not in a `summary`), ours beside copying the source, then means by group and over all."""
    row = "{:24} {:>9} {:>6} {:>7} {:>7} {:>10} {:>10}".format
    lines = [row("language", "train", "test", "BLEU", "chrF", "copy BLEU", "copy chrF")]

    def line(label: str, members: list[LanguageScore]) -> str:
        columns = [
            mean([getattr(member, name) for member in members]) for name in ("bleu", "chrf", "copy_bleu", "copy_chrf")
        ]
        return row(
            label,
            sum(m.train_pairs for m in members),
            sum(m.test_pairs for m in members),
            *(f"{value:.1f}" for value in columns),
        )

    if not summary:
        lines += [line(score.language, [score]) for score in scores]
    lines.append("-" * len(lines[0]))
    if len(scores) >= 6:
        lines += [line(f"{name} ({len(members)})", members) for name, members in groups(scores)]
    return "\n".join([*lines, line(f"average of {len(scores)}", scores)])


def _read_lines(path: str) -> list[str]:
    """The lines of a UTF-8 file or of standard input, without their ends; raises UserError naming a line that is none."""
    data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
    lines = data.split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    sentences = []
    for number, line in enumerate(lines, start=1):
        try:
            sentences.append(line.decode("utf-8").removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"--input={path}, line {number}: not UTF-8 (byte {error.start + 1} of the line); convert it, for "
                f"instance with iconv."
            ) from None
        if "\0" in sentences[-1]:
            raise UserError(
                f"--input={path}, line {number}: holds a NUL byte; expected a text file, one sentence a line."
            )
    return sentences


def _mesh_of(tpu: topology.Slice, mesh: DeviceMesh) -> DeviceMesh:
    """The model's own mesh where it has the slice's size, otherwise all cores in one axis."""
    return mesh if mesh.size == len(tpu.devices) else DeviceMesh((len(tpu.devices),))
