"""The command line lists commands and models; a mistake is one or two clear lines, and leaves files unchanged."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from absl import flags

from lingvo_moe import registry
from lingvo_moe.cli import app, command_flags, main
from lingvo_moe.distributed import watchdog
from lingvo_moe.testing.processes import run_code


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", *arguments])


@pytest.mark.parametrize("arguments, status", [((), 2), (("--help",), 0), (("-h",), 0), (("help",), 0)])
def test_help_lists_every_command(arguments, status, capsys):
    assert _run(*arguments) == status
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == list(main.COMMANDS)


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_help_of_a_command_has_its_usage_and_examples_that_it_can_parse(name, capsys):
    """The first thing that a user reads must not name a flag that does not exist."""
    assert _run(name, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m lingvo_moe {name} ")
    command = main.COMMANDS[name]
    for example in command.examples:
        assert example.format("python -m lingvo_moe") in shown
        arguments = shlex.split(example.partition("{} ")[2])
        values = flags.FlagValues()
        command_flags.define_flags(command.config, values)
        left = app.parse(arguments, values)
        assert left[0] == name


@pytest.mark.parametrize("command, again", [("train", True), ("translate", True), ("list", False), ("wrong", False)])
def test_commands_that_run_programs_restart_with_jemalloc(monkeypatch, command, again):
    """The others would only start later."""
    restarts = []
    monkeypatch.setattr(sys, "argv", ["lingvo_moe", command])
    monkeypatch.setattr(main.allocator, "use_jemalloc", lambda: restarts.append(command))
    monkeypatch.setattr(main.app, "run_process", lambda command: None)
    main.run()
    assert bool(restarts) is again


def test_list_and_show_name_every_model_and_field(capsys):
    """Everything that can be selected or set is shown."""
    assert _run("list") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("m4.MoE2048E60L", "1.03T", "m4.Quickstart", "m4.Dense96L"))
    assert _run("show", "2048E60L", "--set", "model.num_heads=8") == 0
    shown = capsys.readouterr().out
    assert "model.num_heads = 8\n" in shown and "model.activation_dtype = 'bfloat16'\n" in shown


def test_show_explains_each_hyperparameter(capsys):
    """The description is below the line, and without the flag there is none."""
    line = "model.label_smoothing = 0.1\n"
    assert _run("show", "m4.Small", "--explain") == 0
    assert f"{line}    of the optimised loss; the reported cross-entropy has none.\n" in capsys.readouterr().out
    assert _run("show", "m4.Small") == 0
    assert f"{line}model." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["trian"], "trian: no such command. Did you mean train"),
        (["train"], "--model is missing"),
        (["train", "--modle=x"], "unknown flag --modle. Did you mean model"),
        (["train", "--model=Quikstart"], "no such model. Did you mean m4.Quickstart"),
        (["train", "--model=Quickstart"], "--logdir is missing"),
        (["train", "--model=Quickstart", "--logdir=x", "stray"], "unexpected argument 'stray'"),
        (["train", "--model=Quickstart", "--logdir=x", "--set=num_expert=4"], "no such field. Did you mean"),
        (["train", "--model=Quickstart", "--logdir=x", "--set=model.num_layers=five"], "expected a whole number"),
        (["train", "--model=Quickstart", "--logdir=x", "--set=model.num_layers=6"], "must be a multiple of 4"),
        (["train", "--model=Quickstart", "--logdir=x", "--set=model.num_experts=1"], "needs at least 2 experts"),
        (["train", "--model=Quickstart", "--logdir=x", "--devices=3"], "which 3 devices .* do not divide"),
        (["train", "--model=Quickstart", "--logdir=x", "--devices=0"], "at least one device"),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--devices=2", "--mesh=2x1"],
            "--mesh=2x1 and --devices=2 are mutually exclusive",
        ),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--processes=2"],
            "--processes=2: neither Slurm nor Open MPI has started this process",
        ),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--coordinator=x", "--processes=2", "--process=0"],
            "expected HOST:PORT",
        ),
        (["train", "--model=Quickstart", "--logdir=x", "--mesh=two"], "device mesh 'two' cannot be parsed"),
        (["train", "--model=Quickstart", "--logdir=x", "--tokenizers=nowhere"], "no directory of tokenizers nowhere"),
        (["eval", "--model=Quickstart", "--logdir=x", "--corpus=nowhere"], "nowhere"),
        (["export", "--model=Quickstart"], "--output is missing"),
        (["export", "--model=Quickstart", "--output=-"], "--output=-: only text is written to standard output"),
        (["show", "Quickstart", "Small"], "show takes one model's name, got 2"),
        (["plan"], "plan takes one model's name, got 0"),
        (["plan", "Quikstart"], "no such model. Did you mean m4.Quickstart"),
        (["plan", "Quickstart"], "no TPU v3 slice of 2 cores"),
        (["plan", "Quickstart", "--topology=v3:2x3x1"], "the first two sizes must be even"),
        (["plan", "Quickstart", "--topology=v3:2x2x1", "--mesh=4"], "has 8 cores; the mesh is 4"),
        (["plan", "Quickstart", "--topology=v3:2x2x1", "--set=mesh=4"], "has 8 cores; the mesh is 4"),
        (["plan", "Quickstart", "--set=mesh=8", "--mesh=8"], "--mesh=8 and --set mesh=8 are mutually exclusive"),
        (["plan", "Quickstart", "--topology=h10:1x8"], "no such TPU or GPU. Did you mean h100"),
        (["plan", "Quickstart", "--topology=h100:1x8", "--mesh=4"], "has 8 GPUs; the mesh is 4"),
        (
            ["plan", "Quickstart", "--topology=h100:1x6"],
            r"which 6 devices .* do not divide. Use --mesh, or another --topology, with a divisor of",
        ),
        (["plan", "Quickstart", "--topology=h100:1x8", "--price_per_hour=-1"], "price_per_hour"),
        (
            ["plan", "Quickstart", "--topology=v3:2x2x1", "--set=model.num_experts=12"],
            "which 8 devices .* do not divide",
        ),
        (
            [
                "plan",
                "dense_lm.Small",
                "--topology=v3:2x2x1",
                "--mesh=2x4",
                "--set=layout=pipeline_gshard",
                "--set=model.pipeline=gpipe",
                "--set=model.remat=full",
                "--set=model.stages=3",
            ],
            "model.stages is 3, which 2 devices .layout pipeline_gshard, mesh 2x4. do not divide",
        ),
        (
            ["plan", "Quickstart", "--topology=v3:2x2x1", "--compiler_option=fast"],
            "--compiler_option=fast: expected NAME",
        ),
        (["plan", "Quickstart", "--topology=v3:2x2x1", "--json=nowhere/plan.json"], "there is no directory nowhere"),
        (
            ["plan", "Dense64BMesh8x16", "--topology=v3:8x8x1", "--program=decode", "--set=search.max_length=1024"],
            "search.max_length is 1024, but the model reads a prompt and its continuation in input.target_length=1024",
        ),
        (
            ["plan", "Dense64BMesh8x16", "--topology=v3:8x8x1", "--program=decode", "--set=decoding_batch=60"],
            "decoding_batch is 60, which 8 devices .mesh 8x16. do not divide",
        ),
        (["plan", "Quickstart", "--topology=v3:2x2x1", "--search=speed"], "no such dimension"),
        (["plan", "Quickstart", "--tokens=inf"], "--tokens=inf: expected a finite number"),
        (["plan", "Quickstart", "--top=2"], "--top is for --search=layout; add that, or leave --top out"),
        (["plan", "Quickstart", "--search=remat", "--budget=5"], "--budget is for --search=layout; add that"),
        (["plan", "m4.Small", "--topology=v3:2x2x1", "--search=layout,groups"], "does not vary groups; leave that out"),
        (
            ["plan", "m4.Small", "--topology=v3:2x2x1", "--search=layout", "--top=0", "--json=plan.json"],
            "--top=0 compiles nothing, so there is no plan for --json",
        ),
        (
            ["plan", "m4.Small", "--topology=v3:2x2x1", "--search=layout", "--set=layout=gshard"],
            "--search=layout looks for it; leave out --set layout",
        ),
        (
            [
                "plan",
                "dense_lm.Small",
                "--topology=v3:2x2x1",
                "--search=layout",
                "--mesh=8",
                *(f"--set={name}=33" for name in ("model_dim", "hidden_dim", "head_dim", "target_vocabulary")),
                "--set=num_heads=3",
                "--set=batch_size=9",
                "--set=model.pipeline=none",
            ],
            "--search=layout: no legal layout on the mesh 8",
        ),
        (
            ["plan", "Quickstart", "--topology=v3:2x2x1", "--search=remat", "--program=decode"],
            "leave out --program=decode",
        ),
        (
            ["translate", "--model=dense_lm.Small", "--logdir=x"],
            "dense_lm.Small is a language model; it has nothing to translate. `generate` continues texts",
        ),
        (
            ["export", "--model=conformer.Small", "--program=decode", "--output=x"],
            "--program=decode: conformer.Small recognises speech; its programs are init, train, evaluate, transcribe",
        ),
        (
            ["eval", "--model=dense_lm.Small", "--logdir=x", "--languages=de"],
            "--languages does not apply to dense_lm.Small, a language model",
        ),
        (["eval", "--model=dense_lm.Small", "--logdir=x", "--beam_size=4"], "--beam_size does not apply to"),
        (["eval", "--model=dense_lm.Small", "--logdir=x", "--max_pairs=100"], "--max_pairs does not apply to"),
        (["eval", "--model=dense_lm.Small", "--logdir=x", "--summary"], "--summary does not apply to"),
        (
            ["eval", "--model=dense_lm.Small", "--logdir=x", "--translations=y"],
            "--translations works only with translation models",
        ),
        (
            ["eval", "--model=Quickstart", "--logdir=x", "--transcripts=y"],
            "--transcripts works only with speech models, and m4.Quickstart is not one",
        ),
        (["eval", "--model=Quickstart", "--logdir=x", "--translations=no/file"], "--translations=no/file: there is no"),
        (
            ["eval", "--model=Quickstart", "--logdir=x", "--translations=-"],
            "--translations=-: expected the name of a file",
        ),
        (
            ["eval", "--model=Quickstart", "--logdir=x", "--translations=y", "--json=y"],
            "--translations=y: expected the name of a file of its own, beside --json",
        ),
        (["eval"], "--corpus is missing. Name a corpus .* to score the released"),
        (["eval", "--set=corpus=x", "--tokenizers=y"], "--tokenizers: the released model has its own"),
        (["eval", "--corpus=x", "stray"], "unexpected argument 'stray'"),
        (["eval", "--corpus=x", "--tokenizers=y"], "--tokenizers: the released model has its own"),
        (["translate", "--set=tokenizers=y"], "--tokenizers: the released model has its own"),
        (
            ["train", "--model=dense_lm.Small", "--logdir=x", "--set=source_length=96"],
            "a language model reads targets alone; set it",
        ),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--set=source_length=0"],
            "a translation model reads sources; set it",
        ),
        (["list", "--import=no_such_module_here"], "--import=no_such_module_here"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(arguments, pattern, capsys, tmp_path, monkeypatch):
    """Exit status 2, `error:`, at most two lines, no traceback, and no file made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of conftest.py; the first use of libtpu reports them
    assert _run(*arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.strip().splitlines()) <= 2
    assert re.search(pattern, message), message
    assert not list(tmp_path.iterdir())


