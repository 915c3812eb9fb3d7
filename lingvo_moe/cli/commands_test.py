"""Commands do what their help says; a mistake is one or two clear lines, and leaves files unchanged."""

from __future__ import annotations

import itertools
import json
import math
import types

import pytest
import sacrebleu

from lingvo_moe.cli import commands, main
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.inference import held_out_loss
from lingvo_moe.program import Program
from lingvo_moe.testing import experiments as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", *arguments])


def test_list_and_show_name_every_model_and_field(capsys):
    """Everything that can be selected or set is shown."""
    assert _run("list") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("m4.MoE2048E60L", "1.03T", "m4.Quickstart", "m4.Dense96L"))
    assert _run("show", "2048E60L", "--set", "model.num_heads=8") == 0
    shown = capsys.readouterr().out
    assert "model.num_heads = 8\n" in shown and "model.activation_dtype = 'bfloat16'\n" in shown


def test_a_model_of_another_class_is_shown_and_not_planned(capsys, tmp_path):
    """A class of one's own needs what the protocol lists, and no base class; a plan knows our models only."""
    (tmp_path / "unigrams.py").write_text(
        "import dataclasses\n"
        "from lingvo_moe import registry\n"
        "from lingvo_moe.data.batching import InputConfig\n"
        "from lingvo_moe.experiment import Experiment, Recipe\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Unigram:\n"
        "    target_vocabulary: int = 8\n"
        "    sides, vocabularies = ('target',), {'target': 8}\n"
        "    num_layers, num_experts, pipeline, stages, microbatches = 1, 0, 'none', 1, 1\n"
        "    def weights(self): ...\n"
        "    def loss(self, theta, batch, context): ...\n"
        "    def num_weights(self): return 8\n"
        "    def positions_of(self, path, lengths): return 1\n"
        "    def settings_of_layers(self, field): return []\n"
        "@registry.register\n"
        "class Uni(Recipe):\n"
        "    def experiment(self):\n"
        "        return Experiment(model=Unigram(), input=InputConfig(source_length=0))\n"
    )
    assert _run("show", "unigrams.Uni", f"--import={tmp_path}/unigrams.py") == 0
    assert capsys.readouterr().out.startswith("unigrams.Uni: 8 weights\nmodel.target_vocabulary = 8\n")
    assert _run("plan", "unigrams.Uni", f"--import={tmp_path}/unigrams.py") == 2
    assert "plan counts the work of a Transformer or UNet; unigrams.Uni is a Unigram" in capsys.readouterr().err


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
        (["train", "--model=Quickstart", "--logdir=x", "--mesh=two"], "device mesh 'two' is not understood"),
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
            ["eval", "--model=dense_lm.Small", "--logdir=x", "--translations=y"],
            "--translations works only with translation models",
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
    import re

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of conftest.py; the first use of libtpu reports them
    assert _run(*arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.strip().splitlines()) <= 2
    assert re.search(pattern, message), message
    assert not list(tmp_path.iterdir())


