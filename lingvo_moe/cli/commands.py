"""The commands eval, plan and export, from flags to results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os

from lingvo_moe.analysis import plan as planning
from lingvo_moe.analysis import plan_text, remedies, search
from lingvo_moe.cli import images, layouts, run_setup, speech
from lingvo_moe.cli.run_config import EvalConfig, ExportConfig, PlanConfig
from lingvo_moe.cli.scores import write_scores
from lingvo_moe.cli.translate import require_translation
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.engines import cluster, topology
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import get as get_experiment
from lingvo_moe.experiment import unchecked
from lingvo_moe.inference import held_out_loss, translation_file
from lingvo_moe.inference.evaluation import LanguageScore, choose_languages, groups, mean, score, translate_held_out
from lingvo_moe.inference.translator import Translator
from lingvo_moe.models.segmentation import UNet
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import counts, output_files

_log = logging.getLogger(__name__)


def evaluate(config: EvalConfig):
    """`eval`: prints one row per language, voice or class, then groups; for a language model, its perplexity."""
    output_files.check_path("--json", config.json)
    experiment = get_experiment(config.full_name())
    if config.translations is not None and not experiment.translates:
        raise UserError(f"--translations works only with translation models, and {config.full_name()} is not one.")
    # A model of volumes, which makes them, has no corpus.
    if corpus := config.corpus or unchecked(config.full_name(), config.assignments).corpus:
        output_files.check_outside({"--translations": config.translations, "--json": config.json}, "--corpus", corpus)
    output_files.check_own_paths({"--translations": config.translations}, {"--json": config.json})
    if experiment.translates:
        _evaluate_translations(config)
    elif experiment.recognises:
        speech.evaluate(config)
    elif experiment.segments:
        images.evaluate(config)
    else:
        _evaluate_language_model(config)


def _evaluate_translations(config: EvalConfig):
    name, experiment, engine = run_setup.set_up(config, "decode", {"search.beam_size": config.beam_size})
    corpus = Corpus.open(experiment.corpus)
    choose_languages(corpus, config.languages, config.split)  # reports a mistake before anything is compiled
    translator = Translator(name, experiment, engine, config.log_directory())
    # Before the translations, which take minutes: training beside this may remove the checkpoint.
    loss = held_out_loss.compute(
        *(name, experiment, engine, config.log_directory()),
        *(config.split, config.languages, config.max_pairs, translator.step),
    )
    translated, left_out = translate_held_out(translator, corpus, config.languages, config.max_pairs, config.split)
    if config.translations:
        translation_file.write(config.translations, translated)
    scores = score(corpus, translated)
    print(table(scores, summary=config.summary), file=output_files.table_stream(config.json))
    print(_loss_line(loss, config.split), file=output_files.table_stream(config.json))
    if left_out:
        _log.info(counts.left_out(left_out, "sentence", f"of {experiment.texts.source_length} tokens or more"))
    write_scores(config, name, translator.step, scores, loss=dataclasses.asdict(loss))


def _loss_line(loss: held_out_loss.HeldOutLoss, split: str) -> str:
    """Returns the cross-entropy, and the source gain."""
    text = f"cross-entropy {loss.cross_entropy:.3f} nats per target token of the {split} split (step {loss.step})"
    if loss.source_gain is None:
        return text
    return (
        f"{text}; {loss.shuffled_cross_entropy:.3f} with the sources of other sentences: source gain "
        f"{loss.source_gain:.3f}"
    )


def _evaluate_language_model(config: EvalConfig):
    for flag in ("languages", "max_pairs", "summary", "beam_size"):
        if flag in config.given:
            raise UserError(
                f"--{flag} is for translation models; of {config.full_name()}, a language model, `eval` computes the "
                f"perplexity over all texts. Leave --{flag} out."
            )
    name, experiment, engine = run_setup.set_up(config, "evaluate", {})
    result = held_out_loss.compute(name, experiment, engine, config.log_directory(), config.split)
    print(
        f"{result.cross_entropy:.4f} nats per token, perplexity {result.perplexity:.2f}, over {result.tokens:,} tokens "
        f"of the {config.split} split, after {counts.counted(result.step, 'step')}",
        file=output_files.table_stream(config.json),
    )
    if result.left_out:
        _log.info(counts.left_out(result.left_out, "text", f"of {experiment.texts.target_length} tokens or more"))
    if config.json:
        with output_files.atomic_writer(config.json) as file:
            fields = {**dataclasses.asdict(result), "perplexity": result.perplexity}
            json.dump(output_files.as_json({"model": name, "split": config.split, **fields}), file, indent=1)


def plan(config: PlanConfig):
    """`plan`: compiles for a TPU slice or GPU cluster without one; prints a step's memory, communication and time."""
    _check_flags(config)
    name = config.full_name()
    own = unchecked(name, config.assignments)
    if not isinstance(own.model, Transformer | UNet):
        raise UserError(
            f"plan counts the work of a Transformer or UNet; {name} is a {type(own.model).__name__}, which `train` and "
            f"`eval` can use."
        )
    if config.program == "decode" and not own.translates:
        raise UserError(f"--program=decode: {name} does not translate; plan its training.")
    given = config.device_mesh()
    mesh = given or own.mesh
    target = cluster.target_of(config.topology or topology.v3_slice(mesh.size), config.compiler_options)
    mesh = given or _mesh_of(target, mesh)
    target.check(mesh)
    with contextlib.redirect_stdout(output_files.table_stream(config.json)):
        if search.LAYOUT in config.search:
            chosen = layouts.find(config, dataclasses.replace(own, mesh=mesh), target)
            if chosen is None:
                return
        else:
            chosen = _compile(config, target, mesh)
    if config.json:
        chosen.save(config.json)
    text = plan_text.text(chosen, config.tokens, config.price_per_hour, _sufficient(config, chosen, target))
    print(text, end="", file=output_files.table_stream(config.json))


