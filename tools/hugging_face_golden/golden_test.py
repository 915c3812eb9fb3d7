"""Tests of the tiny models against the golden files, which Hugging Face's own code wrote."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file

from lingvo_moe.testing import hugging_face_models
from tools.hugging_face_golden import families, sentences

MARIAN, MADLAD, SWITCH = "marian", "madlad", "switch"
NAMES = list(hugging_face_models.CONFIGS)
MULTILINGUAL = [name for name in NAMES if name not in (MARIAN, MADLAD, SWITCH)]
# Those of the scores that the Hub's models are searched with are in the golden file of Marian alone.
KINDS = [*((name, "hypotheses") for name in NAMES), (MARIAN, "renormalized_hypotheses")]


def _golden(name: str) -> dict:
    return json.loads((hugging_face_models.TOKENIZERS / f"{name}.json").read_text(encoding="utf-8"))


def _contents(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_the_golden_file(name):
    """The golden values are of these weights and this configuration, with the names that Hugging Face gives them."""
    golden = _golden(name)
    assert golden["weights"] == {key: list(shape) for key, shape in sorted(hugging_face_models.shapes(name).items())}
    assert golden["weights_digest"] == hugging_face_models.digest(name)
    assert golden["config"] == hugging_face_models.CONFIGS[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_is_written_the_same_again(name, tmp_path):
    """A test may write its own copy of a model."""
    for part in ("a", "b"):
        hugging_face_models.write(tmp_path / part, name)
    assert _contents(tmp_path / "a") == _contents(tmp_path / "b")


@pytest.mark.parametrize("name", NAMES)
def test_the_files_have_all_weights(name, tmp_path):
    """One file, or several files and an index that names the file of each weight."""
    hugging_face_models.write(tmp_path, name)
    files = sorted(tmp_path.glob("*.safetensors"))
    stored = {key: (path.name, value) for path in files for key, value in load_file(path).items()}
    expected = hugging_face_models.weights(name)
    assert sorted(stored) == sorted(expected)
    assert all(np.array_equal(stored[key][1], value) for key, value in expected.items())
    if name != "nllb_moe":
        assert [path.name for path in files] == ["model.safetensors"]
        return
    index = json.loads((tmp_path / hugging_face_models.INDEX).read_text(encoding="utf-8"))
    assert len(files) > 2
    assert index["weight_map"] == {key: file for key, (file, _) in stored.items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())


def test_no_two_weights_are_alike():
    """A test would not see that an importer exchanges two weights of equal values."""
    for name in NAMES:
        values = list(hugging_face_models.weights(name).values())
        assert len({value.tobytes() for value in values}) == len(values)
        assert all(np.std(value) > 0.05 for value in values)


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_those_of_the_family(name):
    """Marian's have its one direction, and some of Switch Transformers gaps."""
    expected = {MARIAN: families.Marian, SWITCH: families.Switch}.get(name, families.Multilingual).examples
    assert [example["source"] for example in _golden(name)["examples"]] == [example.source for example in expected]


@pytest.mark.parametrize("name, kind", KINDS)
def test_the_golden_hypotheses_are_not_degenerate(name, kind):
    """Most of the best hypotheses end by themselves, do not repeat one piece alone, and are clearly the best."""
    examples, config = _golden(name)["examples"], hugging_face_models.CONFIGS[name]
    best = [example[kind][0] for example in examples]
    assert sum(hypothesis["ends"] for hypothesis in best) >= 6
    assert sum(len(set(hypothesis["ids"][2:])) > 2 for hypothesis in best) >= 5
    assert len({tuple(hypothesis["ids"][2:]) for hypothesis in best}) >= 5
    for example, hypothesis in zip(examples, best):
        start, first, *_ = hypothesis["ids"]
        assert start == config["decoder_start_token_id"]
        assert example["forced_bos_token_id"] == (first if name in MULTILINGUAL else None)
        assert hypothesis["score"] > example[kind][1]["score"] + 1e-3
        assert config["pad_token_id"] not in hypothesis["ids"][1:]


@pytest.mark.parametrize("name", MULTILINGUAL)
def test_a_sequence_is_its_language_its_pieces_and_the_end(name):
    """Both sides are laid out alike."""
    golden = _golden(name)
    token = golden["tokens"]
    short = sentences.SHORT_NAMES
    for example in golden["examples"]:
        languages = example["source_language"], example["target_language"]
        if name == "m2m":
            languages = tuple(f"__{short[language]}__" for language in languages)
        for ids, language in zip((example["source_ids"], example["labels"]), languages):
            assert (token[ids[0]], token[ids[-1]]) == (language, "</s>")
            assert ids[0] == golden["facts"]["languages"][language]


@pytest.mark.parametrize("name", NAMES)
def test_the_decoder_reads_the_labels_shifted(name):
    """After the token that starts it."""
    start = hugging_face_models.CONFIGS[name]["decoder_start_token_id"]
    for example in _golden(name)["examples"]:
        assert example["decoder_input_ids"] == [start, *example["labels"][:-1]]
        assert len(example["log_probabilities"]) == len(example["labels"])


@pytest.mark.parametrize("name", MULTILINGUAL)
def test_the_table_has_rows_that_no_token_has(name):
    """As the public models have: an importer must not take the table's rows for the tokenizer's size."""
    golden = _golden(name)
    assert golden["facts"]["vocabulary"] >= len(golden["tokens"]) + 2
    assert set(golden["facts"]["tokens"].values()) == {len(golden["tokens"])}


