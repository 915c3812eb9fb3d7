"""Tests of the tiny models against the golden files, which Hugging Face's own code wrote."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from lingvo_moe.testing import hugging_face_models
from tools.hugging_face_golden import sentences

NAMES = list(hugging_face_models.CONFIGS)


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
def test_the_golden_hypotheses_are_not_degenerate(name):
    """Most of the best hypotheses end by themselves, do not repeat one piece alone, and are clearly the best."""
    examples = _golden(name)["examples"]
    assert [example["source"] for example in examples] == [example.source for example in sentences.EXAMPLES]
    best = [example["hypotheses"][0] for example in examples]
    assert sum(hypothesis["ends"] for hypothesis in best) >= 6
    assert sum(len(set(hypothesis["ids"][2:])) > 2 for hypothesis in best) >= 5
    assert len({tuple(hypothesis["ids"][2:]) for hypothesis in best}) >= 5
    for example, hypothesis in zip(examples, best):
        assert hypothesis["ids"][:2] == [hugging_face_models.EOS, example["forced_bos_token_id"]]
        assert hypothesis["score"] > example["hypotheses"][1]["score"] + 1e-3
        assert hugging_face_models.PADDING not in hypothesis["ids"]


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_is_its_language_its_pieces_and_the_end(name):
    """Both sides are laid out alike, and the decoder reads the labels shifted."""
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
        assert example["decoder_input_ids"] == [hugging_face_models.EOS, *example["labels"][:-1]]
        assert len(example["log_probabilities"]) == len(example["labels"])


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_rows_that_no_token_has(name):
    """As the public models have: an importer must not take the table's rows for the tokenizer's size."""
    golden = _golden(name)
    assert golden["facts"]["vocabulary"] >= len(golden["tokens"]) + 2
    assert set(golden["facts"]["tokens"].values()) == {len(golden["tokens"])}


def test_every_package_is_pinned():
    """The environment of the golden values is reproducible."""
    text = pathlib.Path(__file__).with_name("requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
