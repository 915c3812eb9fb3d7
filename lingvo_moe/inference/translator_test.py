"""Translations are in the order of the sentences, whatever sentences are batched together."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import overrides
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.inference import translator as translator_module
from lingvo_moe.inference.explanation import Explainer
from lingvo_moe.inference.lines.capitals import upper_case
from lingvo_moe.inference.lines.line_reader import LineReader
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.inference.translator import Translator
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training import loop
from lingvo_moe.training.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

_SENTENCES = ["der", "neerg der eulb", "eert", "", "esuoh gib a", "der", "drib", "hsirp xyz", "enots wen eht"]
_EXPERTS = "model.encoder_layer_pattern=moe"  # in the encoder, too


@pytest.fixture(scope="module")
def logdir(data, tmp_path_factory):
    """Makes a log directory with the initial state of the tiny model; these tests need no better one."""
    with pytest.MonkeyPatch.context() as patch:
        tiny.compile_once(patch)
        directory = tmp_path_factory.mktemp("log")
        config = tiny.tiny(data, _EXPERTS)
        state = Engine(2, "cpu").compile(config.steps.init())({"seed": np.array([0, 1], np.int32)})["state"]
        checkpoints = Checkpoints(directory, keep=1)
        checkpoints.save("tiny", state, None)
        checkpoints.close()
        yield directory


@pytest.fixture(scope="module")
def translator(data, logdir) -> Translator:
    return Translator("tiny", tiny.tiny(data, _EXPERTS), Engine(2, "cpu"), logdir)


def test_order_and_batching_do_not_change_translations(translator):
    """Sentences are sorted by length internally; equal sentences have equal translations."""
    assert translator.name == "tiny" and translator.experiment.translates
    found = translator.translate(_SENTENCES)
    assert found[0] == found[5] and len(found) == len(_SENTENCES)
    backwards = translator.translate(_SENTENCES[::-1])[::-1]
    alone = [translator.translate([sentence])[0] for sentence in _SENTENCES]
    for one, other, single in zip(found, backwards, alone, strict=True):
        assert [t.text for t in one] == [t.text for t in other] == [t.text for t in single]
        np.testing.assert_allclose([t.score for t in one], [t.score for t in single], rtol=1e-5)


def test_hypotheses_are_best_first(translator):
    """Of those that have what they must keep, and then of the others."""
    found = translator.translate(["neerg der eulb", "eert", "gib der"])
    assert max(map(len, found)) == 2  # equal texts are left out
    for translations in found:
        ranks = [(translation.is_intact, translation.score) for translation in translations]
        assert ranks == sorted(ranks, reverse=True)


def test_an_empty_sentence_is_not_given_to_the_model(translator):
    assert translator.translate(["", " "]) == [[Translation("", 0.0)], [Translation(" ", 0.0)]]


def test_lines_are_read_as_the_text_of_corpora_is_written(translator):
    """Without invisible marks and accelerators: training pairs have none."""
    plain = translator.translate(["neerg der", "eulb"])
    assert translator.translate(["neer\u00adg \u2068der\u2069", "_eulb"]) == plain
    assert translator.translate(["neerg der(_N)", "eulb(&B)"]) == plain
    (best, *_), *_ = translator.translate(["\u2603  neerg  der  \u2603"])
    assert best.text.startswith("\u2603 ") and best.text.endswith(" \u2603")


def test_a_lost_placeholder_is_translated_again(translator, monkeypatch):
    """With a short address in its place, once for all lines that need it, and not where a hypothesis has it."""
    read = []

    def translate_texts(texts, advance=None):
        read.append(list(texts))
        answers = {"neerg %s": ["green", "bad %s"], "eulb %d": ["blue", "sky"], "eulb http://1": ["blue http://1", "x"]}
        return [[Translation(answer, -1.0) for answer in answers.get(text, ["other", "one"])] for text in texts]

    monkeypatch.setattr(translator, "_translate_texts", translate_texts)
    lines = translator.translate(["neerg %s", "eulb %d", "der", "eulb %d", "gib %s"])
    assert read == [["neerg %s", "eulb %d", "der", "gib %s"], ["eulb http://1", "gib http://1"]]
    assert [[each.text for each in line] for line in lines] == [
        ["bad %s", "green"],
        ["blue %d", "x"],
        ["other", "one"],
        ["blue %d", "x"],
        ["other", "one"],
    ]
    assert [line[0].is_intact for line in lines] == [True, True, True, True, False]


def test_a_line_in_capitals_that_does_not_fit_is_read_in_lower_case_alone(translator):
    """Capitals have far more pieces."""
    lines = ["NEERG DER EULB " * count for count in range(1, 40)]
    line = next(line for line in lines if not translator.fits([line.strip()])[0])
    (in_capitals, *_), (lowered, *_) = translator.translate([line, line.capitalize()])
    assert translator.fits([line.capitalize().strip()]) == [True]
    assert (in_capitals.text, in_capitals.score) == (upper_case(lowered.text), lowered.score)


def test_the_experts_of_every_token_are_explained(data, logdir, translator):
    """By layer, what encoder and decoder read, of each part of a line; two experts each, whose weights add to 1."""
    explainer = Explainer("tiny", tiny.tiny(data, _EXPERTS), Engine(2, "cpu"), logdir)
    sentences = ["neerg der eulb", "", "gib", "eert. " * 30, "der", "neerg"]
    best = [translations[0] for translations in translator.translate(sentences)]
    found = list(explainer.explain(best, translator.step))
    lines = [(explanation["line"], explanation["part"]) for explanation in found]
    assert lines == sorted(lines) and {line for line, _ in lines} == {1, 3, 4, 5, 6} and (4, 2) in lines
    assert "".join(found[0]["source"]).replace("▁", " ") == " neerg der eulb</s>"
    for explanation in found:
        assert explanation["source"][-1] == "</s>" and explanation["translation"][0] == "<s>"
        for layer, side in (("encoder/1", "source"), ("decoder/1", "translation")):
            assert len(explanation[layer]) == len(explanation[side])
            for choices in explanation[layer]:
                assert 1 <= len(choices) <= 2 and sum(weight for _, weight in choices) == pytest.approx(1, abs=1e-3)


def test_the_experts_of_a_token_do_not_depend_on_later_tokens(data, logdir):
    """In the decoder: the entry beside a token is that of this token, not of the one that it predicts."""
    explainer = Explainer("tiny", tiny.tiny(data, _EXPERTS), Engine(2, "cpu"), logdir)
    pairs = [((5, 6, 7), (8, 9, 10, 11)), ((5, 6, 7), (8, 9, 12, 11)), ((5, 6, 7), (20, 9, 10, 11))]
    one, later, earlier = (
        explanation["decoder/1"]
        for explanation in explainer.explain([Translation("", 0.0, (pair,)) for pair in pairs], step=0)
    )
    assert one[:3] == later[:3] and one[3] != later[3]
    assert one[0] == earlier[0] and one[1] != earlier[1]


def test_no_sentences_have_no_translations(translator):
    assert translator.translate([]) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("der old", r"sentences: 'der old' is one text; expected a list of texts, \['der old'\]"),
        (iter(["der"]), "sentences is a list_iterator; expected a list of texts"),
        (["der", b"old"], "sentences: b'old' is a bytes; expected a text"),
    ],
)
def test_what_is_no_list_of_texts_is_an_error(translator, given, message):
    """A text alone is a sequence, too: of letters, each of which would be translated."""
    with pytest.raises(UserError, match=message):
        translator.fits(given)
    with pytest.raises(UserError, match=message):
        translator.translate(given)


def test_a_directory_without_hyperparameters_needs_the_name_of_the_model(tmp_path):
    """The message names the file."""
    with pytest.raises(UserError, match=r"hyperparameters.json: no such file. .*pass the model's name"):
        translator_module.load(tmp_path)


def test_a_long_line_is_translated_in_parts(data, translator):
    """A sentence that is too long by itself loses its end, which its translation says."""
    sentences = ["neerg der eulb.", "eert gib a."]
    long = " ".join(sentences * 12)
    assert translator.fits(["der", long]) == [True, False]
    found = translator.translate(["der", long])
    (line,) = LineReader(Tokenizers.load(data.tokenizers).source, 47).lines([long])
    parts = line.inputs
    assert len(parts) > 1 and not found[1][0].is_cut
    separate = translator.translate([part.strip() for part in parts])
    assert found[1][0].text == " ".join(best.text for best, *_ in separate)
    assert found[1][0].score == pytest.approx(min(part[0].score for part in separate), rel=1e-5)
    assert [best.is_cut for best, *_ in translator.translate(["der", "neerg der " * 40])] == [False, True]


def test_chunks_are_in_order_and_have_no_sentence_twice(translator, monkeypatch):
    """Whole lines at a time, as many as fill the batches of a chunk; a repeated sentence is not searched again."""
    monkeypatch.setattr("lingvo_moe.inference.translator._CHUNK_BATCHES", 1)
    expected, batches = translator.translate(_SENTENCES), []
    translate_batch = translator._translate_batch

    def counted(source):
        batches.append(int(np.any(source["segment_ids"], axis=1).sum()))
        return translate_batch(source)

    monkeypatch.setattr(translator, "_translate_batch", counted)
    chunks = list(translator.stream(_SENTENCES))
    assert [len(chunk) for chunk in chunks] == [4, 5]  # the fifth sentence is new, the sixth is not
    assert batches == [4, 4] and len(set(_SENTENCES)) == 8
    for one, other in zip([line for chunk in chunks for line in chunk], expected, strict=True):
        assert [t.text for t in one] == [t.text for t in other]
    assert [t.text for line in translator.translate(_SENTENCES[7:]) for t in line] == [
        t.text for chunk in translator.stream(_SENTENCES, start=7) for line in chunk for t in line
    ]


def test_the_digest_is_of_weights_and_tokenizers(translator, data):
    """So that an interrupted run is not continued with the translations of another model of the same name and step."""
    tokenizers = Tokenizers.load(data.tokenizers)
    swapped = dataclasses.replace(tokenizers, source=tokenizers.target)
    theta = {"norm": {"scale": np.ones(4, np.float32)}, "large": np.ones(2**17, np.float32)}
    other = {**theta, "norm": {"scale": np.full(4, 1.0001, np.float32)}}
    digests = [translator_module._digest(*of) for of in ((theta, tokenizers), (other, tokenizers), (theta, swapped))]
    assert len({*digests, translator.digest}) == 4
    assert digests[0] == translator_module._digest(dict(reversed(theta.items())), tokenizers)


def test_a_language_model_does_not_translate(data, tmp_path):
    """The command asks before it loads anything; from Python, a log directory may be of any model."""
    with pytest.raises(UserError, match="tiny does not translate; `inference.held_out_loss`"):
        Translator("tiny", tiny.tiny_language_model(data), Engine(2, "cpu"), tmp_path)


def test_tokenizers_that_the_model_was_not_trained_with_are_an_error(data, tmp_path):
    """With them, each word would be translated as another one, and nothing would say why."""
    config = tiny.tiny(data)
    loop.train(tiny.MODEL, overrides.apply(config, ["training.steps=1"]), Engine(2, "cpu"), tmp_path / "log")
    others = dataclasses.replace(config, tokenizers=str(tmp_path / "tokenizers"))
    sizes = {"source": config.model.source_vocabulary - 1, "target": config.model.target_vocabulary}
    tokenizer_trainer.train(Corpus.open(data.corpus), tmp_path / "tokenizers", sizes, 5.0, 1000)
    with pytest.raises(UserError, match="--tokenizers=.*tokenizers: not the tokenizers that .*log was trained with"):
        Translator(tiny.MODEL, others, Engine(2, "cpu"), tmp_path / "log")
    assert Translator(tiny.MODEL, config, Engine(2, "cpu"), tmp_path / "log").step == 1


def test_the_first_chunks_are_small(data):
    """A user sees translations, and a journal has some, within seconds; later chunks have fewer steps in all."""
    lines = LineReader(Tokenizers.load(data.tokenizers).source, 47).lines([f"der {number}" for number in range(1000)])
    chunks = translator_module._chunks(lines, 4)
    assert [len(chunk) for chunk in chunks][:7] == [8, 16, 32, 64, 128, 128, 128]


def test_a_line_of_many_sentences_is_a_chunk_of_its_own(translator, monkeypatch):
    """Its equal parts are searched once."""
    monkeypatch.setattr("lingvo_moe.inference.translator._CHUNK_BATCHES", 1)
    long = " ".join(f"{word} der gib." for word in ("eert", "drib", "neerg", "eulb", "esuoh") for _ in range(12))
    chunks = list(translator.stream(["der", "neerg", long, "der", "neerg der"], start=1))
    assert [len(chunk) for chunk in chunks] == [1, 1, 2]


def test_confidence_is_the_mean_probability_of_a_token(data, translator):
    """The geometric mean, from score and length; of a line in parts, the least."""
    (best, *_), (parts, *_) = translator.translate(["neerg der eulb", "neerg der eulb. eert gib a. " * 12])
    ((_, tokens),) = best.parts
    length, alpha = (
        min(len(tokens) + 1, 12),
        tiny.tiny(data, _EXPERTS).search.length_alpha,
    )  # with eos, if it was reached
    log_probability = best.score * ((5 + length) / 6) ** alpha
    assert best.confidence == pytest.approx(np.exp(log_probability / length))
    assert 0 < parts.confidence < 1 and len(parts.parts) > 1
    assert translator.translate([""])[0][0].confidence == 1


def test_a_missing_checkpoint_is_reported_with_the_command_that_makes_one(data, tmp_path):
    """Before anything is compiled."""
    with pytest.raises(UserError, match="no checkpoint. Train first: python -m lingvo_moe train --model=tiny"):
        Translator("tiny", tiny.tiny(data, _EXPERTS), tiny.Uncompiled(2, "cpu"), tmp_path)
