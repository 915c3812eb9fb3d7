"""Tests that both sides of the comparison of losses have the batches of the pipeline, and of its verdict."""

from __future__ import annotations

import functools
import itertools
import pathlib
import re
import sys

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.pipeline import EvalInput, TrainInput
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.testing.experiments import Data, make_data
from tools.benchmarks import comparisons, learner, losses, protocol
from tools.benchmarks.batches import Batches
from tools.benchmarks.comparisons import Directories
from tools.benchmarks.losses import Curve, Run
from tools.benchmarks.work import Learning
from tools.benchmarks.worker import Worker

pytestmark = pytest.mark.slow

TINY = {"model_dim": 16, "hidden_dim": 32, "heads": 2, "head_dim": 8, "rows": 8}
SETTINGS = ("input.batch_size=8", "model.input_dropout=0.1")
# Reads as many batches as it is asked for; its loss is its learning rate.
FAKE = """
import sys
from tools.benchmarks import protocol
from tools.benchmarks.batches import Batches
def start(work):
    data = Batches(work["batches"])
    left = data.of("train")
    facts = {"weights": 7, "layers": 2 * work["layers"], "batches": data.digest, "first_loss": 9.0, "versions": {}}
    return facts, lambda times: [work["rate"] + 0 * next(left)["labels"][0, 0] for _ in range(times)] + [work["rate"]]
protocol.serve(start, sys.argv[1:])
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Data:
    """A corpus of two languages and a tokenizer that both sides share."""
    directory = tmp_path_factory.mktemp("data")
    made = make_data(directory)
    tokenizers = directory / "shared"
    tokenizer_trainer.train(Corpus.open(made.corpus), tokenizers, {tokenizer_trainer.SHARED: 400}, 5.0, 5000)
    return Data(made.corpus, tokenizers)


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    """Each test starts with the flags' defaults, and compares tiny models."""
    monkeypatch.setattr(losses, "Learning", functools.partial(Learning, **TINY))
    losses._VALUES.unparse_flags()
    yield
    losses._VALUES.unparse_flags()


def flags_of(data: Data, directory: pathlib.Path, *further: str) -> list[str]:
    settings = [f"--set={assignment}" for assignment in SETTINGS]
    paths = [f"--corpus={data.corpus}", f"--tokenizers={data.tokenizers}", f"--directory={directory}"]
    return ["losses", "--language=de", "--steps=10", "--evaluations=2", *paths, *settings, *further]


def execute(*arguments: str) -> int:
    return app.execute(losses.main, arguments, losses._VALUES)


def curve(*held_out: float, name: str = "ours", **facts) -> Curve:
    of_all = {"weights": 7, "layers": 4, "batches": "a", "first_loss": 9.0, "versions": {"torch": "1"}}
    return Curve(name, {**of_all, **facts}, held_out, held_out, 60.0)


def run_of(ours: Curve, *tried: Curve) -> Run:
    return Run("python -m tools.benchmarks.losses", (100, 200), 50, ours, tried)


def test_batches_are_those_of_the_pipeline(data, tmp_path):
    """What the file leaves out follows from it: segments and positions, also of the empty rows of the last batch."""
    losses._VALUES(flags_of(data, tmp_path))
    work = losses.make_batches(tmp_path)
    made, config = Batches(work.batches), learner.experiment_of(work).input
    corpus = tmp_path / "corpus"
    assert Corpus.open(corpus).languages == ("de",)
    trained = [batch for batch, _ in itertools.islice(TrainInput(corpus, data.tokenizers, config).batches(), 10)]
    for split, batches in (
        ("train", trained),
        ("held_out", list(EvalInput(corpus, data.tokenizers, config).batches())),
    ):
        restored = list(map(learner.of_model, made.of(split)))
        assert len(restored) == len(batches) and made.target_tokens(split)[0] > 0
        for expected, found in zip(map(tree.flatten, batches), map(tree.flatten, restored)):
            assert expected.keys() == found.keys()
            for path, array in expected.items():
                np.testing.assert_array_equal(array, found[path], strict=True)
    assert sum(made.target_tokens("held_out")) == sum(
        np.count_nonzero(batch["target"]["segment_ids"]) for batch in batches
    )


def test_the_batches_of_another_corpus_are_an_error(data, tmp_path):
    """It names what to do here, where there is no study."""
    losses._VALUES(flags_of(data, tmp_path))
    losses.make_batches(tmp_path)
    losses._VALUES(flags_of(data, tmp_path, "--language=fr"))
    with pytest.raises(UserError, match="corpus has the pairs of another corpus, .*[.] Delete it, or name another"):
        losses.make_batches(tmp_path)


