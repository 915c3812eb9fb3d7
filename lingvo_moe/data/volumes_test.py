"""Volumes are a function of (seed, split, n); batches of them resume, and their labels say what is drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lingvo_moe.data import volumes
from lingvo_moe.data.pipeline import EvalInput, TrainInput, merge_states
from lingvo_moe.data.volumes import CLASSES, INTENSITIES, VolumeInput, make_volume
from lingvo_moe.errors import UserError

SMALL = VolumeInput(batch_size=2, size=(12, 8, 10), held_out=3, shards=2)


def equal(one, other) -> bool:
    return np.array_equal(one.source, other.source) and np.array_equal(one.target, other.target)


def test_a_volume_depends_on_seed_split_and_number_alone():
    volumes = {
        (seed, split, number): make_volume(VolumeInput(size=SMALL.size, seed=seed), split, number)
        for seed in (0, 1)
        for split in ("train", "valid", "test")
        for number in (0, 1, 2**32)
    }
    assert equal(volumes[1, "valid", 1], make_volume(VolumeInput(size=SMALL.size, seed=1, shards=1), "valid", 1))
    assert not any(equal(one, other) for one, other in itertools.combinations(volumes.values(), 2))


def ellipsoid(size, random) -> np.ndarray:
    """The definition, at every voxel of the volume."""
    semi_axes, centre = random.uniform(0.1, 0.25, 3) * min(size), random.uniform(0.2, 0.8, 3) * size
    axes, _ = np.linalg.qr(random.standard_normal((3, 3)))
    return np.square((np.moveaxis(np.indices(size), 0, -1) - centre) @ axes / semi_axes).sum(-1) <= 1


def tube(size, random) -> np.ndarray:
    """The same, as the distance of every voxel to the nearest point of the curve."""
    radius, (p, q, r) = max(random.uniform(0.04, 0.08) * min(size), 1.0), random.uniform(0.0, 1.0, (3, 3)) * size
    t = np.linspace(0, 1, 2 * max(size))[:, None]
    curve = (1 - t) ** 2 * p + 2 * t * (1 - t) * q + t**2 * r
    return np.square(np.moveaxis(np.indices(size), 0, -1)[..., None, :] - curve).sum(-1).min(-1) <= radius**2


@pytest.mark.parametrize("draw", [ellipsoid, tube])
def test_boxes_around_objects_leave_out_nothing(draw):
    """Also where an object reaches beyond the volume."""
    size = (24, 8, 15)
    for seed in range(40):
        box, inside = volumes._DRAW[draw.__name__](size, np.random.RandomState(seed))
        found = np.zeros(size, bool)
        found[box] = inside
        np.testing.assert_array_equal(found, draw(size, np.random.RandomState(seed)), err_msg=f"of seed {seed}")


def test_objects_have_the_intensities_of_their_kind_and_noise_is_added():
    silent = VolumeInput(size=(16, 16, 16), noise=0.0)
    for number in range(8):
        voxels, labels = make_volume(silent, "train", number)[1:]
        assert voxels.dtype == np.float32 and labels.dtype == np.int32 and voxels.shape == (*labels.shape, 1)
        assert np.all(voxels[labels == 0] == 0) and set(np.unique(labels)) <= set(range(len(CLASSES)))
        objects = voxels[labels > 0]
        assert np.all((objects >= INTENSITIES[0]) & (objects <= INTENSITIES[1])) and 0 < len(objects) < labels.size
        noise = make_volume(VolumeInput(size=(16, 16, 16)), "train", number).source - voxels
        # Of 4096 numbers the mean has a standard deviation of 1/64 of theirs, and their own of 1/90.
        assert abs(noise.mean()) < 5 * 0.4 / 64 and abs(noise.std() / 0.4 - 1) < 5 / 90


def test_classes_are_learnt_from_shapes():
    """Both kinds occur, ellipsoids with more voxels, which the baseline of `segmenter` takes for granted."""
    labels = np.concatenate([make_volume(VolumeInput(), "train", n).target.ravel() for n in range(6)])
    background, ellipsoids, tubes = np.bincount(labels, minlength=3) / labels.size
    assert background > 0.7 and ellipsoids > tubes > 0.002


def test_training_resumes_with_the_next_volume_and_shards_share_it():
    """Example n is in shard n modulo the shards; each shard by itself gives its rows."""
    whole = TrainInput("", "", SMALL)
    batches = list(itertools.islice(whole.batches(), 3))
    expected = [make_volume(SMALL, "train", n) for n in range(6)]
    for step, (batch, _) in enumerate(batches):
        for row in range(2):
            np.testing.assert_array_equal(batch["source"]["voxels"][row], expected[2 * step + row].source)
            np.testing.assert_array_equal(batch["target"]["labels"][row], expected[2 * step + row].target)
        assert batch["target"]["segment_ids"].tolist() == [1, 1]
    parts = [next(TrainInput("", "", SMALL).batches(shards=range(i, i + 1))) for i in range(2)]
    state = merge_states([state for _, state in parts])
    assert state == batches[0][1]
    resumed, _ = next(whole.batches(state))
    np.testing.assert_array_equal(resumed["source"]["voxels"], batches[1][0]["source"]["voxels"])


def test_another_stream_is_refused():
    _, state = next(TrainInput("", "", SMALL).batches())
    with pytest.raises(UserError, match="position in the training data cannot be resumed: its stream"):
        TrainInput("", "", VolumeInput(batch_size=2, size=SMALL.size, noise=0.5, shards=2)).batches(state)


def test_held_out_batches_end_with_empty_rows():
    batches = list(EvalInput("", "", SMALL, "valid").batches())
    assert [batch["target"]["segment_ids"].tolist() for batch in batches] == [[1, 1], [1, 0]]
    np.testing.assert_array_equal(batches[1]["source"]["voxels"][0], make_volume(SMALL, "valid", 2).source)
    assert len(list(EvalInput("", "", SMALL, "test", max_pairs=2).batches())) == 1


def test_held_out_volumes_are_not_shuffled():
    """A caller that asks for other sources would otherwise get the same ones, and a gain of zero."""
    with pytest.raises(ValueError, match="volumes are not shuffled"):
        next(EvalInput("", "", SMALL, "valid").batches(shuffled=True))


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"size": (32, 32)}, r"input.size is \(32, 32\); give three numbers from 8"),
        ({"size": (4, 32, 32)}, "give three numbers from 8"),
        ({"batch_size": 0}, "input.batch_size is 0; expected at least 1"),
        ({"seed": 2**32}, "input.seed is 4294967296; expected at least 0 and at most 4,294,967,295"),
        ({"noise": float("nan")}, "input.noise is nan; expected at least 0"),
        ({"noise": -1.0}, "input.noise is -1.0"),
        ({"held_out": 0}, "input.held_out is 0"),
    ],
)
def test_settings_that_make_no_batch(fields, pattern):
    with pytest.raises(UserError, match=pattern):
        VolumeInput(**fields)