def _check_flags(config: PlanConfig):
    """Raises UserError for flags of `plan` that are out of range, or mean nothing beside the others."""
    output_files.check_path("--json", config.json)
    search.check_dimensions(config.search)
    if config.program != "train" and config.search:
        raise UserError(f"--search compares training steps; leave out --program={config.program}.")
    for flag in ("tokens", "price_per_hour", "budget"):
        if not math.isfinite(getattr(config, flag) or 0):
            raise UserError(f"--{flag}={getattr(config, flag)}: expected a finite number.")
    for flag in ("budget", "top"):
        if flag in config.given and search.LAYOUT not in config.search:
            raise UserError(f"--{flag} is for --search=layout; add that, or leave --{flag} out.")


def _sufficient(
    config: PlanConfig, chosen: planning.Plan, target: topology.Slice | cluster.Cluster
) -> remedies.Sufficient | None:
    """Predicts how many devices a training step fits that does not fit the target; None for anything else."""
    if chosen.fits or chosen.program != "train":
        return None
    experiment = layouts.planned(chosen.model, chosen.changes, DeviceMesh.parse(chosen.mesh))
    return remedies.sufficient(experiment, target)


def _compile(config: PlanConfig, target: topology.Slice | cluster.Cluster, mesh: DeviceMesh) -> planning.Plan:
    """Plans the model as it is, or the fastest of a search for settings."""
    name = config.full_name()
    experiment = layouts.planned(name, config.assignments, mesh)
    devices = counts.counted(len(target.devices), "device")
    _log.info(f"compiling {name}, {experiment.model.num_weights():,} weights, for {devices} of {target.name} ...")
    if config.search:
        return _search(config, target, mesh)
    return planning.make(name, experiment, target, config.program, list(config.assignments))


def _search(config: PlanConfig, target: topology.Slice | cluster.Cluster, mesh: DeviceMesh) -> planning.Plan:
    """Prints each trial when it is done; returns the plan of the fastest that fits, or of the unchanged settings."""
    trials, name = [], config.full_name()
    print(plan_text.LEGEND)
    for trial in search.search(
        name,
        target,
        list(config.search),
        config.assignments,
        lambda assignments: layouts.planned(name, [f"mesh={mesh}", *assignments]),
    ):
        trials.append(trial)
        print(plan_text.trial(trial), flush=True)
    best = max(trials, key=lambda trial: trial.tokens_per_second)
    fitting = sum(trial.plan is not None and trial.plan.fits for trial in trials)
    if not fitting:
        print("none of the settings fits; the plan of the unchanged settings:\n")
    else:
        print(
            f"\nfastest of the {fitting} that fit: "
            f"{' '.join(f'--set {c}' for c in best.changes) or 'the unchanged settings'}\n"
        )
    return best.plan


def export(config: ExportConfig):
    """`export`: lowers a program from specs alone and writes its bundle."""
    if config.output is None:
        raise UserError("--output is missing: the file to write the program to.")
    output_files.check_path("--output", config.output, is_text=False)
    if config.program == "decode":
        require_translation(config)
    name = config.full_name()
    experiment = get_experiment(name, config.assignments, config.device_mesh())
    steps, specs = experiment.steps, experiment.input.specs()
    program = {
        "init": steps.init,
        "train": lambda: steps.train(specs),
        "evaluate": lambda: steps.evaluate(specs),
        "decode": lambda: steps.decode(experiment.decoding_specs(), experiment.search),
    }[config.program]()
    program.save(config.output)
    devices, size = counts.counted(experiment.mesh.size, "device"), counts.file_size(os.path.getsize(config.output))
    _log.info(f"{config.output}: {program.name} of {name} for {devices}, {size}")


def table(scores: list[LanguageScore], summary: bool = False) -> str:
    """Returns BLEU and chrF per language (unless a `summary`), by group and on average, beside those of the sources."""
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


def _mesh_of(target: topology.Slice | cluster.Cluster, mesh: DeviceMesh) -> DeviceMesh:
    """Returns the model's own mesh if it has as many devices as the target, otherwise all devices in one axis."""
    return mesh if mesh.size == len(target.devices) else DeviceMesh((len(target.devices),))
