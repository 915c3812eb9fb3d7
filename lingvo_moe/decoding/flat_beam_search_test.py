"""Flat beam search equals a naive search with a cache for each hypothesis, which it reorders (GShard appendix A.1)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.decoding.flat_beam_search import BeamSearch, Hypotheses, flat_beam_search
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf
from lingvo_moe.models.translation import Translation
from lingvo_moe.ops.attention import CACHED_AXES
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.program import Program, lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps, weight_specs

# Scores are sums of at most ten float32 log-probabilities; attention sums over a cache of another length, in another
# order.
_TOLERANCE = 2e-5
_BATCH, _SOURCE_LENGTH, _MAX_LENGTH = 8, 6, 9
_MODEL = Translation(
    source_vocabulary=16,
    target_vocabulary=12,
    num_layers=4,
    encoder_layer_pattern=("dense",),
    layer_pattern=("moe",),
    model_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_experts=4,
    num_groups=4,
)
_SEARCHES = [
    BeamSearch(beam_size=k, max_length=_MAX_LENGTH, length_alpha=alpha, force_first=force)
    for k, alpha, force in ((1, 0.6, False), (3, 0.0, True), (4, 1.0, False))
]
# Of each sentence, where they are forced: among them one that a search forbids elsewhere.
_FIRST_IDS = np.int32([11, 4, 11, 3, 5, 6, 11, 10])


def _source_specs(rows: int, search: BeamSearch | None = None) -> dict:
    specs = {field: Spec((rows, _SOURCE_LENGTH), "int32", "BS") for field in ("ids", "segment_ids", "positions")}
    return {**specs, "first_ids": Spec((rows,), "int32", "B")} if search and search.force_first else specs


@pytest.fixture(scope="module")
def source() -> dict:
    """Sentences of different lengths."""
    random = np.random.RandomState(1)
    segments = (np.arange(_SOURCE_LENGTH) < random.randint(2, _SOURCE_LENGTH + 1, (_BATCH, 1))).astype(np.int32)
    positions = np.tile(np.arange(_SOURCE_LENGTH, dtype=np.int32), (_BATCH, 1)) * segments
    return {
        "ids": random.randint(4, 16, segments.shape).astype(np.int32) * segments,
        "segment_ids": segments,
        "positions": positions,
    }


@pytest.fixture(scope="module")
def theta() -> dict:
    """Weights with a sharp softmax, so that hypotheses differ by more than rounding, and some of them end early."""
    steps = Steps(_MODEL, Adafactor(), Layout())
    state = Engine(1).compile(steps.init())({"seed": np.array([0, 8], np.int32)})["state"]
    values = tree.map_leaves(np.array, state["theta"])
    values["softmax"]["projection"] *= 2.5
    return values


def _naive_state(rows: int) -> dict:
    """Returns the specs of the caches and of the source's segments."""
    sizes = {"R": _MODEL.num_layers // 2, "B": rows, "N": _MODEL.num_heads, "D": _MODEL.head_dim}

    def spec(logical_axes: str, length: int) -> Spec:
        return Spec(tuple({**sizes, "L": length}[axis] for axis in logical_axes), "float32", logical_axes)

    layer = {
        f"{memory}{name}": spec(f"R{logical_axes}", _SOURCE_LENGTH if memory else _MAX_LENGTH)
        for logical_axes, name in zip(CACHED_AXES, ("keys", "values"))
        for memory in ("", "memory_")
    }
    segments = Spec((rows, _SOURCE_LENGTH), "int32", "BS")
    return {"caches": {"part_0": {"layer_0": layer}}, "source_segments": segments}


def _naive_start(rows: int, state: dict) -> Program:
    """Returns `(theta, source) -> state`."""

    def start(inputs: dict) -> dict:
        theta = _MODEL.prepare_decoding(inputs["theta"], Context())
        started = _MODEL.start_decoding(theta, inputs["source"], _MAX_LENGTH, Context())
        return {name: started[name] for name in state}

    specs = {"theta": weight_specs(_MODEL.weights()), "source": _source_specs(rows)}
    return lower(
        "start", start, specs, {path: each.logical_axes for path, each in tree.flatten(state).items()}, Layout()
    )


def _naive_step(rows: int, state: dict) -> Program:
    """Returns `(theta, state, ids, position) -> (logits, state)` for one token of each row."""

    def step(inputs: dict) -> dict:
        position = inputs["position"]
        mask = tf.tile((tf.range(_MAX_LENGTH) <= position)[None, None], [rows, 1, 1])
        theta = _MODEL.prepare_decoding(inputs["theta"], Context())
        paddings = tf.zeros((rows, 1), tf.bool)
        logits, new = _MODEL.decode_step(
            theta, inputs["state"], inputs["ids"], paddings, position, position, mask, Context()
        )
        return {"logits": logits[:, 0], "state": new}

    specs = {
        "theta": weight_specs(_MODEL.weights()),
        "state": state,
        "ids": Spec((rows, 1), "int32", "BT"),
        "position": Spec((), "int32", ""),
    }
    return lower("step", step, specs, {"logits": "BV"}, Layout())


class _Naive:
    """A search with a row and a cache for each hypothesis: a program for one token, and the rest in plain Python."""

    def __init__(self, theta: dict, source: dict, beam_size: int):
        self._theta, self._size = theta, beam_size
        rows = _BATCH * beam_size
        source = {field: np.repeat(value, beam_size, axis=0) for field, value in source.items()}
        state, engine = _naive_state(rows), Engine(1)
        started, self._step = engine.compile(_naive_start(rows, state)), engine.compile(_naive_step(rows, state))
        self._state = started({"theta": theta, "source": source})

    def search(self, alpha: float, force_first: bool) -> list[list[tuple[float, tuple[int, ...]]]]:
        """Returns (score, tokens) for each sentence: the finished ones, best first, then active ones up to K."""
        active = [[(0.0, ())] + [(-np.inf, ())] * (self._size - 1) for _ in range(_BATCH)]
        finished: list[list] = [[] for _ in range(_BATCH)]
        state = self._state
        for t in range(_MAX_LENGTH):
            ids = np.array([[tokens[-1] if tokens else 2] for beam in active for _, tokens in beam], np.int32)
            outputs = self._step({"theta": self._theta, "state": state, "ids": ids, "position": np.int32(t)})
            logits = np.asarray(outputs["logits"], np.float64)
            logits[:, [0, 2, 3]] = -np.inf
            log_probabilities = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            if t == 0 and force_first:
                log_probabilities[:] = -np.inf
                log_probabilities[np.arange(len(logits)), np.repeat(_FIRST_IDS, self._size)] = 0.0
            parents = []
            for b in range(_BATCH):
                active[b], own_parents = self._expand(
                    active[b],
                    log_probabilities[b * self._size :][: self._size],
                    finished[b],
                    ((5 + t + 1) / 6) ** alpha,
                )
                parents += [b * self._size + k for k in own_parents]
            state = tree.map_leaves(np.asarray, outputs["state"])
            for layer in state["caches"]["part_0"].values():  # the reordering that the flat beam avoids
                for name in ("keys", "values"):
                    layer[name] = layer[name][:, parents]
        penalty = ((5 + _MAX_LENGTH) / 6) ** alpha
        return [
            (sorted(done, key=lambda h: -h[0]) + [(s / penalty, tokens) for s, tokens in running])[: self._size]
            for done, running in zip(finished, active)
        ]

    def _expand(self, beam, log_probabilities, finished, penalty):
        candidates = [
            (score + log_probabilities[k, v], k, v)
            for k, (score, _) in enumerate(beam)
            for v in range(log_probabilities.shape[1])
        ]
        candidates.sort(key=lambda c: -c[0])
        running, parents = [], []
        for score, k, v in candidates[: 2 * self._size]:
            if not np.isfinite(score):
                continue
            tokens = (*beam[k][1], v)
            if v == 1:
                finished.append((score / penalty, tokens))
            elif len(running) < self._size:
                running.append((score, tokens))
                parents.append(k)
        missing = self._size - len(running)
        return running + [(-np.inf, (4,))] * missing, parents + [0] * missing


@functools.cache
def _compiled(search: BeamSearch, mesh: DeviceMesh, platform: str):
    steps = Steps(_MODEL, Adafactor(), Layout.of(mesh), platform)
    return Engine(mesh.size).compile(steps.decode(_source_specs(_BATCH, search), search))


def _flat(theta: dict, source: dict, search: BeamSearch, mesh: DeviceMesh, platform: str = "") -> dict:
    first_ids = {"first_ids": _FIRST_IDS} if search.force_first else {}
    outputs = _compiled(search, mesh, platform)({"theta": theta, "source": {**source, **first_ids}})
    return {name: np.asarray(value) for name, value in outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("search", _SEARCHES, ids=str)
def test_flat_equals_naive_hypothesis_by_hypothesis(theta, source, search):
    """Every hypothesis, its length and its score equal those of the search that reorders keys and values.

    This holds for the plain program and for the one that is optimised for a CPU.
    """
    expected = _Naive(theta, source, search.beam_size).search(search.length_alpha, search.force_first)
    for outputs in (_flat(theta, source, search, DeviceMesh(), platform) for platform in ("", "cpu")):
        for b in range(_BATCH):
            assert len(expected[b]) == search.beam_size
            for k, (score, tokens) in enumerate(expected[b]):
                length = outputs["lengths"][b, k]
                assert tuple(outputs["ids"][b, k, :length]) == tokens
                assert not search.force_first or tokens[0] == _FIRST_IDS[b]
                assert not outputs["ids"][b, k, length:].any()
                assert outputs["scores"][b, k] == pytest.approx(score, abs=_TOLERANCE)
    lengths = {len(tokens) for beam in expected for _, tokens in beam}
    assert len(lengths) > 2, "the test needs hypotheses that end early and some that do not"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [DeviceMesh(), DeviceMesh((4,))], ids=str)
def test_weights_prepared_once_find_the_same(theta, source, mesh):
    """An engine prepares weights when they are loaded, on one device: hypotheses and scores stay equal bit for bit.

    Weights that are loaded later replace them.
    """
    search, platform = _SEARCHES[-1], "cpu"
    steps = Steps(_MODEL, Adafactor(), Layout.of(mesh), platform)
    decoding = Engine(mesh.size).decoding(steps, _source_specs(_BATCH), search)
    for weights in (tree.map_leaves(np.zeros_like, theta), theta):
        decoding.load(weights)
        for name, expected in _flat(weights, source, search, mesh, platform).items():
            np.testing.assert_array_equal(np.asarray(decoding.decode(source)[name]), expected)


@pytest.mark.slow
def test_partitioned_search_equals_unpartitioned(theta, source):
    """On four devices, optimised for a CPU or not, and on a 2x2 mesh: the same hypotheses as on one device."""
    search = dataclasses.replace(_SEARCHES[-1], force_first=True)
    one = _flat(theta, source, search, DeviceMesh())
    for mesh, platform in (((4,), ""), ((4,), "cpu"), ((2, 2), "")):
        outputs = _flat(theta, source, search, DeviceMesh(mesh), platform)
        np.testing.assert_array_equal(outputs["ids"], one["ids"])
        np.testing.assert_array_equal(outputs["lengths"], one["lengths"])
        np.testing.assert_allclose(outputs["scores"], one["scores"], atol=_TOLERANCE)


@pytest.mark.slow
def test_translation_does_not_depend_on_the_batch(theta, source):
    """With expert capacity for all tokens, the other sentences of a batch change nothing."""
    search = _SEARCHES[-1]
    alone = {field: np.repeat(value[:1], _BATCH, axis=0) for field, value in source.items()}
    together, repeated = _flat(theta, source, search, DeviceMesh()), _flat(theta, alone, search, DeviceMesh())
    for b in range(_BATCH):
        np.testing.assert_array_equal(repeated["ids"][b], together["ids"][0])


@pytest.mark.slow
def test_a_few_sentences_are_searched_in_a_quarter_of_the_batch(theta, source):
    """From the first token on; the hypotheses of two of eight rows are those that they have among all eight."""
    search, few = _SEARCHES[-1], np.isin(np.arange(_BATCH), (3, 6))
    together = _flat(theta, source, search, DeviceMesh())
    found = _flat(theta, {field: value * few[:, None] for field, value in source.items()}, search, DeviceMesh())
    np.testing.assert_array_equal(found["ids"][few], together["ids"][few])
    np.testing.assert_allclose(found["scores"][few], together["scores"][few], atol=_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["", "cpu"])
def test_finite_capacity_is_for_live_hypotheses_alone(theta, source, platform):
    """Dead hypotheses and empty rows take no buffer positions; if they did, live ones behind them would be dropped.

    Rows: one sentence that comes last in its group, behind empty ones. An expert has capacity for its K hypotheses, not
    for those of the other rows.
    """
    search = _SEARCHES[-1]
    changes = {"num_groups": 1, "inference_capacity_factor": 0.0, "inference_min_capacity": _SOURCE_LENGTH}
    steps = Steps(dataclasses.replace(_MODEL, **changes), Adafactor(), Layout(), platform)
    finite = Engine(1).compile(steps.decode(_source_specs(_BATCH), search))
    rows = np.arange(_BATCH)[:, None]
    last = {field: np.where(rows == _BATCH - 1, value[:1], 0) for field, value in source.items()}
    found = {name: np.asarray(value) for name, value in finite({"theta": theta, "source": last}).items()}
    expected = _flat(theta, source, search, DeviceMesh(), platform)
    np.testing.assert_array_equal(found["ids"][-1], expected["ids"][0])
    np.testing.assert_allclose(found["scores"][-1], expected["scores"][0], atol=_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1])
