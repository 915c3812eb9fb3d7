"""Packing loses, repeats and mixes up nothing, keeps its promised layout, and leaves little padding."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from lingvo_moe.data.batching import Batch, Example, InputConfig, input_specs, pack, padding, shards_for
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
    """Every token of every example is a different number."""
    tokens = itertools.count(10)
    return [
        Example(number, *(np.fromiter(itertools.islice(tokens, length), np.int32) for length in pair))
        for number, pair in enumerate(lengths)
    ]


def segments(batch: Batch) -> list[tuple[dict[str, list[int]], dict[str, list[int]]]]:
    """The (source arrays, target arrays) of each segment, row by row; padding must be all zeros and at the end."""
    found = []
    for row in range(len(batch["source"]["ids"])):
        count = batch["source"]["segment_ids"][row].max()
        for arrays in batch.values():
            used = np.count_nonzero(arrays["segment_ids"][row])
            assert np.all(np.diff(arrays["segment_ids"][row, :used]) >= 0)
            assert not any(values[row, used:].any() for values in arrays.values())
            assert arrays["segment_ids"][row].max() == count
        for segment in range(1, count + 1):
            found.append(
                tuple(
                    {
                        name: values[row][arrays["segment_ids"][row] == segment].tolist()
                        for name, values in arrays.items()
                    }
                    for arrays in batch.values()
                )
            )
    return found


def assert_same(first: Batch, second: Batch):
    for side, arrays in first.items():
        for name, values in arrays.items():
            np.testing.assert_array_equal(values, second[side][name], err_msg=f"{side} {name}")


@settings(max_examples=150)
@given(_LENGTHS, _CONFIGS)
def test_every_pair_comes_once_and_whole(lengths, config):
    examples = make_examples(lengths)
    found = {}
    for batch, waiting in pack(iter(examples), config, config.batch_size):
        assert len(waiting) <= config.lookahead
        for source, target in segments(batch):
            assert source["ids"][-1] == target["labels"][-1] == EOS and target["ids"][0] == BOS
            assert source["positions"] == list(range(len(source["ids"])))
            assert target["positions"] == list(range(len(target["ids"])))
            assert target["ids"][1:] == target["labels"][:-1]
            key = (tuple(source["ids"][:-1]), tuple(target["labels"][:-1]))
            found[key] = found.get(key, 0) + 1
    expected = {}
    for example in examples:
        key = (tuple(example.source), tuple(example.target))
        expected[key] = expected.get(key, 0) + 1
    assert found == expected


@settings(max_examples=50)
@given(strategies.lists(strategies.integers(0, 7), max_size=60), strategies.booleans())
def test_a_language_models_batch_is_of_targets_alone(lengths, packing):
    """Every text comes once and whole; nothing of a source is read or asked for."""
    config = dataclasses.replace(_SMALL, source_length=0, packing=packing)
    assert set(input_specs(config)) == {"target"} and config.tokens == config.batch_size * config.target_length
    examples = make_examples([(0, length) for length in lengths])
    found = []
    for batch, _ in pack(iter(examples), config, config.batch_size):
        target, spec = batch["target"], input_specs(config)["target"]
        assert set(batch) == {"target"} and all(target[name].shape == spec[name].shape for name in spec)
        assert set(padding(batch)) == {"target"}
        for row in range(config.batch_size):
            for segment in range(1, target["segment_ids"][row].max() + 1):
                found.append(tuple(target["labels"][row][target["segment_ids"][row] == segment].tolist()[:-1]))
    assert sorted(found) == sorted(tuple(example.target.tolist()) for example in examples)


@settings(max_examples=50)
@given(_LENGTHS, _CONFIGS)
def test_a_stream_resumes_between_any_two_batches(lengths, config):
    """What is read and what waits is the whole state."""
    examples = make_examples(lengths)
    stream = iter(examples)
    whole = []
    for batch, waiting in pack(stream, config, config.batch_size):
        whole.append((batch, list(waiting), len(examples) - stream.__length_hint__()))
    for index, (_, waiting, read) in enumerate(whole):
        resumed = list(pack(iter(examples[read:]), config, config.batch_size, waiting))
        assert len(resumed) == len(whole) - index - 1
        for (batch, *_), (again, _) in zip(whole[index + 1 :], resumed, strict=True):
            assert_same(batch, again)


def test_first_fit_in_stream_order_with_lookahead():
    """A hand-made case: 5 + 5 tokens fill row 1 but for 2; 11 opens row 2; 7 opens row 3; 6 waits; 1 goes to row 1; 9
    waits and closes the batch; both open the next one.
    """
    examples = make_examples([(4, 1), (4, 1), (10, 1), (6, 1), (5, 1), (0, 1), (8, 1), (2, 1)])
    batches = list(pack(iter(examples), _SMALL, 3))
    assert [[example.number for example in waiting] for _, waiting in batches] == [[4, 6], []]
    rows = [[row[row > 0].tolist() for row in batch["source"]["segment_ids"]] for batch, _ in batches]
    assert rows[0] == [[1] * 5 + [2] * 5 + [3], [1] * 11, [1] * 7]
    assert rows[1] == [[1] * 6 + [2] * 3, [1] * 9, []]


def test_without_packing_a_row_is_one_pair_and_nothing_waits():
    config = dataclasses.replace(_SMALL, packing=False)
    batches = list(pack(iter(make_examples([(1, 1)] * 7)), config, 3))
    assert [len(segments(batch)) for batch, _ in batches] == [3, 3, 1]
    assert all(batch["source"]["segment_ids"].max() == 1 and not waiting for batch, waiting in batches)


@pytest.mark.parametrize("waiting", [[0], [0, 0]])
def test_a_pair_that_fits_no_row_is_an_error_not_an_endless_wait(waiting):
    """Both when it shares the waiting room and when such pairs fill it."""
    too_long = make_examples([(12, 1)])
    stream = iter(make_examples([(1, 1)] * 3))
    with pytest.raises(ValueError, match="example 0 fits no empty row"):
        list(pack(stream, _SMALL, 3, [too_long[index] for index in waiting]))


def test_an_empty_stream_makes_no_batch():
    assert not list(pack(iter([]), _SMALL, 3))


def test_little_padding_for_lengths_like_a_corpus():
    """Geometric lengths, loosely coupled as sentences are, and S : T in the proportion of the tokens: less than a tenth
    of either side is padding.
    """
    random = np.random.default_rng(0)
    config = InputConfig(batch_size=32, source_length=96, target_length=54)
    sources = np.minimum(random.geometric(1 / 16, 5000), 95)
    targets = np.minimum(np.ceil(sources / 2 * random.uniform(0.6, 1.4, 5000)).astype(int), 47)
    batches = [batch for batch, _ in pack(iter(make_examples(zip(sources, targets))), config, 32)][:-1]
    shares = {side: np.mean([padding(batch)[side] for batch in batches]) for side in ("source", "target")}
    assert len(batches) > 20
    assert shares["source"] < 0.1 and shares["target"] < 0.1


def test_padding_counts_positions_without_token():
    ((batch, _),) = pack(iter(make_examples([(5, 1)])), _SMALL, 3)
    assert padding(batch) == {"source": 1 - 6 / 36, "target": 1 - 2 / 24}


def test_specs_are_those_of_a_batch():
    ((batch, _),) = pack(iter(make_examples([(5, 1)])), _SMALL, _SMALL.batch_size)
    specs = input_specs(_SMALL)
    found = {
        side: {name: (values.shape, values.dtype.name) for name, values in arrays.items()}
        for side, arrays in batch.items()
    }
    assert found == {
        side: {name: (spec.shape, spec.dtype) for name, spec in fields.items()} for side, fields in specs.items()
    }
    assert {spec.logical_axes for spec in specs["source"].values()} == {"BS"}
    assert {spec.logical_axes for spec in specs["target"].values()} == {"BT"}


@pytest.mark.parametrize(
    "field, value",
    [("batch_size", 0), ("source_length", 1), ("target_length", 1), ("lookahead", 0), ("seed", -1), ("shards", 0)],
)
def test_a_config_that_makes_no_batch_is_refused(field, value):
    with pytest.raises(UserError, match=f"input.{field}={value}: expected at least"):
        InputConfig(**{field: value})


def test_a_batch_is_divided_into_whole_shards():
    """As many as are asked for, or the next fewer that divide it; never a part of a row, or of a shard."""
    assert {size: InputConfig(batch_size=size).num_shards for size in (1, 4, 12, 16, 22, 23)} == {
        1: 1,
        4: 4,
        12: 6,
        16: 8,
        22: 2,
        23: 1,
    }
    config = InputConfig(batch_size=12, shards=3)
    assert config.shard_rows == 4 and config.shards_of(range(4, 12)) == range(1, 3)
    # 256 hosts; 32 groups of 8 hosts that hold the same rows; fewer hosts than shards.
    assert [shards_for(DeviceMesh(shape)) for shape in ((2048,), (32, 64), (4, 2))] == [256, 32, 8]
    with pytest.raises(
        UserError, match=r"rows 6 to 11 of a batch, which are not whole parts of the 3 .* --set input.shards=2 "
    ):
        config.shards_of(range(6, 12))
