"""Texts of a corpus begin with the model's name of their language, in either direction, in training and evaluation."""

from __future__ import annotations

import io
import itertools
import json
import logging
import pathlib
from typing import NamedTuple

import pytest
import sentencepiece

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.pair_languages import PairLanguages, closest
from lingvo_moe.data.pipeline import EvalInput, TrainInput
from lingvo_moe.data.tokenizer import MANIFEST, SIDES, SPECIAL_IDS, Tokenizer, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.testing.corpora import write_corpus
from lingvo_moe.utils.hashes import sha256

_GOLDEN = pathlib.Path(__file__).parents[2] / "testdata" / "golden" / "hugging_face"


def _names(model: str) -> list[str]:
    """All languages of NLLB-200 or M2M-100."""
    return [name.strip("_") for name in json.loads((_GOLDEN / f"{model}.json").read_text())["facts"]["languages"]]


_NLLB, _M2M = _names("nllb"), _names("m2m")


@pytest.mark.parametrize(
    "label, nllb, m2m",
    [
        ("de", "deu_Latn", "de"),
        ("de_AT", "deu_Latn", "de"),
        ("ca@valencia", "cat_Latn", "ca"),
        ("pt_BR", "por_Latn", "pt"),
        ("ar", "arb_Arab", "ar"),
        ("arz", "arz_Arab", None),
        ("fa", "pes_Arab", "fa"),
        ("lv", "lvs_Latn", "lv"),
        ("sw", "swh_Latn", "sw"),
        ("ku", "kmr_Latn", None),
        ("nb", "nob_Latn", "no"),
        ("nn", "nno_Latn", None),
        ("ko", "kor_Hang", "ko"),
        ("ps", "pbt_Arab", "ps"),
        ("tw", "twi_Latn", None),
        ("nso", "nso_Latn", "ns"),
        ("zh_Hans", "zho_Hans", "zh"),
        ("zh_Hant", "zho_Hant", "zh"),
        ("zh_HK", "zho_Hant", "zh"),
        ("sr_Latn", "srp_Cyrl", "sr"),
        ("nds", None, None),
        ("hsb", None, None),
        ("fr_a", None, None),
    ],
)
def test_a_label_is_a_language_of_the_model(label, nllb, m2m):
    """Macrolanguages are the variety that the model has; a foreign language that many speakers know is no match."""
    assert (closest(label, _NLLB), closest(label, _M2M)) == (nllb, m2m)


@pytest.mark.parametrize(
    "label, expected",
    [
        ("de", "de"),
        ("pt_BR", "pt"),
        ("nb", "no"),
        ("zh_Hans", "zh"),
        ("zh_TW", "zh_Hant"),
        ("zh_Hant", "zh_Hant"),
        ("zh_HK", "zh_Hant"),
        ("en_GB", "en"),
        ("hsb", None),
    ],
)
def test_names_that_are_no_tags_hide_no_language(label, expected):
    """Some of MADLAD-400's, whose scripts are languages of their own, and words among which langcodes cannot search."""
    names = ["translate", "back_translated", "Hant", "CA", "en", "de", "no", "pt", "zh", "zh_Latn", "zh_Hant"]
    assert closest(label, names) == expected and closest("de", ["translate"]) is None


@pytest.mark.parametrize("names", [_NLLB, _M2M])
def test_a_name_is_its_own_match(names):
    assert [closest(name, names) for name in names] == names


class Data(NamedTuple):
    """A corpus and tokenizers with languages."""

    corpus: pathlib.Path
    tokenizers: pathlib.Path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Data:
    """Pairs of German, Korean and Breton, which the tokenizers do not have."""
    directory = tmp_path_factory.mktemp("data")
    pairs = {
        label: {split: [(f"{word} {i}", f"house {i}") for i in range(20)] for split in ("train", "valid")}
        for label, word in {"de": "Haus", "ko": "jib", "br": "ti"}.items()
    }
    corpus = write_corpus(directory / "corpus", pairs)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{word} {i}" for word in ("Haus", "jib", "ti", "house") for i in range(20)]),
        model_writer=model,
        vocab_size=100,
        hard_vocab_limit=False,
        minloglevel=2,
        control_symbols=["eng_Latn", "deu_Latn", "kor_Hang"],
        **{f"{name}_id": number for name, number in SPECIAL_IDS.items()},
    )
    return Data(corpus, _write(directory / "tokenizers", model.getvalue()))


def _write(directory: pathlib.Path, model: bytes) -> pathlib.Path:
    directory.mkdir()
    (directory / "shared.model").write_bytes(model)
    entry = {"file": "shared.model", "sha256": sha256(model), "vocabulary_size": 100}
    (directory / MANIFEST).write_text(json.dumps({"ids": SPECIAL_IDS, **dict.fromkeys(SIDES, entry)}))
    return directory


