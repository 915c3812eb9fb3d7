"""The command line: `python -m lingvo_moe COMMAND --flags`; `COMMAND --help` explains each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from absl import flags

from lingvo_moe import experiment, extensions, program_cache, registry
from lingvo_moe.cli import app, run_flags
from lingvo_moe.errors import UserError, did_you_mean


class Command(NamedTuple):
    """A subcommand: one line of help, the groups of flags it takes, and the module of `lingvo_moe.cli.commands` that runs it."""

    summary: str
    flag_groups: tuple[Callable[[flags.FlagValues], None], ...]
    run: Callable[[flags.FlagValues, list[str]], int | None]


def _model_flags(values: flags.FlagValues):
    flags.DEFINE_string("model", None, "a registered name, or an unambiguous part of one", flag_values=values)
    flags.DEFINE_multi_string("set", [], "field=value: overrides a hyperparameter; may be repeated", flag_values=values)
    _import_flags(values)


def _import_flags(values: flags.FlagValues):
    flags.DEFINE_multi_string(
        "import", [], "a module or .py file that registers models of one's own", flag_values=values
    )


def _run_flags(values: flags.FlagValues):
    flags.DEFINE_string("logdir", None, "directory of checkpoints and curves", flag_values=values)
    flags.DEFINE_integer(
        "devices", None, "how many devices, in one mesh axis; virtual ones on the CPU", flag_values=values
    )
    flags.DEFINE_string("mesh", None, "the device mesh, e.g. 8 or 4x2, instead of --devices", flag_values=values)
    flags.DEFINE_enum(
        "platform", None, ["cpu", "gpu", "tpu"], "where to run; default: what is there", flag_values=values
    )
    flags.DEFINE_string("tokenizers", None, "directory of tools.train_tokenizer's output", flag_values=values)
    flags.DEFINE_string(
        "cache", program_cache.default(), "directory of programs compiled before; off for none", flag_values=values
    )


def _corpus_flags(values: flags.FlagValues):
    flags.DEFINE_string("corpus", None, "directory of tools.build_corpus's output", flag_values=values)


def _train_flags(values: flags.FlagValues):
    flags.DEFINE_integer("steps", None, "train to this step, instead of the model's own number", flag_values=values)
    flags.DEFINE_enum(
        "engine",
        "pjrt",
        run_flags.ENGINES,
        "pjrt: the devices that JAX finds; tpu_strategy: a Cloud TPU slice, by TensorFlow's own runtime",
        flag_values=values,
    )
    flags.DEFINE_string(
        "tpu",
        None,
        "tpu_strategy: the slice's name, grpc://HOST:PORT of its first machine, or local on the "
        "machine of a slice with one",
        flag_values=values,
    )
    flags.DEFINE_string(
        "coordinator",
        None,
        "of many processes (docs/processes.md): HOST:PORT where process 0 listens",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "processes", None, "how many processes train this model, with as many devices each", flag_values=values
    )
    flags.DEFINE_integer("process", None, "which of them this is, from 0", flag_values=values)


def _search_flags(values: flags.FlagValues):
    flags.DEFINE_integer(
        "beam_size", None, "hypotheses per sentence, instead of the model's own number", flag_values=values
    )


def _translate_flags(values: flags.FlagValues):
    flags.DEFINE_string("input", "-", "a file of sentences, one a line; - for standard input", flag_values=values)
    flags.DEFINE_string("output", "-", "where to write translations; - for standard output", flag_values=values)
    flags.DEFINE_integer(
        "n_best", 1, "translations per line; with more than one, each line is number, score, text", flag_values=values
    )


def _eval_flags(values: flags.FlagValues):
    flags.DEFINE_list("languages", [], "comma-separated labels; default: all of the corpus", flag_values=values)
    flags.DEFINE_integer("max_pairs", 100, "sentences per language, at most", lower_bound=1, flag_values=values)
    flags.DEFINE_enum("split", "test", ["test", "valid"], "which held-out sentences", flag_values=values)
    flags.DEFINE_boolean(
        "summary", False, "only groups of languages and the average, no row per language", flag_values=values
    )
    flags.DEFINE_string("json", None, "also write the scores to this file", flag_values=values)


def _diagnose_flags(values: flags.FlagValues):
    flags.DEFINE_string(
        "batch",
        None,
        "LOGDIR/replay/STEP.npz, of a step that training stopped at; default: the batch that it would read next",
        flag_values=values,
    )
    flags.DEFINE_string("json", None, "also write every number to this file", flag_values=values)


def _export_flags(values: flags.FlagValues):
    flags.DEFINE_enum("program", "train", ["init", "train", "evaluate", "decode"], "which program", flag_values=values)
    flags.DEFINE_string("output", None, "the bundle to write", flag_values=values)
    flags.DEFINE_integer("devices", None, "how many devices, in one mesh axis", flag_values=values)
    flags.DEFINE_string("mesh", None, "the device mesh, e.g. 8 or 4x2, instead of --devices", flag_values=values)


def _plan_flags(values: flags.FlagValues):
    flags.DEFINE_string(
        "topology",
        None,
        "a TPU slice: generation and chips, e.g. v3:32x32x1; default: TPU v3 with as many "
        "cores as the model is made for",
        flag_values=values,
    )
    flags.DEFINE_string(
        "mesh",
        None,
        "the device mesh, e.g. 128 or 16x8; default: all cores of the slice in one axis",
        flag_values=values,
    )
    flags.DEFINE_enum("program", "train", ["train", "decode"], "which program", flag_values=values)
    flags.DEFINE_float(
        "tokens", 1e12, "tokens of all sides to train on, for the cost", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string("json", None, "also write the plan to this file", flag_values=values)
    flags.DEFINE_list(
        "search",
        [],
        "vary these and find the fastest that fits: any of remat,mesh,groups,batch; a minute or so for each trial",
        flag_values=values,
    )


def _checkpoint_flags(values: flags.FlagValues):
    flags.DEFINE_string(
        "logdir", None, "directory of checkpoints; with convert --input, the one to make", flag_values=values
    )
    flags.DEFINE_integer(
        "step",
        None,
        "inspect, verify, convert: this checkpoint; default: the newest, verify: all",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_string(
        "grep", None, "inspect: only arrays whose path matches this regular expression", flag_values=values
    )
    flags.DEFINE_boolean(
        "stats",
        False,
        "inspect: also read the arrays: mean, rms, min, max, values that are not finite",
        flag_values=values,
    )
    flags.DEFINE_integer("last", None, "average: so many of the newest checkpoints", lower_bound=2, flag_values=values)
    flags.DEFINE_list("steps", [], "average: these checkpoints, with commas between them", flag_values=values)
    flags.DEFINE_string("input", None, "convert: the safetensors file to make a log directory of", flag_values=values)
    flags.DEFINE_string(
        "output", None, "average: the log directory to make; convert: the safetensors file to write", flag_values=values
    )


def _list(values: flags.FlagValues, arguments: list[str]):
    app.no_arguments(arguments)
    _import_all(values)
    rows = [("name", "experts", "layers", "weights", "devices")]
    for name in registry.names():
        e = experiment.get(name)
        rows.append(
            (
                name,
                str(e.model.num_experts or "-"),
                str(e.model.num_layers),
                _short(e.model.num_weights()),
                str(e.mesh.size),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]))


def _show(values: flags.FlagValues, arguments: list[str]):
    _import_all(values)
    name = _one_name("show", values, arguments)
    print(experiment.text(name, experiment.get(name, values.set)), end="")


def _plan(values: flags.FlagValues, arguments: list[str]):
    _import_all(values)
    values.model = _one_name("plan", values, arguments)
    from lingvo_moe.cli import commands

    return commands.plan(values)


def _checkpoint(values: flags.FlagValues, arguments: list[str]) -> int | None:
    _import_all(values)
    from lingvo_moe.cli import checkpoint

    return checkpoint.run(values, arguments)


def _one_name(command: str, values: flags.FlagValues, arguments: list[str]) -> str:
    """The full name of the one model that is named after the command, or by --model."""
    given = [*arguments, *([values.model] if values.model else [])]
    if len(given) != 1:
        raise UserError(f"{command} takes one model's name, got {len(given)}; `python -m lingvo_moe list` shows them.")
    return registry.full_name(given[0])


def _deferred(function: str, module: str = "commands") -> Callable[[flags.FlagValues, list[str]], int | None]:
    """A command whose imports are heavy: they happen once its flags have been read."""

    def run(values: flags.FlagValues, arguments: list[str]):
        app.no_arguments(arguments)
        _import_all(values)
        if values.model is None:
            raise UserError("--model is missing; `python -m lingvo_moe list` shows the registered models.")
        registry.full_name(values.model)
        return getattr(importlib.import_module(f"lingvo_moe.cli.{module}"), function)(values)

    return run


COMMANDS = {
    "list": Command("all registered models, their experts, layers, weights and devices", (_import_flags,), _list),
    "show": Command("every hyperparameter of a model: show NAME", (_model_flags,), _show),
    "train": Command(
        "train a model, or go on training it",
        (_model_flags, _run_flags, _corpus_flags, _train_flags),
        _deferred("train", "train"),
    ),
    "eval": Command(
        "BLEU and chrF per language on held-out sentences",
        (_model_flags, _run_flags, _corpus_flags, _search_flags, _eval_flags),
        _deferred("evaluate"),
    ),
    "translate": Command(
        "translate lines into lines",
        (_model_flags, _run_flags, _search_flags, _translate_flags),
        _deferred("translate"),
    ),
    "plan": Command(
        "compile a model for a TPU slice that is not here: memory, exchanges, step time, cost: plan NAME",
        (_model_flags, _plan_flags),
        _plan,
    ),
    "diagnose": Command(
        "look into a training step: activations, gradients, routers, and where numbers are not finite",
        (_model_flags, _run_flags, _corpus_flags, _diagnose_flags),
        _deferred("diagnose", "diagnose"),
    ),
    "checkpoint": Command(
        "look at checkpoints and use them: checkpoint inspect, verify, average or convert",
        (_model_flags, _checkpoint_flags),
        _checkpoint,
    ),
    "export": Command(
        "write a program as a bundle that runs without TensorFlow", (_model_flags, _export_flags), _deferred("export")
    ),
}


def run() -> NoReturn:
    """The entry point of the process: runs the command that its arguments name, and exits."""
    app.run_process(lambda: main(sys.argv))


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit status."""
    name = argv[1] if len(argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        print(_usage())
        return 0 if len(argv) > 1 else 2
    if name not in COMMANDS:
        print(
            f"error: {name}: no such command.{did_you_mean(name, COMMANDS)} Commands: {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 2
    command, values = COMMANDS[name], flags.FlagValues()
    for define in command.flag_groups:
        define(values)

    def run(arguments: list[str]) -> int | None:
        return command.run(values, arguments[1:])

    run.__doc__ = f"python -m lingvo_moe {name}: {command.summary}."
    return app.execute(run, [f"lingvo_moe {name}", *argv[2:]], values)


def _usage() -> str:
    lines = ["usage: python -m lingvo_moe COMMAND [--flag=value ...]", ""]
    lines += [f"  {name:10} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "python -m lingvo_moe COMMAND --help explains the command's flags."])


def _import_all(values: flags.FlagValues):
    for where in values["import"].value:
        extensions.import_module(where)


def _short(count: int) -> str:
    """12,345,678 as 12.3M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