def test_eval_prints_and_writes_scores_beside_the_copy_baseline(trained, data, tmp_path, capsys):
    """Each language has a row; the average is the mean of the rows; unknown languages are named."""
    flags = [*trained, f"--corpus={data.corpus}", "--max_pairs=3", f"--json={tmp_path / 'scores.json'}"]
    assert _run("eval", *flags, f"--translations={tmp_path / 'translations.tsv'}") == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    scores, loss = written["scores"], written["loss"]
    assert [row["language"] for row in scores] == ["de", "fr"] and all(row["test_pairs"] == 3 for row in scores)
    lines = (tmp_path / "translations.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    assert [row[0] for row in rows] == ["de"] * 3 + ["fr"] * 3 and all(0 < float(row[1]) < 1 for row in rows)
    pairs = set(itertools.chain(*(Corpus.open(data.corpus).pairs("test", language) for language in ("de", "fr"))))
    assert {(row[2], row[4]) for row in rows} <= pairs
    for score in scores:  # of the translations that were written
        own = [row for row in rows if row[0] == score["language"]]
        chrf = sacrebleu.corpus_chrf([row[3] for row in own], [[row[4] for row in own]]).score
        assert chrf == pytest.approx(score["chrf"])
    average = sum(row["copy_chrf"] for row in scores) / 2
    *_, averages, last = out.splitlines()
    assert averages.startswith("average of 2") and averages.endswith(f"{average:.1f}")
    assert last == (
        f"cross-entropy {loss['cross_entropy']:.3f} nats per target token of the test split (step {written['step']}); "
        f"{loss['shuffled_cross_entropy']:.3f} with the sources of other sentences: source gain "
        f"{loss['shuffled_cross_entropy'] - loss['cross_entropy']:.3f}"
    )
    for flag in ("--translations", "--json"):
        assert _run("eval", *flags, f"{flag}={data.corpus}/test/de.tsv") == 2
        assert f"{flag}={data.corpus}/test/de.tsv is inside of --corpus=" in capsys.readouterr().err
    assert _run("eval", *flags, "--languages=dee") == 2
    assert "Did you mean de" in capsys.readouterr().err


def test_eval_scores_one_checkpoint(trained, data, monkeypatch, capsys):
    """The loss is of the checkpoint that translates, though training saves others; it is computed before them."""
    calls = []

    def loss(*arguments) -> held_out_loss.HeldOutLoss:
        calls.append(("loss", arguments[-1]))
        return held_out_loss.HeldOutLoss(arguments[-1], 9, 1.0, 2.0, 0)

    def translated(translator, *arguments):
        calls.append(("translate", translator.step))
        return [], 0

    monkeypatch.setattr(commands, "Translator", lambda *_: types.SimpleNamespace(step=3))
    monkeypatch.setattr(held_out_loss, "compute", loss)
    monkeypatch.setattr(commands, "translate_held_out", translated)
    monkeypatch.setattr(commands, "score", lambda *_: [])
    monkeypatch.setattr(commands, "table", lambda *_, **__: "")
    assert _run("eval", *trained, f"--corpus={data.corpus}") == 0
    assert calls == [("loss", 3), ("translate", 3)] and "of the test split (step 3);" in capsys.readouterr().out


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


def test_eval_of_a_diverged_language_model_writes_json(tmp_path, monkeypatch, capsys):
    """Its perplexity is beyond the range of floats, and JSON has no infinity."""
    file = tmp_path / "found.json"
    monkeypatch.setattr(commands.run_setup, "set_up", lambda *_: (tiny.LANGUAGE_MODEL, None, None))
    monkeypatch.setattr(held_out_loss, "compute", lambda *_: held_out_loss.HeldOutLoss(2, 9, 800.0, None, 0))
    assert _run("eval", f"--model={tiny.LANGUAGE_MODEL}", f"--logdir={tmp_path}", f"--json={file}") == 0
    assert "800.0000 nats per token, perplexity inf, over 9 tokens" in capsys.readouterr().out
    assert json.loads(file.read_text(), parse_constant=pytest.fail)["perplexity"] == "inf"
    # On standard output, JSON is alone.
    assert _run("eval", f"--model={tiny.LANGUAGE_MODEL}", f"--logdir={tmp_path}", "--json=-") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tokens"] == 9 and "800.0000 nats per token" in printed.err


def test_export_writes_a_program_that_loads(tmp_path, capsys):
    """The bundle can be loaded, and its size is printed; `program_test` runs one without TensorFlow."""
    path = tmp_path / "decode.zip"
    assert _run("export", *tiny.settings(), "--program=decode", f"--output={path}") == 0
    program = Program.load(str(path))
    assert program.name == "decode" and program.mesh.size == 2
    size = path.stat().st_size
    assert size < 2**20 and f" for 2 devices, {size / 2**10:.1f} KiB\n" in capsys.readouterr().err
    assert {a.path for a in program.outputs} == {"ids", "scores", "lengths"}


def test_plan_predicts_layouts_without_compiling(capsys):
    """`--top=0` prints the best and the model's own, and their reasons; given settings stay."""
    arguments = ("--topology=v3:2x2x1", "--mesh=4x2", "--set=model.remat=full", "--set=model.pipeline=none")
    assert _run("plan", "dense_lm.Small", "--search=layout", "--top=0", *arguments) == 0
    printed = capsys.readouterr().out
    assert "legal layouts; " in printed and "self_attention" in printed and "\nown " in printed
    assert "--set=layout=" in printed and "mesh=" not in printed and "remat=" not in printed