def test_list_shows_the_other_models_when_one_fails(tmp_path, capsys):
    """A user's mistake in one of them is the last line."""
    (tmp_path / "one_bad_model.py").write_text(
        "import params.m4\nfrom lingvo_moe import registry\nfrom lingvo_moe.experiment import Recipe\n"
        "@registry.register\nclass Bad(Recipe):\n    def experiment(self): return 3\n"
        "@registry.register\nclass Good(params.m4.Small): pass\n"
    )
    registry.names()
    with registry.MODELS.isolated():
        assert main.main(["lingvo_moe", "list", f"--import={tmp_path}/one_bad_model.py"]) == 2
    shown = capsys.readouterr()
    listed = [line.split()[0] for line in shown.out.splitlines()]
    assert "one_bad_model.Good" in listed and "m4.Small" in listed and "one_bad_model.Bad" not in listed
    assert shown.err.startswith("error: model 'one_bad_model.Bad': the result of experiment() is an int; expected")
    assert len(shown.err.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_error():
    """`lingvo_moe --help | head -1` ends with the status of a broken pipe and without a traceback."""
    command = [sys.executable, "-m", "lingvo_moe", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_an_interrupt_during_imports_is_one_line():
    """They take a second; Python would print where it was."""
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell ignores it for jobs in the background
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'lingvo_moe.cli.app': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from lingvo_moe.__main__ import run\n"
        "run()\n"
    )
    found = run_code(code, succeeds=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "count, expected",
    [
        (12_345_678, "12.3M"),
        (999_499, "999499"),
        (999_600_000, "1B"),
        (999_499_000_000, "999B"),
        (999_600_000_000, "1T"),
    ],
)
def test_counts_have_three_digits(count, expected):
    assert main._short(count) == expected


def test_what_the_parent_has_said_is_not_said_again_by_the_child(monkeypatch, capsys):
    """Both read the flags. Each warning was shown twice by each process of a run; errors end the parent already."""
    command = ["lingvo_moe", "train", "--model=m4.Small", "--logdir=a", "--logdir=b", "--process=0"]
    warning = "warning: --logdir is given 2 times; only the last value, b, counts.\n"
    assert main.main(command) == 2 and capsys.readouterr().err.startswith(warning)
    monkeypatch.setenv(watchdog._VARIABLE, "1:2")
    assert main.main(command) == 2 and capsys.readouterr().err.startswith("error: --process=0 without --processes")
