"""The command line: `python -m lingvo_moe COMMAND --flags`; `COMMAND --help` explains each."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from absl import flags

from lingvo_moe import experiment, explanations, overrides, registry
from lingvo_moe.cli import app, command_flags, recorded, released
from lingvo_moe.cli.command_flags import CommandConfig
from lingvo_moe.cli.run_config import (
    CheckpointConfig,
    DiagnoseConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    ModelConfig,
    PlanConfig,
    ShowConfig,
    TrainConfig,
    TranscribeConfig,
    TranslateConfig,
)
from lingvo_moe.distributed import watchdog
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.utils import allocator, columns


class Command(NamedTuple):
    """A subcommand.

    Attributes:
      summary: one line of help.
      config: its flags.
      run: called with the configuration and the arguments that are not flags.
      arguments: what follows its name in the usage line.
      examples: lines of its help, without `python -m lingvo_moe`, which stands in the place of {}.
      uses_jemalloc: whether it restarts with jemalloc, as it runs programs many times or compiles large ones.
    """

    summary: str
    config: type[CommandConfig]
    run: Callable[[Any, list[str]], int | None]
    arguments: str
    examples: tuple[str, ...]
    uses_jemalloc: bool = False

    def description(self, name: str) -> str:
        """Returns what --help shows above the flags: usage, summary and examples."""
        program = "python -m lingvo_moe"
        examples = [f"  {example.format(program)}" for example in self.examples]
        usage = " ".join(filter(None, ["usage:", program, name, self.arguments, "[--flag=value ...]"]))
        return "\n".join([usage, "", f"{self.summary[0].upper()}{self.summary[1:]}.", "", "Examples:", *examples])


def _list(config: CommandConfig, arguments: list[str]):
    app.no_arguments(arguments)
    rows, errors = [("name", "experts", "layers", "weights", "devices")], []
    for name in registry.names():
        try:
            rows.append(_row(name))
        except UserError as error:  # of a user's model, which hides no other
            errors.append(str(error) if name in str(error) else f"model {name!r}: {error}")
    print("\n".join(columns.aligned(rows)))
    if errors:
        raise UserError("\nerror: ".join(errors))


def _row(name: str) -> tuple[str, str, str, str, str]:
    """Returns the cells of a model."""
    model, mesh = (shown := experiment.get(name)).model, shown.mesh
    experts = str(model.num_experts or "-")
    return name, experts, str(model.num_layers), _short(model.num_weights()), str(mesh.size)


def _show(config: ShowConfig, arguments: list[str]):
    name = _one_name("show", config, arguments)
    shown = experiment.get(name, config.assignments)
    print(experiment.text(name, shown, explanations.descriptions(shown) if config.explain else {}), end="")


def _plan(config: PlanConfig, arguments: list[str]):
    name = _one_name("plan", config, arguments)
    from lingvo_moe.cli import plan

    return plan.plan(dataclasses.replace(config, model=name))


def _checkpoint(config: CheckpointConfig, arguments: list[str]) -> int | None:
    from lingvo_moe.cli import checkpoint

    return checkpoint.run(config, arguments)


def _one_name(command: str, config: ModelConfig, arguments: list[str]) -> str:
    """Returns the full name of the one model that follows the command, or that --model names."""
    given = [*arguments, *([config.model] if config.model else [])]
    if len(given) != 1:
        raise UserError(f"{command} takes one model's name, got {len(given)}; `python -m lingvo_moe list` shows them.")
    return registry.full_name(given[0])


def _deferred(name: str) -> Callable[[ModelConfig, list[str]], int | None]:
    """Returns the function of this name in the module of this name, whose slow imports wait until flags are read."""

    def run(config: ModelConfig, arguments: list[str]):
        app.no_arguments(arguments)
        config.full_name()  # a wrong name is reported before the slow imports
        return getattr(importlib.import_module(f"lingvo_moe.cli.{name}"), name)(config)

    return run


def _translate(config: TranslateConfig, arguments: list[str]):
    app.no_arguments(arguments)
    if not released.applies(config):
        config.full_name()  # as in `_deferred`
    from lingvo_moe.cli import translate

    translate.translate(config)


def _transcribe(config: TranscribeConfig, arguments: list[str]):
    config.full_name()  # as in `_deferred`
    from lingvo_moe.cli import transcribe

    transcribe.transcribe(config, arguments)


def _evaluate(config: EvalConfig, arguments: list[str]) -> int | None:
    app.no_arguments(arguments)
    if released.applies(config) and not (config.corpus or overrides.assigned(config.assignments, "corpus")):
        raise UserError(
            "--corpus is missing. Name a corpus of tools.build_corpus, to score the released model on its held-out "
            "sentences, or pass --logdir to score another model."
        )
    with released.by_default(config) as chosen:
        return _deferred("evaluate")(chosen, [])


COMMANDS = {
    "list": Command(
        "all registered models, their experts, layers, weights and devices",
        CommandConfig,
        _list,
        "",
        ("{} list", "{} list --import=my_models.py"),
    ),
    "show": Command(
        "every hyperparameter of a model",
        ShowConfig,
        _show,
        "NAME",
        ("{} show m4.Small --explain", '{} show "MoE(2048E, 36L)" --set=model.num_layers=12'),
    ),
    "train": Command(
        "train a model, or resume its training",
        TrainConfig,
        _deferred("train"),
        "--model=NAME --logdir=DIR",
        (
            "{} train --model=m4.Small --logdir=log --corpus=build/debian/corpus --tokenizers=build/debian/tokenizers",
            "{} train --logdir=log --steps=20000 --devices=8",
        ),
        uses_jemalloc=True,
    ),
    "eval": Command(
        "score on held-out data: BLEU and chrF, perplexity, error rates or Dice",
        EvalConfig,
        _evaluate,
        "[--logdir=DIR]",
        ("{} eval --logdir=log --languages=de,fr --translations=translations.tsv", "{} eval --corpus=build/corpus"),
        uses_jemalloc=True,
    ),
    "translate": Command(
        "translate each line of a text, or the texts of a .po catalog; without --logdir from 44 languages "
        "(docs/pocket.md) into English",
        TranslateConfig,
        _translate,
        "[--logdir=DIR]",
        (
            'echo "Fichier introuvable" | {} translate',
            "{} translate --input=app.po --output=en.po",
            "{} translate --logdir=log --input=lines.txt --output=english.txt --doubtful=check.tsv",
        ),
        uses_jemalloc=True,
    ),
    "generate": Command(
        "continue each line of a text with a language model, by beam search or sampling",
        GenerateConfig,
        _deferred("generate"),
        "--logdir=DIR",
        (
            'echo "The file" | {} generate --logdir=log',
            'echo "The file" | {} generate --logdir=log --temperature=0.8 --top_p=0.95 --continuations=5 --seed=1',
        ),
        uses_jemalloc=True,
    ),
    "transcribe": Command(
        "transcribe WAV files with a speech model",
        TranscribeConfig,
        _transcribe,
        "--logdir=DIR FILE...",
        ("{} transcribe --logdir=log first.wav second.wav",),
    ),
    "plan": Command(
        "compile a model for a TPU slice or GPU cluster without one: memory, communication, time, cost",
        PlanConfig,
        _plan,
        "NAME",
        ("{} plan 2048E60L", "{} plan m4.MoE128E12L --topology=h100:4x8 --price_per_hour=2.5"),
        uses_jemalloc=True,
    ),
    "diagnose": Command(
        "inspect a training step: activations, gradients, routers, and the first number that is not finite",
        DiagnoseConfig,
        _deferred("diagnose"),
        "--logdir=DIR",
        ("{} diagnose --logdir=log", "{} diagnose --logdir=log --batch=log/replay/120.npz --json=numbers.json"),
    ),
    "checkpoint": Command(
        "manage checkpoints; ACTION is inspect, verify, average or convert",
        CheckpointConfig,
        _checkpoint,
        "ACTION",
        (
            "{} checkpoint inspect --logdir=log --grep=experts --stats",
            "{} checkpoint verify --logdir=log",
            "{} checkpoint average --logdir=log --last=5 --output=mean",
            "{} checkpoint convert --logdir=log --output=weights.safetensors --dtype=bfloat16",
            "{} checkpoint convert --input=weights.safetensors --logdir=log",
            "{} checkpoint convert --logdir=tuned --output=tuned_hf --like=nllb-200-distilled-600M",
        ),
    ),
    "export": Command(
        "write a program as a bundle that runs without TensorFlow",
        ExportConfig,
        _deferred("export"),
        "--model=NAME --output=FILE",
        (
            "{} export --model=m4.Small --program=decode --output=decode.zip",
            "{} export --logdir=log --program=decode --output=decode.zip",
        ),
    ),
}


_HELP = ("--help", "-h", "help")


def run() -> NoReturn:
    """The entry point of the process: runs the command that its arguments name, and exits."""
    command = COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if command and command.uses_jemalloc:
        allocator.use_jemalloc()
    app.run_process(lambda: main(sys.argv))


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit status."""
    values = flags.FlagValues()
    name = argv[1] if len(argv) > 1 else ""
    if name not in COMMANDS:
        return app.execute(lambda _: _show_usage(name), ["lingvo_moe"], values)
    command = COMMANDS[name]
    command_flags.define_flags(command.config, values)

    def run(arguments: list[str]) -> int | None:
        return command.run(recorded.read(command.config, values), arguments[1:])

    # The parent of a watched child has read the same flags, with the same messages.
    shown_from = logging.CRITICAL if watchdog.is_child() else logging.INFO
    return app.execute(run, [f"lingvo_moe {name}", *argv[2:]], values, command.description(name), shown_from)


def _show_usage(name: str) -> int:
    """Lists the commands; returns status 2 if none was asked for. Raises UserError for a name that is not a command."""
    if name not in ("", *_HELP):
        raise UserError(f"{name}: no such command.{did_you_mean(name, COMMANDS)} Commands: {', '.join(COMMANDS)}.")
    print("usage: python -m lingvo_moe COMMAND [--flag=value ...]\n")
    for command, described in COMMANDS.items():
        print(f"  {f'{command} {described.arguments}':35} {described.summary}")
    print("\npython -m lingvo_moe COMMAND --help explains the command's flags.")
    return 0 if name else 2


def _short(count: int) -> str:
    """Returns a count in three digits and a unit: 12.3M for 12,345,678."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if float(f"{count:.3g}") >= size:  # 999,600,000 is 1B
            return f"{count / size:.3g}{unit}"
    return str(count)