def _config(source: str, target: str, **changes) -> InputConfig:
    lengths = {"source_length": 16, "target_length": 16, "batch_size": 8, "shards": 1}
    return InputConfig(source_language=source, target_language=target, packing=False, **{**lengths, **changes})


def _texts(batch: dict, tokenizers: Tokenizers) -> set[tuple[str, str]]:
    """Both texts of each row, each after its language."""
    found = set()
    rows = zip(batch["source"]["ids"], batch["target"]["labels"])
    for source, target in ((row[row > 0], labels[labels > 0]) for row, labels in rows):
        if len(source):
            named = [tokenizers.source.pieces(ids[:1])[0] + " " for ids in (source, target)]
            texts = [tokenizers.source.decode([ids.tolist()])[0] for ids in (source, target)]
            found.add((named[0] + texts[0], named[1] + texts[1]))
    return found


_INTO_ENGLISH = {
    *((f"deu_Latn Haus {i}", f"eng_Latn house {i}") for i in range(20)),
    *((f"kor_Hang jib {i}", f"eng_Latn house {i}") for i in range(20)),
}
_FROM_ENGLISH = {(target, source) for source, target in _INTO_ENGLISH}


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize(
    "languages, expected", [(("corpus", "eng_Latn"), _INTO_ENGLISH), (("eng_Latn", "corpus"), _FROM_ENGLISH)]
)
def test_training_texts_begin_with_their_language(data, languages, expected, in_graph, caplog):
    """In either direction, read by TensorFlow or not; pairs of a language that the model lacks are left out, aloud."""
    with caplog.at_level(logging.WARNING):
        batches = TrainInput(*data, _config(*languages), in_graph=in_graph).batches()
    assert [record.getMessage() for record in caplog.records] == [
        f"{data.corpus}, training: the model has none of the languages br; their pairs are left out."
    ]
    tokenizers = Tokenizers.load(data.tokenizers)
    found = set().union(*(_texts(batch, tokenizers) for batch, _ in itertools.islice(batches, 60)))
    assert found == expected


@pytest.mark.parametrize(
    "languages, expected", [(("corpus", "eng_Latn"), _INTO_ENGLISH), (("eng_Latn", "corpus"), _FROM_ENGLISH)]
)
def test_held_out_texts_do_too(data, languages, expected):
    """With the right source, and with those of other sentences, which are in the same language."""
    held_out, tokenizers = EvalInput(*data, _config(*languages)), Tokenizers.load(data.tokenizers)
    assert set().union(*(_texts(batch, tokenizers) for batch in held_out.batches())) == expected
    shuffled = set().union(*(_texts(batch, tokenizers) for batch in held_out.batches(shuffled=True)))
    for side in (0, 1):
        assert sorted(pair[side] for pair in shuffled) == sorted(pair[side] for pair in expected)
    assert not shuffled & expected


def test_the_stream_depends_on_the_languages(data):
    """Training does not go on with pairs in the other direction."""
    one, other = (TrainInput(*data, _config(*each)) for each in (("corpus", "eng_Latn"), ("eng_Latn", "corpus")))
    _, state = next(one.batches())
    with pytest.raises(UserError, match="input.source_language, input.target_language and input.shards as before"):
        other.check(state)


def test_fixed_languages_are_those_of_all_pairs(data, caplog):
    """A warning tells who meant to read pairs from English."""
    with caplog.at_level(logging.WARNING):
        batch, _ = next(TrainInput(*data, _config("eng_Latn", "deu_Latn")).batches())
    assert [record.getMessage() for record in caplog.records] == [
        "input.target_language is deu_Latn, but this side of a corpus's pairs is English, unless you built it "
        "otherwise; set input.target_language to the model's name of English, or to read them from English, the "
        "source's, and input.target_language to corpus."
    ]
    assert {pair[1].split()[0] for pair in _texts(batch, Tokenizers.load(data.tokenizers))} == {"deu_Latn"}


def test_no_language_of_the_model_is_an_error(data):
    tokenizers = Tokenizers.load(data.tokenizers).by_side
    fixed = "input.target_language is eng_Latn"
    with pytest.raises(
        UserError, match=f"it: the model has none of the languages br, eu .{fixed}., so no pair is left"
    ):
        PairLanguages(_config("corpus", "eng_Latn"), tokenizers, ["br", "eu"], "it")
    assert Corpus.open(data.corpus).languages == ("br", "de", "ko")