@pytest.mark.parametrize("steps", [10, 99, 1000])
def test_both_sides_have_one_schedule(steps):
    """The peers' function is the recipe's schedule, which is TensorFlow's."""
    own = learner.experiment_of(Learning(batches="", steps=steps, vocabulary=100))
    rates = [float(own.optimizer.learning_rate(tf.constant(step))) for step in range(0, steps, 7)]
    expected = [0.02 * protocol.rate_factor(step, steps) for step in range(0, steps, 7)]
    np.testing.assert_allclose(rates, expected, rtol=2e-6)  # a dozen float32 operations
    assert protocol.rate_factor(steps // 10 - 1, steps) == 1.0
    assert protocol.rate_factor(steps - 1, steps) == pytest.approx(0.1)


def test_model_is_dense_and_regularised_by_nothing():
    """The dimensions are the work's; `settings` come last."""
    work = Learning(batches="", steps=10, vocabulary=100, settings=("model.twin_keys=false",))
    model = learner.experiment_of(work).model
    assert (model.num_layers, model.num_experts, model.vocabularies) == (4, 0, {"source": 100, "target": 100})
    assert model.tied_embeddings and not model.twin_keys
    assert not (model.input_dropout or model.residual_dropout or model.attention_dropout or model.label_smoothing)


def test_tiny_run_against_a_fake_peer(data, tmp_path, monkeypatch, capsys):
    """Our worker learns, and of the peer's learning rates the best counts."""
    worker = Directories.worker

    def fake(self, name, who, work):
        if who == comparisons.LEARNER:
            return worker(self, name, who, work)
        assert who == losses.PEER and work.batches.endswith("batches.npz")
        return Worker(name, [sys.executable, "-c", FAKE], vars(work), tmp_path / "logs")

    monkeypatch.setattr(Directories, "worker", fake)
    page = tmp_path / "page.md"
    page.write_text("<!-- losses: begin -->\n<!-- losses: end -->\n", encoding="utf-8")
    status = execute(*flags_of(data, tmp_path, "--rates=9,8,10", f"--document={page}", f"--json={tmp_path}/run.json"))
    shown = capsys.readouterr().out
    assert status == 0 and "| Marian, 8 | ratio |" in shown and "--set=model.input_dropout=0.1" in shown
    assert shown.strip() in page.read_text(encoding="utf-8") and (tmp_path / "run.json").exists()


def test_worse_by_more_than_three_percent():
    """The bound is on the last losses, against the best of the peer's; what is not a number is infinite."""
    other = curve(5.0, 4.0, name="Marian, 0.001")
    assert run_of(curve(9.0, 4.12), other).ratio <= losses.LARGEST_RATIO < run_of(curve(2.0, 4.13), other).ratio
    assert run_of(curve(1.0, 4.0), curve(1.0, float("nan")), other, curve(1.0, 4.5)).best is other
    assert not run_of(curve(4.0, float("nan")), other).ratio <= losses.LARGEST_RATIO


@pytest.mark.parametrize("last, status", [(4.12, 0), (4.13, 1), (float("nan"), 1)])
def test_status_is_the_verdict(monkeypatch, last, status):
    """For scripts: 1 says that there is a defect to find."""
    other = curve(5.0, 4.0, name="Marian, 0.001")
    monkeypatch.setattr(losses, "_run", lambda rates, ends, directories: run_of(curve(5.0, last), other))
    assert execute("losses") == status


def test_table_of_losses():
    """A row for each evaluation, a line for each training."""
    text = losses.table(run_of(curve(5.0, 4.0), curve(5.0, 4.5, name="Marian, 1"), curve(4.0, 5.0, name="Marian, 3")))
    assert "| target tokens | ours | Marian, 1 | ratio |" in text
    assert "| 0 | 9.000 | 9.000 |  |\n| 100 | 5.000 | 5.000 | 1.000 |\n| 200 | 4.000 | 4.500 | 0.889 |" in text
    assert text.count("\n- Marian, ") == 2 and "- ours: 7 weights, 60 CPU s" in text


@pytest.mark.parametrize("fact", ["layers", "batches"])
def test_different_work_is_an_error(fact):
    """The error names the fact and both values."""
    losses.check_equal(curve(1.0), curve(1.0))
    with pytest.raises(UserError, match=f"its {fact} are other, ours "):
        losses.check_equal(curve(1.0), curve(1.0, **{fact: "other"}))


def test_evaluations_are_even_and_the_last_is_at_the_end():
    """Protects the steps of the table's rows."""
    assert losses._ends(10, 4) == [2, 5, 7, 10] and losses._ends(3, 3) == [1, 2, 3]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rates=fast"], "--rates=fast: expected numbers above 0"),
        (["--rates=0"], "--rates=0: expected"),
        (["--rates=inf"], "--rates=inf: expected"),
        (["--evaluations=11"], "--evaluations=11: expected at most --steps=10"),
        (["--language=tlh"], "--language=tlh: .* it has de, fr"),
        (["--document=none.md"], "none.md: .*markers"),
        (["--set=model.depth=3"], "depth"),
        (["--set=num_layers=2"], "--set=model.num_layers=2: the peer has 4, .*leave it out"),
        (["--set=model.hidden_dim=64"], "--set=model.hidden_dim=64: the peer has 32"),
        (["--set=input.packing=true"], "--set=input.packing=True: the peer has False"),
        (["--set=warmup_steps=7"], "--set=optimizer.learning_rate.warmup_steps=7: the peer has 1"),
    ],
)
def test_mistakes_of_the_user(data, tmp_path, capsys, flags, message):
    """They are reported before anything is trained, and name the flag."""
    assert execute(*flags_of(data, tmp_path, *flags)) == 2
    printed = capsys.readouterr().err
    assert re.search(message, printed), printed


def test_separate_tokenizers_are_an_error(data, tmp_path, capsys):
    """Marian has one vocabulary."""
    separate = Data(data.corpus, data.corpus.parent / "tokenizers")
    assert execute(*flags_of(separate, tmp_path)) == 2
    assert "--shared_vocabulary" in capsys.readouterr().err
