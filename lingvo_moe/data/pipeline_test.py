"""Protects the input pipeline: batches have the corpus's pairs, streams resume exactly, bad input is a clear error."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from lingvo_moe.data import corpus_stream, pipeline
from lingvo_moe.data.batching import Batch, InputConfig
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.pipeline import EvalInput, TrainInput, drawn_pairs, merge_states, rejected_pairs, source_batches
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.testing.corpora import write_corpus

_CONFIG = InputConfig(batch_size=4, source_length=64, target_length=48, lookahead=3, shards=1)
_TOO_LONG = [(" ".join(map(str, range(80))), "numbers")]


def make_pairs(language: str, count: int) -> list[tuple[str, str]]:
    """Makes sentences of one to nine words; the number at the end identifies the pair."""
    return [
        (" ".join([language] * (i % 9)) + f" Satz {i}", " ".join(["the"] * (i % 9)) + f" sentence {i}")
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two languages with held-out pairs and one without; one training pair and one held-out pair are too long."""
    pairs = {
        "de": {"train": make_pairs("Haus", 300), "valid": make_pairs("Haus", 30)},
        "fr": {"train": make_pairs("maison", 20), "valid": make_pairs("maison", 7) + _TOO_LONG},
        "zz": {"train": _TOO_LONG + make_pairs("dom", 2)},
    }
    return write_corpus(tmp_path_factory.mktemp("corpora") / "corpus", pairs)