def test_a_source_of_madlad_begins_with_the_language_of_its_target():
    """After a piece for the space before it, and before the pieces that the text has by itself; targets have none."""
    golden, short = _golden(MADLAD), sentences.SHORT_NAMES
    file = hugging_face_models.TOKENIZERS / MADLAD / "spiece.model"
    own = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for example in golden["examples"]:
        space, language, *ids = (golden["tokens"][number] for number in example["source_ids"])
        assert (space, language, ids[-1]) == ("▁", f"<2{short[example['target_language']]}>", "</s>")
        assert example["source_ids"][2:-1] == own.encode(example["source"] or " ")[: len(ids) - 1]
        assert example["labels"] == [*own.encode(example["target"]), own.eos_id()]
    assert golden["facts"]["vocabulary"] == len(golden["tokens"]) == own.vocab_size()


def test_madlads_buckets():
    """Of distances before a query and, in the encoder, after it; the same from 128 on; half have one distance."""
    buckets = {side: np.array(found) for side, found in _golden(MADLAD)["facts"]["buckets"].items()}
    middle = 150
    assert buckets["decoder"][middle - 16 : middle + 1].tolist() == list(range(16, -1, -1))
    assert not buckets["decoder"][middle:].any() and (buckets["decoder"][: middle - 127] == 31).all()
    before, after = buckets["encoder"][:middle], buckets["encoder"][middle + 1 :]
    assert before[-8:].tolist() == list(range(8, 0, -1)) and (before[:-127] == 15).all() and before[-90] < 15
    np.testing.assert_array_equal(after, 16 + before[::-1])


def test_a_gap_of_a_text_is_one_token():
    """With the space before it, and without changing the pieces around; the last sentinel is the first in the table."""
    golden = _golden(SWITCH)
    token = golden["tokens"]
    assert [token[number] for number in golden["examples"][0]["source_ids"]][:5] == [
        "▁The",
        "<extra_id_0>",
        "▁c",
        "o",
        "ld",
    ]
    assert [token[number] for number in golden["examples"][1]["source_ids"]][::5] == ["<extra_id_0>", "<extra_id_9>"]
    assert (
        token[300:] == [f"<extra_id_{number}>" for number in range(9, -1, -1)] and golden["facts"]["vocabulary"] == 312
    )


def _marian_pieces(side: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(
        model_file=str(hugging_face_models.TOKENIZERS / MARIAN / f"{side}.spm"),
    )


def test_marian_reads_each_side_with_its_own_pieces():
    """A piece has the id that vocab.json gives to its text, of whichever side it is, or that of `<unk>`."""
    golden = _golden(MARIAN)
    ids = {token: number for number, token in enumerate(golden["tokens"])}
    assert golden["facts"]["vocabulary"] == len(ids) and not golden["facts"]["languages"]
    assert golden["facts"]["pieces"]["not_in_vocabulary"] == ["regnet", "ß"]
    read = {side: _marian_pieces(side) for side in ("source", "target")}
    for example in golden["examples"]:
        for side, key in (("source", "source_ids"), ("target", "labels")):
            pieces = read[side].encode(example[side], out_type=str)
            assert example[key] == [*(ids.get(piece, ids["<unk>"]) for piece in pieces), ids["</s>"]]
    foreign = golden["examples"][3]
    assert read["source"].piece_to_id("x") == read["target"].piece_to_id("Ä") == 0
    assert ids["x"] in foreign["source_ids"] and ids["Ä"] in foreign["labels"]


def test_marians_texts_have_pieces_of_both_sides():
    """The text of a hypothesis has its pieces one after another, those that target.spm lacks among them."""
    golden, target, lacking = _golden(MARIAN), _marian_pieces("target"), set()
    for hypothesis in (hypothesis for example in golden["examples"] for hypothesis in example["hypotheses"]):
        end = -1 if hypothesis["ends"] else None
        pieces = [golden["tokens"][number] for number in hypothesis["ids"][1:end]]
        assert hypothesis["text"] == "".join(pieces).replace("▁", " ").strip()
        lacking |= {piece for piece in pieces if not target.piece_to_id(piece)}
    assert len(lacking) > 5 and any(piece.startswith("▁") for piece in lacking)


def test_marians_padding_would_be_likely():
    """Its logit is zero and those of others are less, as in public models, so it has to be forbidden."""
    golden = _golden(MARIAN)
    logits = np.array(golden["examples"][0]["logits"])
    padding = golden["config"]["pad_token_id"]
    assert golden["facts"]["bad_words_ids"] == [[padding]]
    assert (logits[:, padding] == 0).all() and (logits.argmax(1) == padding).any()
    for example in golden["examples"]:
        assert example["renormalized_hypotheses"][0]["score"] > example["hypotheses"][0]["score"] + 0.1


def test_marians_positions():
    """Sines, then cosines, of the position over powers of 10000 to the even numbers over the width; from zero."""
    golden = _golden(MARIAN)
    width = golden["config"]["d_model"]
    angles = np.arange(5)[:, np.newaxis] / 10000 ** (np.arange(0, width, 2) / width)
    np.testing.assert_allclose(
        golden["positions"], np.concatenate([np.sin(angles), np.cos(angles)], axis=1), rtol=0, atol=1e-6
    )


def test_every_package_is_pinned():
    """The environment of the golden values is reproducible."""
    text = pathlib.Path(__file__).with_name("requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
