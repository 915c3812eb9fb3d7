"""Commands do what their help says; a mistake is one or two clear lines, and leaves files unchanged."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

from lingvo_moe.cli import main, released
from lingvo_moe.program import Program
from lingvo_moe.testing import experiments as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> list[str]:
    """Returns the flags of a model that was trained for two steps."""
    logdir = tmp_path_factory.mktemp("log")
    shared = [*tiny.settings(), f"--tokenizers={data.tokenizers}", f"--logdir={logdir}"]
    assert _run("train", *shared, f"--corpus={data.corpus}", "--steps=2", "--set=training.evaluate_every=0") == 0
    return shared


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", *arguments])


def _lines(path: pathlib.Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"--input={path}"


def test_list_and_show_name_every_model_and_field(capsys):
    """Everything that can be selected or set is shown."""
    assert _run("list") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("m4.MoE2048E60L", "1.03T", "m4.Quickstart", "m4.Dense96L"))
    assert _run("show", "2048E60L", "--set", "model.num_heads=8") == 0
    shown = capsys.readouterr().out
    assert "model.num_heads = 8\n" in shown and "model.activation_dtype = 'bfloat16'\n" in shown


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
            "--mesh and --devices are mutually exclusive",
        ),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--processes=2"],
            "--processes=2: neither Slurm nor Open MPI has started this process",
        ),
        (
            ["train", "--model=Quickstart", "--logdir=x", "--coordinator=x", "--processes=2", "--process=0"],
            "expected HOST:PORT",
        ),
        (["train", "--model=Quickstart", "--logdir=x", "--mesh=two"], "device mesh 'two' is not understood"),
        (["train", "--model=Quickstart", "--logdir=x", "--tokenizers=nowhere"], "No tokenizer directory nowhere"),
        (["eval", "--model=Quickstart", "--logdir=x", "--corpus=nowhere"], "nowhere"),
        (["export", "--model=Quickstart"], "--output is missing"),
        (["show", "Quickstart", "Small"], "show takes one model's name, got 2"),
        (["plan"], "plan takes one model's name, got 0"),
        (["plan", "Quikstart"], "no such model. Did you mean m4.Quickstart"),
        (["plan", "Quickstart"], "no TPU v3 slice of 2 cores"),
        (["plan", "Quickstart", "--topology=v3:2x3x1"], "the first two sizes must be even"),
        (["plan", "Quickstart", "--topology=v3:2x2x1", "--mesh=4"], "has 8 cores; the mesh is 4"),
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
                *("plan", "dense_lm.Small", "--topology=v3:2x2x1", "--mesh=2x4", "--set=layout=pipeline_gshard"),
                *("--set=model.pipeline=gpipe", "--set=model.remat=full", "--set=model.stages=3"),
            ],
            "model.stages is 3, which 2 devices .layout pipeline_gshard, mesh 2x4. do not divide",
        ),
        (
            ["plan", "Quickstart", "--topology=v3:2x2x1", "--compiler_option=fast"],
            "--compiler_option=fast: expected NAME",
        ),
        (["plan", "Quickstart", "--topology=v3:2x2x1", "--json=nowhere/plan.json"], "there is no directory nowhere"),
        (
            ["plan", "sparse_lm.MoE10B32E", "--program=decode"],
            "sparse_lm.MoE10B32E does not translate; plan its training",
        ),
        (["plan", "Quickstart", "--topology=v3:2x2x1", "--search=speed"], "no such dimension"),
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
                *("plan", "dense_lm.Small", "--topology=v3:2x2x1", "--search=layout", "--mesh=8"),
                *(f"--set={name}=33" for name in ("model_dim", "hidden_dim", "head_dim", "target_vocabulary")),
                *("--set=num_heads=3", "--set=batch_size=9", "--set=model.pipeline=none"),
            ],
            "--search=layout: no legal layout on the mesh 8",
        ),
        (
            ["plan", "Quickstart", "--topology=v3:2x2x1", "--search=remat", "--program=decode"],
            "leave out --program=decode",
        ),
        (
            ["translate", "--model=dense_lm.Small", "--logdir=x"],
            "dense_lm.Small is a language model; it has nothing to translate",
        ),
        (["export", "--model=dense_lm.Small", "--program=decode", "--output=x"], "it has nothing to translate"),
        (
            ["eval", "--model=dense_lm.Small", "--logdir=x", "--languages=de"],
            "--languages is for translation models; of dense_lm.Small, a language model",
        ),
        (["eval", "--model=dense_lm.Small", "--logdir=x", "--beam_size=4"], "--beam_size is for translation models"),
        (["eval", "--model=dense_lm.Small", "--logdir=x", "--max_pairs=100"], "--max_pairs is for translation models"),
        (["eval", "--model=dense_lm.Small", "--logdir=x", "--summary"], "--summary is for translation models"),
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
    import re

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of conftest.py; the first use of libtpu reports them
    assert _run(*arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.strip().splitlines()) <= 2
    assert re.search(pattern, message), message
    assert not list(tmp_path.iterdir())


def test_translate_writes_as_many_lines_as_it_reads(trained, tmp_path, capsys):
    """Line n of the output is the translation of line n, empty lines and repeated ones included."""
    given = _lines(tmp_path / "in.txt", "der old", "", "neerg der der", "der old", "eert")
    assert _run("translate", *trained, given, f"--output={tmp_path / 'out.txt'}") == 0
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 6 and lines[5] == "" and lines[0] == lines[3]
    assert _run("translate", *trained, given, "--n_best=2") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [str(n) for n in range(1, 6) for _ in range(2)]
    scores = [float(row[1]) for row in rows]
    assert all(first >= second for first, second in zip(scores[::2], scores[1::2]))
    assert [row[2] for row in rows[::2]] == lines[:5]
    assert _run("translate", *trained, given, "--scores") == 0
    assert [line.split("\t") for line in capsys.readouterr().out.splitlines()] == [row[1:] for row in rows[::2]]


def test_translate_with_no_model_uses_the_released_one(trained, data, tmp_path, capsys, monkeypatch):
    """If it is there, in int8; a log directory that is named is of another model, which must be named too."""
    model, *settings = tiny.settings()
    assert model == f"--model={tiny.MODEL}"
    monkeypatch.setattr(released, "MODEL", tiny.MODEL)
    monkeypatch.setattr(released, "DIRECTORY", tmp_path)
    own = tuple(flag.removeprefix("--set=") for flag in settings if flag.startswith("--set="))
    specs_of = released._specs
    monkeypatch.setattr(released, "_specs", lambda assignments: specs_of(assignments or own))  # as if registered so
    given = _lines(tmp_path / "in.txt", "der old", "eert")
    assert _run("translate", *settings, given) == 2
    assert "--model is missing" in capsys.readouterr().err
    (tmp_path / "tokenizers").symlink_to(data.tokenizers)
    weights = tmp_path / "weights.safetensors"
    assert _run("checkpoint", "convert", trained[-1], f"--output={weights}", "--dtype=int8") == 0
    assert _run("translate", *settings, given) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert _run("translate", *settings, given, f"--logdir={tmp_path}") == 2
    assert "--model is missing" in capsys.readouterr().err


def test_translate_explains_which_experts_took_each_token(trained, tmp_path):
    """One JSON object a line; the translations are those of a run without --explain."""
    given, explained = _lines(tmp_path / "in.txt", "der old", "", "eert"), tmp_path / "experts.jsonl"
    outputs = [tmp_path / name for name in ("plain.txt", "explained.txt")]
    assert _run("translate", *trained, given, f"--output={outputs[0]}") == 0
    assert _run("translate", *trained, given, f"--output={outputs[1]}", f"--explain={explained}") == 0
    assert outputs[0].read_text() == outputs[1].read_text()
    found = [json.loads(line) for line in explained.read_text(encoding="utf-8").splitlines()]
    assert [explanation["line"] for explanation in found] == [1, 3]
    assert all(len(explanation["encoder/2"]) == len(explanation["source"]) for explanation in found)


@pytest.mark.parametrize("name", ["no/experts.jsonl", "", "-", "out.txt"])
def test_a_bad_file_for_explanations_is_an_error_before_the_work(trained, tmp_path, capsys, name):
    """A missing directory, no name, standard output, or the file of the translations."""
    path = name if name in ("", "-") else tmp_path / name
    assert _run("translate", *trained, f"--output={tmp_path / 'out.txt'}", f"--explain={path}") == 2
    assert f"--explain={path}: " in capsys.readouterr().err


def test_a_model_without_experts_has_nothing_to_explain(data, tmp_path, capsys):
    """Whatever num_experts says: the layers decide."""
    flags = [*tiny.settings("model.layer_pattern=dense"), f"--tokenizers={data.tokenizers}", f"--logdir={tmp_path}"]
    given = _lines(tmp_path / "in.txt", "der old")
    assert _run("translate", *flags, given, f"--explain={tmp_path / 'experts.jsonl'}") == 2
    assert "no layer of the model has experts" in capsys.readouterr().err


def test_one_long_line_does_not_stop_the_others(trained, tmp_path, capsys):
    """It is translated up to the limit, and a warning names it."""
    given = _lines(tmp_path / "in.txt", "der old", "neerg der " * 40, "eert")
    assert _run("translate", *trained, given) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 3 and "warning: line 2: a sentence has more than" in captured.err


@pytest.mark.parametrize(
    ("content", "flags", "pattern"),
    [
        (b"der\n\xff\xfe\n", [], "line 2: not UTF-8"),
        (b"a\0b\n", [], "line 1: holds a NUL byte"),
        (b"", [], "nothing to translate"),
        (b"der\n", ["--n_best=9"], "raise --beam_size"),
    ],
)
def test_bad_input_leaves_the_output_as_it_was(trained, content, flags, pattern, tmp_path, capsys):
    """The error names the line, and an earlier result stays."""
    import re

    (tmp_path / "in.txt").write_bytes(content)
    (tmp_path / "out.txt").write_text("earlier\n", encoding="utf-8")
    capsys.readouterr()
    status = _run("translate", *trained, f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out.txt'}", *flags)
    message = capsys.readouterr().err
    assert status == 2 and re.search(f"error: .*{pattern}", message), message
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "earlier\n"


def test_eval_prints_and_writes_scores_beside_the_copy_baseline(trained, data, tmp_path, capsys):
    """Each language has a row; the average is the mean of the rows; unknown languages are named."""
    flags = [*trained, f"--corpus={data.corpus}", "--max_pairs=3", f"--json={tmp_path / 'scores.json'}"]
    assert _run("eval", *flags) == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    scores, loss = written["scores"], written["loss"]
    assert [row["language"] for row in scores] == ["de", "fr"] and all(row["test_pairs"] == 3 for row in scores)
    average = sum(row["copy_chrf"] for row in scores) / 2
    *_, averages, last = out.splitlines()
    assert averages.startswith("average of 2") and averages.endswith(f"{average:.1f}")
    assert last == (
        f"cross-entropy {loss['cross_entropy']:.3f} nats per target token of the test split; "
        f"{loss['shuffled_cross_entropy']:.3f} with the sources of other sentences: the source saves "
        f"{loss['shuffled_cross_entropy'] - loss['cross_entropy']:.3f}"
    )
    assert _run("eval", *flags, "--languages=dee") == 2
    assert "no such language. Did you mean de" in capsys.readouterr().err


def test_a_language_model_is_trained_and_evaluated(data, tmp_path, capsys):
    """By the commands; its perplexity is printed and written."""
    shared = [
        *tiny.language_model_settings(),
        f"--tokenizers={data.tokenizers}",
        f"--logdir={tmp_path / 'log'}",
        f"--corpus={data.corpus}",
    ]
    assert _run("train", *shared, "--steps=2", "--set=training.evaluate_every=0") == 0
    assert _run("eval", *shared, f"--json={tmp_path / 'found.json'}") == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert capsys.readouterr().out == (
        f"{found['cross_entropy']:.4f} nats per token, perplexity {found['perplexity']:.2f}, over {found['tokens']:,} "
        f"tokens of the test split, after 2 steps\n"
    )
    assert (found["model"], found["split"], found["step"]) == (tiny.LANGUAGE_MODEL, "test", 2) and found["tokens"] > 100
    assert found["perplexity"] == math.exp(found["cross_entropy"])


def test_export_writes_a_program_that_loads(tmp_path):
    """The bundle can be loaded; `program_test` runs one without TensorFlow."""
    path = tmp_path / "decode.zip"
    assert _run("export", *tiny.settings(), "--program=decode", f"--output={path}") == 0
    program = Program.load(str(path))
    assert program.name == "decode" and program.mesh.size == 2
    assert {a.path for a in program.outputs} == {"ids", "scores", "lengths"}


def test_plan_predicts_layouts_without_compiling(capsys):
    """`--top=0` prints the best and the model's own, and their reasons; given settings stay."""
    arguments = ("--topology=v3:2x2x1", "--mesh=4x2", "--set=model.remat=full", "--set=model.pipeline=none")
    assert _run("plan", "dense_lm.Small", "--search=layout", "--top=0", *arguments) == 0
    printed = capsys.readouterr().out
    assert "legal layouts; " in printed and "self_attention" in printed and "\nown " in printed
    assert "--set=layout=" in printed and "mesh=" not in printed and "remat=" not in printed