@pytest.mark.parametrize(
    "own, configured, from_english, by_label, left_out",
    [
        (("de", "en"), ("de", "en"), False, {"de": {"source": "de", "target": "en"}}, ("fr",)),
        (("de", "en"), ("corpus", ""), False, {"de": {"source": "de", "target": "en"}}, ("fr",)),
        (("eng", "deu"), ("", ""), True, {"de": {"source": "eng", "target": "deu"}}, ("fr",)),
        (("en", "de"), ("en", "corpus"), True, {"de": {"source": "en", "target": "de"}}, ("fr",)),
        (("und", "und"), ("und", "und"), False, {"de": {}, "fr": {}}, ()),
        (("en", "und"), ("en", "corpus"), True, {"de": {"source": "en"}, "fr": {"source": "en"}}, ()),
        (("und", "und"), ("en", "de"), True, {"de": {"source": "en", "target": "de"}}, ("fr",)),
    ],
)
def test_tokenizers_of_one_language_read_its_pairs_alone(data, own, configured, from_english, by_label, left_out):
    """In the direction that the model translates in, whatever the settings say."""
    plain = Tokenizers.load(data.tokenizers).source
    tokenizers = {side: _OneLanguage(plain.model, own_language=each) for side, each in zip(SIDES, own)}
    found = PairLanguages(_config(*configured), tokenizers, ["de", "fr"], "it")
    assert (found.from_english, found.by_label, found.left_out) == (from_english, by_label, left_out)
    assert found.prefixes("de") == {}


@pytest.mark.parametrize(
    "configured, by_label, first_ids",
    [
        (("", "corpus"), {"de": {"target": "deu_Latn"}, "ko": {"target": "kor_Hang"}}, {"de": 5, "ko": 6}),
        (("", "kor_Hang"), {"ko": {"target": "kor_Hang"}}, {"ko": 6}),
        (("", "eng_Latn"), {label: {"target": "eng_Latn"} for label in ("de", "ko", "br")}, {"de": 4, "br": 4}),
        (("de", ">>eng_Latn<<"), {"de": {"source": "de", "target": "eng_Latn"}}, {"de": 4}),
    ],
)
def test_a_source_begins_with_the_language_of_its_pairs_translation(data, configured, by_label, first_ids):
    """Where its pieces name that, and not its own: from English, or from any language into English."""
    loaded = Tokenizers.load(data.tokenizers)
    source = Tokenizer(loaded.source.model, own_language="und", names_target=True)
    tokenizers = {"source": source, "target": _OneLanguage(loaded.target.model, own_language="und")}
    found = PairLanguages(_config(*configured), tokenizers, ["de", "ko", "br"], "it")
    assert found.from_english == ("eng_Latn" not in configured[1]) and found.by_label == by_label
    assert {label: found.prefixes(label) for label in first_ids} == {
        label: {"source": (number,)} for label, number in first_ids.items()
    }


@pytest.mark.parametrize("target", ["", "fra_Latn"])
def test_the_language_of_translations_is_one_of_the_sources_pieces(data, target):
    loaded = Tokenizers.load(data.tokenizers)
    source = Tokenizer(loaded.source.model, own_language="und", names_target=True)
    tokenizers = {"source": source, "target": _OneLanguage(loaded.target.model, own_language="und")}
    with pytest.raises(UserError, match=f"input.target_language is {'empty' if not target else repr(target)}"):
        PairLanguages(_config("", target), tokenizers, ["de"], "it")


class _OneLanguage(Tokenizer):
    """A tokenizer without pieces for languages."""

    languages = ()


@pytest.mark.parametrize(
    "languages, remedy",
    [
        (("fra_Latn", "corpus"), "set input.source_language to the model's name of English."),
        (("corpus", "fra_Latn"), "set input.target_language to the model's name of English."),
    ],
)
def test_a_side_that_should_be_english_is_a_warning(data, languages, remedy, caplog):
    tokenizers = {side: _WithFrench(of.model) for side, of in Tokenizers.load(data.tokenizers).by_side.items()}
    with caplog.at_level(logging.WARNING):
        PairLanguages(_config(*languages), tokenizers, ["de"], "it").warn()
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == [remedy]


class _WithFrench(Tokenizer):
    languages = ("eng_Latn", "deu_Latn", "fra_Latn")


def test_a_language_model_reads_no_source():
    with pytest.raises(UserError, match="input.source_language is de, but a language model reads no source; leave it"):
        _config("de", "", source_length=0)


def test_one_side_is_english():
    with pytest.raises(UserError, match="are both corpus, but one side of each pair is English. Set one of them to"):
        _config("corpus", "corpus")


def test_texts_without_languages_begin_with_nothing():
    languages = PairLanguages(_config("", ""), {}, ["de", "br"], "it")
    assert languages.by_label == {"de": {}, "br": {}} and languages.prefixes("de") == {} == languages.prefixes("br")
    assert languages.source_and_target("Haus", "house") == ("Haus", "house") and not languages.left_out