def test_finite_capacity_suffices_for_the_sentences_that_it_is_made_for(theta, source, missing):
    """Two of a group's eight rows are live, and all of their hypotheses choose the same two experts.

    With a buffer position for each hypothesis of two sentences, each translation is that of the sentence alone. With
    one position less it is not: the last hypothesis of the second sentence is dropped.
    """
    search, live = _SEARCHES[-1], (2, 5)
    gates = {
        path: np.zeros_like(value) if path.endswith("/gate") else value for path, value in tree.flatten(theta).items()
    }
    same_experts = tree.unflatten(gates)  # of equal logits, the router takes the first two
    places = len(live) * search.beam_size - missing
    changes = {"num_groups": 1, "inference_capacity_factor": 0.0, "inference_min_capacity": places}
    steps = Steps(dataclasses.replace(_MODEL, **changes), Adafactor(), Layout())
    finite = Engine(1).compile(steps.decode(_source_specs(_BATCH), search))

    def only(*kept: int) -> dict:
        return {field: np.where(np.isin(np.arange(_BATCH), kept)[:, None], value, 0) for field, value in source.items()}

    found = {name: np.asarray(value) for name, value in finite({"theta": same_experts, "source": only(*live)}).items()}
    for row, is_dropped in zip(live, (False, bool(missing))):
        alone = _flat(same_experts, only(row), search, DeviceMesh())
        differs = not np.allclose(found["scores"][row], alone["scores"][row], rtol=0, atol=_TOLERANCE)
        assert differs == is_dropped and (is_dropped or np.array_equal(found["ids"][row], alone["ids"][row]))


