"""Protects the held-out loss: every token counts once, and shuffled sources cost more."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.inference import held_out_loss
from lingvo_moe.inference.held_out_loss import HeldOutLoss
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing.corpora import write_corpus
from lingvo_moe.training import loop
from lingvo_moe.training.checkpoint import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def lengths(data) -> list[int]:
    """Returns the number of tokens of every test text, its end included."""
    corpus, tokenizer = Corpus.open(data.corpus), tiny.tiny_language_model(data).open_tokenizers().target
    texts = [target for language in corpus.languages_of("test") for _, target in corpus.pairs("test", language)]
    return [len(ids) + 1 for ids in tokenizer.encode(texts)]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Returns (experiment, engine, log directory, metrics) of a language model, trained until it knows the words."""
    logdir = tmp_path_factory.mktemp("log")
    config = tiny.tiny_language_model(
        data, "training.steps=40", "training.evaluate_every=40", "training.checkpoint_every=40"
    )
    engine = Engine(2, "cpu")
    losses = loop.train(tiny.LANGUAGE_MODEL, config, engine, logdir)
    return config, engine, logdir, losses


def test_training_computes_the_held_out_loss_of_a_language_model(trained):
    _, _, _, losses = trained
    assert losses["valid/cross_entropy"] < math.log(200) - 0.5 and losses["cross_entropy"] > 0


def test_every_held_out_token_is_predicted_once(trained, lengths):
    config, engine, logdir, _ = trained
    found = held_out_loss.compute(tiny.LANGUAGE_MODEL, config, engine, logdir)
    assert found.tokens == sum(lengths) and found.left_out == 0
    assert (
        found.source_gain is None and found.step == 40 and 1 < found.perplexity == math.exp(found.cross_entropy) < 200
    )


def test_a_translation_model_is_also_given_other_sources(data, trained, tmp_path):
    """The same number of pairs of some languages; the loss with other sources is another one.

    It is that of the checkpoint that is asked for: `eval` has translated with it, and training has gone on.
    """
    config, (_, engine, _, _) = tiny.tiny(data), trained
    state = engine.compile(config.steps.init())({"seed": np.array([0, 1], np.int32)})["state"]
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save("tiny", state, None)
    worse = tree.map_leaves(lambda weight: 0 * weight, state["theta"])
    checkpoints.save("tiny", {**state, "step": np.int32(1), "theta": worse}, None)
    checkpoints.close()
    arguments = "tiny", config, engine, tmp_path, "test", ["fr"], 5
    found = held_out_loss.compute(*arguments, step=0)
    tokens = config.open_tokenizers().target.encode(
        [text for _, text in Corpus.open(data.corpus).sample("test", "fr", 5)]
    )
    assert found.tokens == sum(len(ids) + 1 for ids in tokens)
    assert found.step == 0 and found.source_gain is not None and 0 < abs(found.source_gain) < 1
    with pytest.raises(UserError, match="checkpoints/7 has been removed; training keeps .* Run the same command again"):
        held_out_loss.compute(*arguments, step=7)


def test_the_perplexity_of_a_diverged_model_is_infinite():
    """Beyond e^709 there is no float; `eval` must still print and write the loss."""
    found = HeldOutLoss(1, 9, 800.0, None, 0)
    assert found.perplexity == math.inf and HeldOutLoss(1, 9, math.log(8), None, 0).perplexity == pytest.approx(8)


def test_the_batch_size_does_not_matter(trained):
    """The mean is over tokens, not over batches with different numbers of tokens."""
    config, engine, logdir, _ = trained
    larger = dataclasses.replace(config, input=dataclasses.replace(config.input, batch_size=8))
    one, other = (
        held_out_loss.compute(tiny.LANGUAGE_MODEL, changed, engine, logdir).cross_entropy
        for changed in (config, larger)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_texts_that_do_not_fit_are_left_out_and_counted(trained, lengths):
    config, engine, logdir, _ = trained
    limit = max(lengths) - 1
    shorter = dataclasses.replace(config, input=dataclasses.replace(config.input, target_length=limit))
    found = held_out_loss.compute(tiny.LANGUAGE_MODEL, shorter, engine, logdir)
    fitting = [length for length in lengths if length <= limit]
    assert (found.tokens, found.left_out) == (sum(fitting), len(lengths) - len(fitting))
    assert 0 < found.left_out < len(lengths)


def test_no_fitting_text_is_reported_before_anything_is_compiled(data, lengths, tmp_path):
    config = tiny.tiny_language_model(data, "input.target_length=2")
    pattern = f"none of the corpus's {len(lengths)} test texts fits input.target_length=2; increase with --set input.t"
    with pytest.raises(UserError, match=pattern):
        held_out_loss.compute(tiny.LANGUAGE_MODEL, config, tiny.Uncompiled(2, "cpu"), tmp_path)


def test_the_side_that_no_text_fits_is_named(data, tmp_path):
    """A pair is left out if either of its sides is too long."""
    config = tiny.tiny(data, "input.source_length=2")
    length = config.texts.target_length
    pattern = f"fits input.source_length=2 and input.target_length={length}; increase with --set input.source_length="
    with pytest.raises(UserError, match=pattern):
        held_out_loss.compute(tiny.MODEL, config, tiny.Uncompiled(2, "cpu"), tmp_path)


def test_an_empty_split_is_reported_before_anything_is_compiled(data, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"de": {"train": [("der", "the")]}})
    config = tiny.tiny_language_model(data, f"corpus={corpus}")
    with pytest.raises(UserError, match="the corpus has no valid texts; see its report.txt"):
        held_out_loss.compute(tiny.LANGUAGE_MODEL, config, tiny.Uncompiled(2, "cpu"), tmp_path, "valid")
