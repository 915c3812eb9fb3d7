"""Protects packing: every pair occurs once and complete, in the documented layout, with little padding."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from lingvo_moe.data.batching import Batch, Example, InputConfig, default_shards, pack, padding_fractions
from lingvo_moe.data.speech import SpeechInput
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh

BOS, EOS = 2, 1
_SMALL = InputConfig(batch_size=3, source_length=12, target_length=8, lookahead=2)
_LENGTHS = strategies.lists(strategies.tuples(strategies.integers(0, 11), strategies.integers(0, 7)), max_size=60)
_CONFIGS = strategies.builds(
    InputConfig,
    batch_size=strategies.integers(1, 4),
    source_length=strategies.just(12),
    target_length=strategies.just(8),
    packing=strategies.booleans(),
    lookahead=strategies.integers(1, 5),
)


def make_examples(lengths) -> list[Example]:
    """Makes examples of the given lengths; every token of every example is a different number."""
    tokens = itertools.count(10)
    return [
        Example(number, *(np.fromiter(itertools.islice(tokens, length), np.int32) for length in pair))
        for number, pair in enumerate(lengths)
    ]


def segments(batch: Batch) -> list[tuple[dict[str, list[int]], dict[str, list[int]]]]:
    """Returns (source arrays, target arrays) of each segment, row by row; checks that padding is zeros at the end."""
    actual = []
    for row in range(len(batch["source"]["ids"])):
        count = batch["source"]["segment_ids"][row].max()
        for arrays in batch.values():
            used = np.count_nonzero(arrays["segment_ids"][row])
            assert np.all(np.diff(arrays["segment_ids"][row, :used]) >= 0)
            assert not any(values[row, used:].any() for values in arrays.values())
            assert arrays["segment_ids"][row].max() == count
        for segment in range(1, count + 1):
            source, target = (
                {name: values[row][arrays["segment_ids"][row] == segment].tolist() for name, values in arrays.items()}
                for arrays in batch.values()
            )
            actual.append((source, target))
    return actual


def assert_same(first: Batch, second: Batch):
    for side, arrays in first.items():
        for name, values in arrays.items():
            np.testing.assert_array_equal(values, second[side][name], err_msg=f"{side} {name}")


@settings(max_examples=150)
@given(_LENGTHS, _CONFIGS)
def test_every_pair_occurs_once_and_complete(lengths, config):
    """Property: with eos, bos, labels and positions as documented."""
    examples = make_examples(lengths)
    actual = {}
    for batch, pending in pack(iter(examples), config, config.batch_size):
        assert len(pending) <= config.lookahead
        for source, target in segments(batch):
            assert source["ids"][-1] == target["labels"][-1] == EOS and target["ids"][0] == BOS
            assert source["positions"] == list(range(len(source["ids"])))
            assert target["positions"] == list(range(len(target["ids"])))
            assert target["ids"][1:] == target["labels"][:-1]
            key = (tuple(source["ids"][:-1]), tuple(target["labels"][:-1]))
            actual[key] = actual.get(key, 0) + 1
    expected = {}
    for example in examples:
        key = (tuple(example.source), tuple(example.target))
        expected[key] = expected.get(key, 0) + 1
    assert actual == expected


@settings(max_examples=50)
@given(strategies.lists(strategies.integers(0, 7), max_size=60), strategies.booleans())
def test_batch_of_a_language_model_has_targets_alone(lengths, packing):
    """Every text occurs once and complete; no source is read or specified."""
    config = dataclasses.replace(_SMALL, source_length=0, packing=packing)
    assert set(config.specs()) == {"target"} and config.tokens == config.batch_size * config.target_length
    examples = make_examples([(0, length) for length in lengths])
    actual = []
    for batch, _ in pack(iter(examples), config, config.batch_size):
        target, spec = batch["target"], config.specs()["target"]
        assert set(batch) == {"target"} and all(target[name].shape == spec[name].shape for name in spec)
        assert set(padding_fractions(batch)) == {"target"}
        for row in range(config.batch_size):
            labels, segment_ids = target["labels"][row], target["segment_ids"][row]
            actual += [
                tuple(labels[segment_ids == segment].tolist()[:-1]) for segment in range(1, segment_ids.max() + 1)
            ]
    assert sorted(actual) == sorted(tuple(example.target.tolist()) for example in examples)


@settings(max_examples=50)
@given(_LENGTHS, _CONFIGS)
def test_packing_resumes_between_any_two_batches(lengths, config):
    """The position in the stream and the pending pairs are the complete state."""
    examples = make_examples(lengths)
    read = 0

    def stream():
        nonlocal read
        for example in examples:
            read += 1
            yield example

    uninterrupted = []
    for batch, pending in pack(stream(), config, config.batch_size):
        uninterrupted.append((batch, list(pending), read))
    for index, (_, pending, position) in enumerate(uninterrupted):
        resumed = list(pack(iter(examples[position:]), config, config.batch_size, pending))
        assert len(resumed) == len(uninterrupted) - index - 1
        for (batch, *_), (other, _) in zip(uninterrupted[index + 1 :], resumed, strict=True):
            assert_same(batch, other)


def test_first_fit_in_stream_order_with_lookahead():
    """A manual example.

    5 + 5 tokens leave 2 free in row 1; 11 starts row 2; 7 starts row 3; 6 is pending; 1 goes into row 1; 9 is pending
    and closes the batch; both start the next one.
    """
    examples = make_examples([(4, 1), (4, 1), (10, 1), (6, 1), (5, 1), (0, 1), (8, 1), (2, 1)])
    batches = list(pack(iter(examples), _SMALL, 3))
    assert [[example.stream_index for example in pending] for _, pending in batches] == [[4, 6], []]
    rows = [[row[row > 0].tolist() for row in batch["source"]["segment_ids"]] for batch, _ in batches]
    assert rows[0] == [[1] * 5 + [2] * 5 + [3], [1] * 11, [1] * 7]
    assert rows[1] == [[1] * 6 + [2] * 3, [1] * 9, []]


def test_without_packing_a_row_is_one_pair_and_none_is_pending():
    """Every pair goes into the next empty row, also one without tokens."""
    config = dataclasses.replace(_SMALL, packing=False)
    batches = list(pack(iter(make_examples([(1, 1), (0, 0), *[(1, 1)] * 5])), config, 3))
    assert [len(segments(batch)) for batch, _ in batches] == [3, 3, 1]
    assert all(batch["source"]["segment_ids"].max() == 1 and not pending for batch, pending in batches)


@pytest.mark.parametrize("pending", [[0], [0, 0]])
def test_pair_that_fits_no_empty_row_is_an_error(pending):
    """Not an endless loop, neither with other pending pairs nor without."""
    too_long = make_examples([(12, 1)])
    stream = iter(make_examples([(1, 1)] * 3))
    with pytest.raises(ValueError, match="example 0 does not fit into an empty row"):
        list(pack(stream, _SMALL, 3, [too_long[index] for index in pending]))


def test_empty_stream_gives_no_batch():
    """Not even an empty one."""
    assert not list(pack(iter([]), _SMALL, 3))


def test_little_padding_for_realistic_lengths():
    """Less than a tenth of either side is padding.

    Lengths are geometric and correlated as those of translations are, and S : T is the proportion of the tokens.
    """
    random = np.random.default_rng(0)
    config = InputConfig(batch_size=32, source_length=96, target_length=54)
    sources = np.minimum(random.geometric(1 / 16, 5000), 95)
    targets = np.minimum(np.ceil(sources / 2 * random.uniform(0.6, 1.4, 5000)).astype(int), 47)
    batches = [batch for batch, _ in pack(iter(make_examples(zip(sources, targets))), config, 32)][:-1]
    fractions = {side: np.mean([padding_fractions(batch)[side] for batch in batches]) for side in ("source", "target")}
    assert len(batches) > 20
    assert fractions["source"] < 0.1 and fractions["target"] < 0.1


def test_padding_fractions_count_positions_without_a_token():
    """6 of 36 and 2 of 24 positions have one."""
    ((batch, _),) = pack(iter(make_examples([(5, 1)])), _SMALL, 3)
    assert padding_fractions(batch) == {"source": 1 - 6 / 36, "target": 1 - 2 / 24}


def test_input_specs_match_a_batch():
    """Shapes, dtypes and logical axes, from which programs are lowered."""
    ((batch, _),) = pack(iter(make_examples([(5, 1)])), _SMALL, _SMALL.batch_size)
    specs = _SMALL.specs()
    actual = {
        side: {name: (values.shape, values.dtype.name) for name, values in arrays.items()}
        for side, arrays in batch.items()
    }
    assert actual == {
        side: {name: (spec.shape, spec.dtype) for name, spec in fields.items()} for side, fields in specs.items()
    }
    assert {spec.logical_axes for spec in specs["source"].values()} == {"BS"}
    assert {spec.logical_axes for spec in specs["target"].values()} == {"BT"}


@pytest.mark.parametrize(
    "field, value",
    [("batch_size", 0), ("source_length", 1), ("target_length", 1), ("lookahead", 0), ("seed", -1), ("shards", 0)],
)
def test_invalid_config_is_an_error(field, value):
    """The error names the field, the value and the minimum."""
    with pytest.raises(UserError, match=f"input.{field} is {value}; expected at least"):
        InputConfig(**{field: value})


def test_batch_is_divided_into_equal_shards():
    """`shards`, or the next smaller number that divides the rows; a process never feeds a part of a shard."""
    assert {size: InputConfig(batch_size=size).num_shards for size in (1, 4, 12, 16, 22, 23)} == {
        1: 1,
        4: 4,
        12: 6,
        16: 8,
        22: 2,
        23: 1,
    }
    config = InputConfig(batch_size=12, shards=3)
    assert config.shard_rows == 4 and config.shards_of_rows(range(4, 12)) == range(1, 3)
    # 256 hosts; 32 groups of 8 hosts with the same rows; fewer hosts than shards.
    assert [default_shards(DeviceMesh(shape)) for shape in ((2048,), (32, 64), (4, 2))] == [256, 32, 8]
    with pytest.raises(
        UserError,
        match=r"rows 6 to 11 of a batch, which are not a whole number of its shards of 4 rows .* --set input.shards=2 ",
    ):
        config.shards_of_rows(range(6, 12))


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_shares_are_between_0_and_1(value):
    """With a sentence balance above 1, sentences of many languages would nearly disappear."""
    with pytest.raises(UserError, match=f"input.sentence_balance is {value}; expected at least 0 and at most 1"):
        InputConfig(sentence_balance=value)
    with pytest.raises(UserError, match=f"input.name_substitution is {value}; expected at least 0 and at most 1"):
        InputConfig(name_substitution=value)


@pytest.mark.parametrize("value", [0.0, -1.0, -math.inf, math.nan])
def test_the_temperature_is_above_0_and_may_be_infinite(value):
    """`inf` samples all languages equally."""
    assert InputConfig(temperature=math.inf).temperature == math.inf
    with pytest.raises(UserError, match="input.temperature is .*; expected a number above 0, or inf"):
        InputConfig(temperature=value)


def test_the_first_token_of_the_decoder_may_be_another():
    """That of eos, in imported models; the labels stay the same."""
    example = Example(0, np.int32([10, 11]), np.int32([12, 13]))
    batches = []
    for config in (_SMALL, dataclasses.replace(_SMALL, bos_id=EOS)):
        rows = config.empty_rows(1)
        assert rows.add(example)
        batches.append(rows.batch)
    assert [batch["target"]["ids"][0, :4].tolist() for batch in batches] == [[BOS, 12, 13, 0], [EOS, 12, 13, 0]]
    np.testing.assert_array_equal(*(batch["target"]["labels"] for batch in batches))


@pytest.mark.parametrize("side", ["source", "target"])
def test_only_texts_have_languages(side):
    with pytest.raises(UserError, match=f"input.{side}_language is 'fra_Latn', but recordings have none; leave it out"):
        SpeechInput(**{f"{side}_language": "fra_Latn"})


def test_only_pairs_of_texts_have_new_names():
    """A recording has no letters; `experiment_test` has language models."""
    with pytest.raises(UserError, match="input.name_substitution is for pairs of texts"):
        SpeechInput(name_substitution=0.5)