@pytest.mark.parametrize("force_first, first_ids", [(True, None), (False, tf.constant([4]))])
def test_first_tokens_are_given_if_they_are_forced(force_first, first_ids):
    """A search without them would begin with any token, and count it as certain."""
    search = BeamSearch(force_first=force_first)
    with pytest.raises(ValueError, match=f"force_first is {force_first}, but first_ids are"):
        flat_beam_search(search, lambda *_: None, {}, tf.constant([True]), Context(), first_ids=first_ids)


def test_a_batch_of_empty_rows_is_not_searched():
    """The last batch of a file has empty rows; nobody waits for their hypotheses to end."""
    calls = []

    def step(state, ids, paddings, position, first, mask):
        del position, first, mask
        calls.append(paddings.numpy())
        return tf.zeros((*ids.shape, 8)), state

    search = BeamSearch(beam_size=2, max_length=5)
    flat_beam_search(search, step, {"none": tf.constant(0)}, tf.constant([False, False]), Context())
    assert not calls
    flat_beam_search(search, step, {"none": tf.constant(0)}, tf.constant([False, True]), Context())
    assert len(calls) > 1
    np.testing.assert_array_equal(calls[0], [[True, True], [False, True]])
    np.testing.assert_array_equal(calls[1], [[True, True], [False, False]])