@pytest.fixture(scope="module")
def tokenizers(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained") / "tokenizers"
    tokenizer_trainer.train(Corpus.open(corpus), output, {"source": 400, "target": 120}, 5.0, 2000)
    return output


@pytest.fixture(scope="module")
def train_input(corpus, tokenizers) -> TrainInput:
    return TrainInput(corpus, tokenizers, _CONFIG)


def take(items, count: int) -> list:
    return list(itertools.islice(items, count))


@pytest.mark.slow
def test_a_stream_leaves_no_temporary_file(train_input, tmp_path, monkeypatch):
    """A command ends without Python's clean-up, so each training would leave one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    take(train_input.batches(), 2)
    assert not list(tmp_path.iterdir())


def test_a_stream_that_a_program_leaves_open_ends_without_a_message(corpus, tokenizers, monkeypatch):
    """Python closes it when it exits, after TensorFlow's modules are gone, and would print a traceback."""
    examples = corpus_stream.TrainPairs(corpus, tokenizers, _CONFIG).examples(0, 1)
    next(examples)
    monkeypatch.setattr(corpus_stream, "tf", None)
    examples.close()  # raises what Python would print
    assert next(examples, None) is None


def texts(batch: Batch, tokenizers) -> list[tuple[str, str]]:
    """Returns the pairs of a batch as text."""
    loaded, actual = Tokenizers.load(tokenizers), []
    for row in range(len(batch["source"]["ids"])):
        for segment in range(1, batch["source"]["segment_ids"][row].max() + 1):
            source, target = (
                batch[side][name][row][batch[side]["segment_ids"][row] == segment]
                for side, name in (("source", "ids"), ("target", "labels"))
            )
            actual.append((loaded.source.decode([source])[0], loaded.target.decode([target])[0]))
    return actual


def assert_same(first: list, second: list):
    """Checks two lists of (batch, state)."""
    assert len(first) == len(second)
    for (batch, state), (other, other_state) in zip(first, second, strict=True):
        assert state == other_state
        for side, arrays in batch.items():
            for name, values in arrays.items():
                np.testing.assert_array_equal(values, other[side][name])


def stream_texts(corpus, tokenizers, count: int) -> list[tuple[str, str] | None]:
    """Returns the first examples of the stream, in order; None for one that is rejected."""
    config = dataclasses.replace(_CONFIG, batch_size=1, packing=False)  # a batch is one example
    actual, rejected = [], 0
    for batch, state in take(TrainInput(corpus, tokenizers, config).batches(), count):
        actual += [None] * (rejected_pairs(state) - rejected) + texts(batch, tokenizers)
        rejected = rejected_pairs(state)
    return actual


def test_pairs_that_are_drawn_are_placed_pending_or_rejected(corpus, tokenizers):
    """Rows of 12 tokens are too short for some; the share of the others is reported."""
    config = dataclasses.replace(_CONFIG, batch_size=4, shards=2, source_length=12, target_length=12)
    placed = 0
    for batch, state in take(TrainInput(corpus, tokenizers, config).batches(), 5):
        placed += len(texts(batch, tokenizers))
        pending = sum(len(position["pending"]) for position in state["positions"].values())
        assert drawn_pairs(state) == placed + pending + rejected_pairs(state)
    assert rejected_pairs(state) and len(state["positions"]) == 2


def test_training_batches_have_pairs_of_the_corpus_in_the_shape_of_the_specs(corpus, tokenizers, train_input):
    """A program that was lowered for the specs accepts the batches."""
    opened = Corpus.open(corpus)
    known = {pair for language in opened.languages for pair in opened.pairs("train", language)}
    known = {tuple(" ".join(text.split()) for text in pair) for pair in known}
    actual = []
    for batch, _ in take(train_input.batches(), 20):
        assert {
            side: {name: (values.shape, values.dtype.name) for name, values in arrays.items()}
            for side, arrays in batch.items()
        } == {
            side: {name: (spec.shape, spec.dtype) for name, spec in fields.items()}
            for side, fields in _CONFIG.specs().items()
        }
        actual += texts(batch, tokenizers)
    assert set(actual) <= known
    assert len(actual) > 100


@pytest.mark.slow
@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize(("source_length", "shards"), [(_CONFIG.source_length, 1), (0, 1), (_CONFIG.source_length, 4)])
def test_stream_resumes_exactly_after_any_batch(corpus, tokenizers, monkeypatch, source_length, shards, in_graph):
    """From the state as JSON, in a new TrainInput, with or without TensorFlow; a language model's stream, too."""
    config = dataclasses.replace(_CONFIG, source_length=source_length, shards=shards)
    uninterrupted = take(TrainInput(corpus, tokenizers, config).batches(), 12)
    assert any(position["pending"] for _, state in uninterrupted for position in state["positions"].values())
    for name in ("_CHUNK", "_MIN_CHUNK"):
        monkeypatch.setattr(corpus_stream, name, 8)  # each stream needs several
    start = TrainInput(corpus, tokenizers, config, in_graph).batches()
    assert_same(take(start, 12), uninterrupted)
    for index in range(0, 9, 2):
        state = json.loads(json.dumps(uninterrupted[index][1]))
        resumed = TrainInput(corpus, tokenizers, config, in_graph).batches(state)
        assert_same(take(resumed, 3), uninterrupted[index + 1 : index + 4])


def test_every_example_is_used_once_or_counted_as_rejected(train_input, tokenizers):
    """Pairs used = examples read - pending - rejected."""
    batches = take(train_input.batches(), 40)
    fed = sum(len(texts(batch, tokenizers)) for batch, _ in batches)
    position = batches[-1][1]["positions"]["0"]
    assert position["rejected"] > 0
    assert fed == position["next"] - len(position["pending"]) - position["rejected"]


@pytest.mark.slow
def test_shards_of_several_streams_are_those_of_one(corpus, tokenizers):
    """Three streams with one, two and one of four shards have together the batches and the state of one with all.

    Shard i reads examples i, i + 4, ... without those that are pending or rejected. Also when streams resume with
    another assignment of shards.
    """
    config = dataclasses.replace(_CONFIG, shards=4)
    train_input, stream = TrainInput(corpus, tokenizers, config), stream_texts(corpus, tokenizers, 400)
    uninterrupted = take(train_input.batches(), 8)
    parts = [take(train_input.batches(shards=shards), 5) for shards in (range(1), range(1, 3), range(3, 4))]
    assert [part[0][0]["source"]["ids"].shape for part in parts] == [(1, 64), (2, 64), (1, 64)]
    assert_same([combine(at) for at in zip(*parts)], uninterrupted[:5])
    for shard, part in ((0, parts[0]), (3, parts[2])):
        position = part[-1][1]["positions"][str(shard)]
        read = set(range(shard, position["next"], 4)) - set(position["pending"])
        assert set(position["pending"]) <= set(range(shard, position["next"], 4))
        fed = Counter(text for batch, _ in part for text in texts(batch, tokenizers))
        assert fed == Counter(stream[number] for number in read if stream[number] is not None)
    state = merge_states([part[-1][1] for part in parts])
    halves = [take(train_input.batches(state, shards), 3) for shards in (range(2), range(2, 4))]
    assert_same([combine(at) for at in zip(*halves)], uninterrupted[5:])


def combine(parts: Sequence[tuple[Batch, dict]]) -> tuple[Batch, dict]:
    """Returns the rows and the positions of all parts of a batch."""
    batches, states = zip(*parts)
    return {
        side: {name: np.concatenate([batch[side][name] for batch in batches]) for name in fields}
        for side, fields in batches[0].items()
    }, merge_states(states)


def test_state_of_another_stream_is_refused(corpus, tokenizers, train_input):
    """Another seed, temperature, balance, share of new names or number of shards, or another version of the program."""
    ((_, state),) = take(train_input.batches(), 1)
    for change in ({"seed": 1}, {"temperature": 1.0}, {"sentence_balance": 0.5}, {"name_substitution": 0.5}):
        other = TrainInput(corpus, tokenizers, InputConfig(**{**vars(_CONFIG), **change}))
        with pytest.raises(UserError, match="cannot be resumed: its stream is .*Give the same corpus"):
            other.batches(state)
    two = TrainInput(corpus, tokenizers, dataclasses.replace(_CONFIG, shards=2))
    with pytest.raises(
        UserError,
        match="its shards is 1, now it is 2. Give the same .* input.target_language and input.shards as before",
    ):
        two.batches(state)
    with pytest.raises(UserError, match="what reads the texts .*is not that of before. Give the same --tokenizers"):
        train_input.check({**state, "readers": ["another", "pair"]})
    with pytest.raises(UserError, match="cannot be resumed: another version .* saved it .version None, expected 2"):
        train_input.batches({"stream": train_input.stream_id, "shards": 1, "places": {}})


def test_new_names_are_the_same_when_a_stream_resumes(tokenizers, tmp_path):
    """They are written into new and into pending examples."""
    pairs = [(f"Satz {i} mit {name}", f"sentence {i} with {name}") for i in range(40) for name in ("Firefox", "Ubuntu")]
    corpus = write_corpus(tmp_path / "corpus", {"de": {"train": pairs}})
    plain, changed = (
        TrainInput(corpus, tokenizers, dataclasses.replace(_CONFIG, name_substitution=share)) for share in (0.0, 1.0)
    )
    uninterrupted = take(changed.batches(), 6)
    assert uninterrupted[1][1]["positions"]["0"]["pending"]
    assert_same(take(changed.batches(uninterrupted[1][1]), 4), uninterrupted[2:])
    names = {english.rsplit(" ", 1)[1] for batch, _ in uninterrupted for _, english in texts(batch, tokenizers)}
    before = {
        english.rsplit(" ", 1)[1] for batch, _ in take(plain.batches(), 6) for _, english in texts(batch, tokenizers)
    }
    assert len(before) == 2 < len(names)


def test_batch_size_may_change_when_a_stream_resumes(corpus, tokenizers, train_input):
    """The position does not depend on it."""
    ((_, state),) = take(train_input.batches(), 1)
    larger = TrainInput(corpus, tokenizers, dataclasses.replace(_CONFIG, batch_size=8))
    ((batch, _),) = take(larger.batches(state), 1)
    assert batch["source"]["ids"].shape == (8, 64)


def test_lengths_that_no_pair_fits_are_an_error(corpus, tokenizers, monkeypatch):
    """Not an endless loop; the error of the background thread reaches the caller."""
    monkeypatch.setattr(pipeline, "_MAX_CONSECUTIVE_REJECTIONS", 300)
    batches = TrainInput(corpus, tokenizers, InputConfig(source_length=2, target_length=2)).batches()
    with pytest.raises(UserError, match="none of 300 consecutive training pairs fits input.source_length=2"):
        next(batches)


@pytest.mark.slow
def test_stream_resumes_with_shorter_rows(corpus, tokenizers, train_input, monkeypatch):
    """Pending pairs that no longer fit are rejected and counted; they must not block the others."""
    monkeypatch.setattr(pipeline, "_MAX_CONSECUTIVE_REJECTIONS", 300)
    shorter = dataclasses.replace(_CONFIG, source_length=12, target_length=10)
    state = next(
        state for _, state in train_input.batches() if len(state["positions"]["0"]["pending"]) == _CONFIG.lookahead
    )
    part = take(TrainInput(corpus, tokenizers, shorter).batches(state), 20)
    last = part[-1][1]
    state, left = state["positions"]["0"], last["positions"]["0"]
    stream = stream_texts(corpus, tokenizers, left["next"])
    fed = Counter(text for batch, _ in part for text in texts(batch, tokenizers))
    resumed = {*state["pending"], *range(state["next"], left["next"])} - set(left["pending"])
    assert fed <= Counter(stream[number] for number in resumed)
    assert fed.total() + left["rejected"] - state["rejected"] == len(resumed)
    assert set(left["pending"]).isdisjoint(state["pending"])
    too_short = dataclasses.replace(_CONFIG, source_length=2, target_length=2)
    with pytest.raises(UserError, match="none of 300 consecutive training pairs fits"):
        next(TrainInput(corpus, tokenizers, too_short).batches(last))


def test_corrupt_file_is_an_error_before_training(corpus, tokenizers, tmp_path):
    """All training pairs are read and checked at the start."""
    copy = shutil.copytree(corpus, tmp_path / "copy")
    path = copy / "train" / "de.tsv"
    path.write_bytes(path.read_bytes().replace(b"\t", b" ", 1))
    with pytest.raises(UserError, match="de.tsv:1: 0 tabs"):
        TrainInput(copy, tokenizers, _CONFIG)


def test_evaluation_reads_every_held_out_pair_once_in_every_pass(corpus, tokenizers):
    """Pairs that are too long are counted."""
    opened = Corpus.open(corpus)
    expected = sorted(
        tuple(" ".join(text.split()) for text in pair)
        for language in ("de", "fr")
        for pair in opened.pairs("valid", language)
        if pair not in _TOO_LONG
    )
    held_out = EvalInput(corpus, tokenizers, _CONFIG)
    batches: list[Batch] = []
    for _ in range(2):
        batches = list(held_out.batches())
        assert all(batch["target"]["ids"].shape == (4, 48) for batch in batches)
        assert held_out.num_rejected == 1
        assert sorted(text for batch in batches for text in texts(batch, tokenizers)) == expected
    first = texts(batches[0], tokenizers)
    assert any("Haus" in source for source, _ in first) and any("maison" in source for source, _ in first)


def test_evaluation_alternates_languages_in_a_fixed_order(corpus, tokenizers):
    """So that the first few batches contain every language."""
    config = dataclasses.replace(_CONFIG, packing=False)
    first, second = (
        [text for batch in EvalInput(corpus, tokenizers, config).batches() for text in texts(batch, tokenizers)]
        for _ in range(2)
    )
    assert first == second
    opened = Corpus.open(corpus)
    german, french = (
        [
            tuple(" ".join(text.split()) for text in pair)
            for pair in opened.pairs("valid", language)
            if pair not in _TOO_LONG
        ]
        for language in ("de", "fr")
    )
    in_turn = [pair for pairs in itertools.zip_longest(german, french) for pair in pairs if pair]
    assert sorted(first) == sorted(in_turn)
    assert first[:6] == in_turn[:6] and first[-20:] == german[-20:]


@pytest.mark.parametrize(
    ("source_length", "target_length", "languages"),
    [(400, 400, ()), (14, 400, ("de",)), (400, 12, ("de",)), (14, 12, ("de",))],
)
def test_shuffled_evaluation_has_the_same_targets_with_other_sources(
    corpus, tokenizers, source_length, target_length, languages
):
    """Of the same language, so that a loss with them shows how much the model uses its source.

    Also where some pairs are longer than a row, and are left out. (Of French, only one fits then.)
    """
    config = dataclasses.replace(_CONFIG, packing=False, source_length=source_length, target_length=target_length)
    held_out = EvalInput(corpus, tokenizers, config, languages=languages)
    right, shuffled = (
        [pair for batch in held_out.batches(shuffled) for pair in texts(batch, tokenizers)]
        for shuffled in (False, True)
    )
    assert sorted(target for _, target in right) == sorted(target for _, target in shuffled)
    assert sorted(source for source, _ in right) == sorted(source for source, _ in shuffled)
    assert len(right) >= 4 and not set(right) & set(shuffled)
    assert (len(right) < Corpus.open(corpus).count("valid")) == bool(languages)


@pytest.mark.parametrize("packing", [False, True])
def test_first_batches_have_the_same_targets_with_other_sources(corpus, tokenizers, packing):
    """The source gain of a part of the split compares equal targets, also if other pairs share a row then."""
    config = dataclasses.replace(_CONFIG, batch_size=2, packing=packing)
    held_out = EvalInput(corpus, tokenizers, config)
    for first in (1, 3):
        right, shuffled = (
            [pair for batch in held_out.batches(shuffled, first) for pair in texts(batch, tokenizers)]
            for shuffled in (False, True)
        )
        assert sorted(target for _, target in right) == sorted(target for _, target in shuffled)
        assert right and not set(right) & set(shuffled)
    assert len(list(held_out.batches(first=3))) == 3 < len(list(held_out.batches()))


@pytest.mark.parametrize("languages", [["fr"], ["fr", "fr"]])
def test_evaluation_of_some_languages_and_pairs(corpus, tokenizers, languages):
    """As `eval --languages --max_pairs` chooses them; a language that is named twice counts once, as in BLEU."""
    config = dataclasses.replace(_CONFIG, packing=False, source_length=400, target_length=400)
    batches = EvalInput(corpus, tokenizers, config, "valid", languages, 2).batches()
    found = [target for batch in batches for _, target in texts(batch, tokenizers)]
    expected = [" ".join(target.split()) for _, target in Corpus.open(corpus).sample("valid", "fr", 2)]
    assert sorted(found) == sorted(expected)


def test_empty_split_gives_no_batches(corpus, tokenizers):
    """Not an error: small corpora have empty splits."""
    assert not list(EvalInput(corpus, tokenizers, _CONFIG, split="test").batches())


def test_source_batches_are_sorted_by_length_with_their_indices(tokenizers):
    """The indices restore the order of the sentences."""
    tokenizer = Tokenizers.load(tokenizers).source
    sentences = ["Haus " * 9, "", "Haus", "Satz 7 Haus", "図書館 🎉", "Haus Haus"]
    actual, lengths = {}, []
    for indices, batch in source_batches(sentences, tokenizer, 2, 64):
        assert {values.shape for values in batch.values()} == {(2, 64)}
        assert not any(values[len(indices) :].any() for values in batch.values())
        for row, index in enumerate(indices):
            length = np.count_nonzero(batch["segment_ids"][row])
            assert batch["ids"][row, length - 1] == tokenizer.eos_id
            assert batch["positions"][row, :length].tolist() == list(range(length))
            actual[index] = tokenizer.decode([batch["ids"][row]])[0]
            lengths.append(length)
    assert lengths == sorted(lengths)
    assert [actual[index] for index in range(6)] == [sentence.strip() for sentence in sentences]
    assert not list(source_batches([], tokenizer, 2, 32))


def test_sentence_that_does_not_fit_is_an_error_before_any_batch(tokenizers):
    """A row holds the tokens and their eos."""
    tokenizer = Tokenizers.load(tokenizers).source
    length = len(tokenizer.encode(["Haus " * 40])[0])
    with pytest.raises(ValueError, match=f"a sentence of {length} tokens in rows of 32"):
        source_batches(["Haus", "Haus " * 40], tokenizer, 2, 32)
    assert take(source_batches(["Haus " * 40], tokenizer, 1, length + 1), 1)


def test_stream_of_a_language_model_has_the_same_texts(corpus, tokenizers):
    """The target side of the same examples, in the same order."""
    config = dataclasses.replace(_CONFIG, source_length=0, packing=False)
    both = dataclasses.replace(_CONFIG, source_length=400, packing=False)
    alone, pairs = (take(TrainInput(corpus, tokenizers, c).batches(), 6) for c in (config, both))
    for (batch, _), (other, _) in zip(alone, pairs, strict=True):
        assert set(batch) == {"target"}
        for name, values in batch["target"].items():
            np.testing.assert_array_equal(values, other["target"][name])


def test_language_model_reads_every_text_once_in_every_epoch(tokenizers, tmp_path):
    """And in another order in the next one."""
    pairs = make_pairs("Haus", 40)
    corpus = write_corpus(tmp_path / "corpus", {"de": {"train": pairs}})
    config = dataclasses.replace(_CONFIG, batch_size=1, source_length=0, packing=False)  # a batch is one text
    tokenizer, stream = Tokenizers.load(tokenizers).target, TrainInput(corpus, tokenizers, config).batches()
    epochs = []
    for _ in range(2):
        batches = [batch["target"] for batch, _ in take(stream, len(pairs))]
        epochs.append(tokenizer.decode([target["labels"][target["segment_ids"] > 0] for target in batches]))
    assert [sorted(epoch) for epoch in epochs] == [sorted(target.strip() for _, target in pairs)] * 2
    assert epochs[0] != epochs[1]


def test_evaluation_of_a_language_model_reads_targets_alone(corpus, tokenizers):
    """A pair whose source is too long has a target that fits."""
    config = dataclasses.replace(_CONFIG, source_length=0)
    held_out = EvalInput(corpus, tokenizers, config)
    batches = list(held_out.batches())
    assert held_out.num_rejected == 0 and all(set(batch) == {"target"} for batch in batches)
    assert sum(int(batch["target"]["segment_ids"].max(axis=1).sum()) for batch in batches) == 30 + 7 + 1