def test_a_search_continues_in_a_quarter_of_its_batch():
    """Sentences leave the batch as their searches end, and their hypotheses stay those of the whole batch.

    The state of the model says which sentence a row has: the table of logits, and the step after which it can end.
    """
    random, search, sizes = np.random.RandomState(3), BeamSearch(beam_size=3, max_length=12), []
    table = tf.constant(random.normal(size=(8, 12, 9, 9)).astype(np.float32))
    ends = tf.constant([2, 3, 9, 2, 5, 4, 11, 1])

    def step(state, ids, paddings, position, first, mask):
        del paddings, first, mask
        sizes.append(ids.shape[0])
        logits = tf.gather(tf.gather(table, state["sentence"])[:, position], ids, batch_dims=1)
        end = tf.where(position < state["end"], -50.0, 50.0)[:, None, None]
        return tf.where(tf.range(9) == search.eos_id, end, logits), state

    def select_rows(state, rows):
        return tree.map_leaves(lambda leaf: tf.gather(leaf, rows), state)

    state, present = {"sentence": tf.range(8), "end": ends}, tf.constant([True] * 7 + [False])
    whole = flat_beam_search(search, step, state, present, Context())
    assert set(sizes) == {8}
    sizes.clear()
    narrow = flat_beam_search(search, step, state, present, Context(), select_rows)
    assert sizes == [8] * sizes.count(8) + [2] * sizes.count(2) and 5 <= sizes.count(8) < len(sizes)
    for found, expected in zip(dataclasses.astuple(narrow), dataclasses.astuple(whole), strict=True):
        np.testing.assert_array_equal(found[:7], expected[:7])


def _table_search(table: np.ndarray, size: int, alpha: float) -> list[tuple[float, tuple[int, ...]]]:
    """Returns (score, tokens) of a search in plain Python that continues to the last token, whatever it has found.

    Args:
      table: `[T, V, V]`, log-probabilities of the next token at each position after each token.
      size: K.
      alpha: exponent of the length penalty.
    """
    active, finished = [(0.0, (2,))], []
    for t in range(len(table)):
        candidates = sorted(
            (
                (score + table[t, tokens[-1], v], (*tokens, v))
                for score, tokens in active
                for v in range(table.shape[2])
            ),
            key=lambda candidate: -candidate[0],
        )[: 2 * size]
        candidates = [candidate for candidate in candidates if np.isfinite(candidate[0])]
        finished += [(score / ((6 + t) / 6) ** alpha, tokens[1:]) for score, tokens in candidates if tokens[-1] == 1]
        active = [candidate for candidate in candidates if candidate[1][-1] != 1][:size]
    return sorted(finished, key=lambda hypothesis: -hypothesis[0])[:size]


def _flat_table_search(logits: np.ndarray, search: BeamSearch) -> tuple[Hypotheses, int]:
    """Returns the hypotheses of one sentence, and the number of steps, where a table gives the logits."""
    positions = []

    def step(state, ids, paddings, position, first, mask):
        del paddings, first, mask
        positions.append(int(position))
        return tf.gather(tf.constant(logits)[position], ids), state

    found = flat_beam_search(search, step, {"none": tf.constant(0)}, tf.constant([True]), Context())
    return found, len(positions)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_search_does_not_end_before_its_last_hypothesis_is_found(alpha):
    """The n best of single sentences equal those of a search that never ends early: not only the best one is final.

    With other sentences in the batch the search continues for their sake, and an early end would not show.
    """
    random, ended_early = np.random.RandomState(0), 0
    search = BeamSearch(beam_size=3, max_length=6, length_alpha=alpha)
    for _ in range(30):
        logits = random.normal(size=(search.max_length, 7, 7)).astype(np.float32) * 2
        logits[:, :, [0, 2, 3]] = -np.inf
        logits[:, :, 1] += random.choice([0, 2])
        found, steps = _flat_table_search(logits, search)
        ended_early += steps < search.max_length
        table = logits - np.logaddexp.reduce(logits.astype(np.float64), axis=-1, keepdims=True)
        for k, (score, tokens) in enumerate(_table_search(table, search.beam_size, alpha)):
            assert tuple(found.ids[0, k, : int(found.lengths[0, k])].numpy()) == tokens
            assert float(found.scores[0, k]) == pytest.approx(score, abs=_TOLERANCE)
    assert ended_early > 3, "the test needs searches that end early"


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_confidence_does_not_depend_on_the_length_penalty(alpha):
    """Three tokens of probabilities 0.5, 0.25 and 0.125: their geometric mean."""
    search = BeamSearch(length_alpha=alpha)
    score = np.log(0.5 * 0.25 * 0.125) / ((5 + 3) / 6) ** alpha
    assert search.confidence(score, 3) == pytest.approx(0.25)
    assert search.confidence(0.0, 0) == 1 and search.confidence(-1e9, 2) == 0
    assert search.confidence(float("nan"), 2) == 0, "doubtful, whatever the threshold"


def test_the_first_token_if_it_is_given_is_not_in_doubt():
    """Its probability is 1, and the mean is that of the others."""
    search = BeamSearch(length_alpha=0.0, force_first=True)
    assert search.confidence(np.log(0.5 * 0.125), 3) == pytest.approx(0.25)


@pytest.mark.parametrize("change", [{"beam_size": 0}, {"max_length": 0}])
def test_sizes_below_one_are_errors(change):
    """The message names the field."""
    with pytest.raises(UserError, match=next(iter(change))):
        dataclasses.replace(_SEARCHES[0], **change)
