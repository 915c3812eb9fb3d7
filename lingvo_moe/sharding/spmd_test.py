"""Annotations change neither value nor gradient, put partitions where they say, and refuse what cannot be."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe.engines import pjrt
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

EIGHT = Layout.of(DeviceMesh((8,)))
LINE, GRID, CUBE = (np.arange(8).reshape(shape) for shape in ((8,), (4, 2), (2, 2, 2)))
VALUE = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
# GShard figure 10: the same 2x4 partitions on a mesh topology and on a tree topology.
FIGURE_10 = {"mesh": np.array([[0, 1, 5, 4], [2, 3, 7, 6]]), "tree": np.array([[0, 1, 2, 3], [4, 5, 6, 7]])}

# Sums of 16 products, in another order on several devices than on one.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING

ANNOTATIONS = {
    "replicate": spmd.replicate,
    "split rows": lambda t: spmd.split(t, 0, 8),
    "split columns": lambda t: spmd.split(t, 1, 8),
    "split from the end": lambda t: spmd.split(t, -1, 8),
    "split in one": lambda t: spmd.split(t, 0, 1),
    "split in fewer than devices": lambda t: spmd.split(t, 0, 2),
    "shard as a mesh": lambda t: spmd.shard(t, FIGURE_10["mesh"]),
    "shard as a tree": lambda t: spmd.shard(t, FIGURE_10["tree"]),
    "shard over fewer than devices": lambda t: spmd.shard(t, np.array([[5, 2], [0, 7]])),
    "mesh_split both": lambda t: spmd.mesh_split(t, GRID, [0, 1]),
    "mesh_split transposed": lambda t: spmd.mesh_split(t, GRID, [1, 0]),
    "mesh_split partial": lambda t: spmd.mesh_split(t, GRID, [-1, 1]),
    "mesh_split nowhere": lambda t: spmd.mesh_split(t, GRID, [-1, -1]),
    "mesh_split unspecified": lambda t: spmd.mesh_split(t, GRID, [0, -1], unspecified_dims=[1]),
    "mesh_split three axes": lambda t: spmd.mesh_split(t, CUBE, [2, 0]),
}


def product(annotate):
    """x^T relu(x), with both factors annotated."""

    def function(inputs: dict) -> dict:
        value = annotate(inputs["x"])
        return {"y": tf.matmul(value, annotate(tf.nn.relu(value)), transpose_a=True)}

    return harness.with_gradients(function)


def places(annotate) -> dict[int, tuple[slice, slice]]:
    """Which part of an annotated [8, 16] matrix each device holds when nothing else says where it is."""
    program = harness.lower_for(lambda inputs: {"y": annotate(inputs["x"] * 2.0)}, {"x": VALUE}, EIGHT)
    replicated = NamedSharding(Mesh(np.array(jax.devices("cpu")).reshape(2, 2, 2), ("a", "b", "c")), PartitionSpec())
    call = jax.jit(pjrt.exported(program).call, in_shardings=replicated)
    (value,) = jax.tree.leaves(call(VALUE))
    ranges = {
        part.device.id: [range(*cut.indices(size)) for cut, size in zip(part.index, value.shape)]
        for part in value.addressable_shards
    }
    return {device: (slice(r.start, r.stop), slice(c.start, c.stop)) for device, (r, c) in ranges.items()}


@pytest.fixture(scope="module")
def unannotated() -> dict:
    return harness.run(product(lambda t: t), {"x": VALUE})


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_value_and_gradient_are_unchanged(name, unannotated):
    found = harness.run(product(ANNOTATIONS[name]), {"x": VALUE}, EIGHT)
    for path, expected in unannotated.items():
        np.testing.assert_allclose(found[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


# Each would show zeros beyond the ends of its positive operand: as infinity, as maximum of negative numbers, in a mean.
OPERATORS = {
    "matmul": lambda t: tf.matmul(1.0 / t, t, transpose_a=True),
    "outer product": lambda t: tf.matmul(t, t, transpose_b=True),
    "sum": lambda t: tf.reduce_sum(1.0 / t, axis=0, keepdims=True),
    "mean": lambda t: tf.reduce_mean(tf.exp(t), axis=0, keepdims=True),
    "product": lambda t: tf.reduce_prod(t, axis=0, keepdims=True),
    "max": lambda t: tf.reduce_max(-t, axis=0, keepdims=True),
    "min": lambda t: tf.reduce_min(t, axis=0, keepdims=True),
    "softmax": lambda t: tf.nn.softmax(-9.0 * t, axis=0),
    "sort": lambda t: tf.sort(-t, axis=0),
    "running sum": lambda t: tf.cumsum(tf.exp(t), axis=0, reverse=True),
    "reverse": lambda t: tf.reverse(t, axis=[0]),
    "roll": lambda t: tf.roll(t, shift=2, axis=0),
    "concat": lambda t: tf.concat([t, tf.exp(t), t], axis=0),
    "pad": lambda t: tf.pad(t, [[2, 3], [0, 1]], constant_values=-1.0),
    "slice": lambda t: t[1:],
    "flatten": lambda t: tf.reshape(t, (-1, 1)),
}

# A matrix's shape, a number of devices, and an annotation whose partitions are not equal.
UNEVEN = {
    "7 rows over 2": ((7, 13), 2, lambda t: spmd.split(t, 0, 2)),
    "10 rows over 4": ((10, 3), 4, lambda t: spmd.split(t, 0, 4)),
    "13 columns over 8": ((7, 13), 8, lambda t: spmd.split(t, 1, 8)),
    "3 columns over 8, some hold nothing": ((10, 3), 8, lambda t: spmd.split(t, 1, 8)),
    "10 rows over 4 of 8, the others hold copies": ((10, 3), 8, lambda t: spmd.split(t, 0, 4)),
    "2x2 of 8 by an assignment": ((7, 13), 8, lambda t: spmd.shard(t, np.array([[5, 2], [0, 7]]))),
    "2x4 by an assignment": ((7, 13), 8, lambda t: spmd.shard(t, FIGURE_10["mesh"])),
}


def each_operator(annotate):
    """Every operator, its input and its output annotated, each with a value and a gradient of its own."""
    return harness.with_gradients(
        lambda inputs: {name: annotate(OPERATORS[name](annotate(tensor))) for name, tensor in inputs.items()}
    )


def operands(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """A positive matrix for every operator."""
    random = np.random.default_rng(3)
    return {name: random.uniform(0.5, 1.5, shape).astype(np.float32) for name in OPERATORS}


@functools.cache
def unpartitioned(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return harness.run(each_operator(lambda t: t), operands(shape))


def check_each_operator(shape: tuple[int, int], num_devices: int, annotate):
    executable = harness.compile_for(each_operator(annotate), operands(shape), Layout.of(DeviceMesh((num_devices,))))
    assert harness.collectives(executable), "nothing is partitioned"
    found = harness.arrays(executable(operands(shape)))
    for path, expected in unpartitioned(shape).items():
        np.testing.assert_allclose(found[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=path)


@pytest.mark.parametrize("shape, num_devices, annotate", UNEVEN.values(), ids=UNEVEN)
def test_uneven_partitions_are_padded_out_of_sight(shape, num_devices, annotate):
    """GShard section 3.3, uneven partitions: no operator's value or gradient shows the padding."""
    check_each_operator(shape, num_devices, annotate)


@given(
    shape=strategies.sampled_from([(7, 13), (10, 3)]),
    mesh_shape=strategies.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]),
    data=strategies.data(),
)
@settings(max_examples=5, phases=[Phase.generate])  # each example is compiled, so none is made smaller
def test_uneven_partitions_on_any_mesh(shape, mesh_shape, data):
    """Any order of the devices, any mesh axes; those that nothing maps to hold copies (GSPMD section 3.1)."""
    mesh = np.array(data.draw(strategies.permutations(range(8)))).reshape(mesh_shape)
    mapping = data.draw(strategies.permutations([-1, *range(mesh.ndim)]))[:2]
    check_each_operator(shape, 8, lambda t: spmd.mesh_split(t, mesh, mapping))


@pytest.mark.parametrize("annotate", ANNOTATIONS.values(), ids=ANNOTATIONS)
def test_eager_tensors_are_returned_as_they_are(annotate):
    tensor = tf.constant(VALUE)
    assert annotate(tensor) is tensor


@pytest.mark.parametrize(
    "annotate",
    [
        spmd.replicate,
        lambda t: spmd.split(t, 0, 1),
        lambda t: spmd.shard(t, np.array([[0]])),
        lambda t: spmd.mesh_split(t, np.array([0]), [0, -1]),
        lambda t: spmd.mesh_split(t, np.array([[0]]), [1, 0]),
        lambda t: spmd.mesh_split(t, np.array([[0]]), [0, -1], unspecified_dims=[1]),
    ],
)
def test_one_device_changes_nothing(annotate, unannotated):
    found = harness.run(product(annotate), {"x": VALUE})
    for path, expected in unannotated.items():
        np.testing.assert_array_equal(found[path], expected)


def test_split_puts_partition_i_on_device_i():
    assert places(lambda t: spmd.split(t, 1, 8)) == {i: (slice(0, 8), slice(2 * i, 2 * i + 2)) for i in range(8)}


def test_split_in_fewer_partitions_than_devices_leaves_copies_on_the_others():
    found = places(lambda t: spmd.split(t, 0, 2))
    assert found[0] == (slice(0, 4), slice(0, 16)) and found[1] == (slice(4, 8), slice(0, 16))
    assert sorted(rows.start for rows, _ in found.values()) == [0] * 4 + [4] * 4


@pytest.mark.parametrize("topology", FIGURE_10)
def test_shard_puts_partitions_where_the_assignment_says(topology):
    expected = {
        int(device): (slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4))
        for (i, j), device in np.ndenumerate(FIGURE_10[topology])
    }
    assert places(lambda t: spmd.shard(t, FIGURE_10[topology])) == expected


def test_mesh_split_cuts_each_dimension_along_its_axis():
    expected = {
        int(device): (slice(4 * y, 4 * y + 4), slice(4 * x, 4 * x + 4)) for (x, y), device in np.ndenumerate(GRID)
    }
    assert places(lambda t: spmd.mesh_split(t, GRID, [1, 0])) == expected


def test_mesh_axes_that_nothing_maps_to_hold_copies():
    """Partial tiling (GSPMD section 3.1)."""
    expected = {int(device): (slice(0, 8), slice(8 * y, 8 * y + 8)) for (_, y), device in np.ndenumerate(GRID)}
    assert places(lambda t: spmd.mesh_split(t, GRID, [-1, 1])) == expected


def test_replicate_holds_the_whole_tensor_everywhere():
    assert set(map(str, places(spmd.replicate).values())) == {str((slice(0, 8), slice(0, 16)))}


def test_unspecified_dimensions_are_left_to_propagation():
    """After a tensor that is cut along both dimensions, -1 makes the second whole; unspecified leaves it cut."""

    def again(unspecified_dims):
        return lambda t: spmd.mesh_split(spmd.mesh_split(t, GRID, [0, 1]) * 0.5, GRID, [0, -1], unspecified_dims)

    assert {columns.stop - columns.start for _, columns in places(again(())).values()} == {16}
    assert {columns.stop - columns.start for _, columns in places(again((1,))).values()} == {8}


MISUSES = {
    "split_dimension is 2, but the tensor has rank 2": lambda t: spmd.split(t, 2, 8),
    "split_dimension is -3": lambda t: spmd.split(t, -3, 8),
    "num_partitions is 0": lambda t: spmd.split(t, 0, 0),
    "split: 16 partitions asked for, but there are 8 devices": lambda t: spmd.split(t, 0, 16),
    "split: 3 partitions asked for, which do not divide the 8 devices": lambda t: spmd.split(t, 0, 3),
    r"device_assignment has shape \(8,\) \(rank 1\), but the tensor has shape \(8, 16\)": lambda t: spmd.shard(t, LINE),
    r"ids must be distinct and >= 0, got \[0, 0\]": lambda t: spmd.shard(t, np.array([[0, 0]])),
    r"ids must be distinct and >= 0, got \[-1, 0\]": lambda t: spmd.shard(t, np.array([[-1, 0]])),
    "ids must be integers, not float64": lambda t: spmd.shard(t, np.array([[0.0, 1.0]])),
    r"device id 8 does not exist; there are 8 devices \(0 to 7\)": lambda t: spmd.shard(t, np.array([[0, 8]])),
    "shard: 16 partitions asked for": lambda t: spmd.shard(t, np.arange(16).reshape(4, 4)),
    "has 1 entries for a tensor of rank 2": lambda t: spmd.mesh_split(t, GRID, [0]),
    "names mesh axis 2, but the device mesh": lambda t: spmd.mesh_split(t, GRID, [0, 2]),
    r"names mesh axis -2": lambda t: spmd.mesh_split(t, GRID, [0, -2]),
    "uses mesh axis 1 for two dimensions": lambda t: spmd.mesh_split(t, GRID, [1, 1]),
    "unspecified_dims is 5": lambda t: spmd.mesh_split(t, GRID, [0, -1], unspecified_dims=[5]),
    "mesh_split: 16 partitions asked for": lambda t: spmd.mesh_split(t, np.arange(16).reshape(8, 2), [0, 1]),
    r"the device mesh of shape \(2, 2\) has 4 of the 8 devices": lambda t: spmd.mesh_split(t, GRID[:2], [0, 1]),
    "which 4 devices do not divide": lambda t: spmd.auto_to_manual_spmd_partition(t[:6], GRID, [0, -1]),
    r"has shape \(8, 16\), but a shard of \(8, 16\) over \(4, 2\) by \[0, -1\] has shape \(2, 16\)": lambda t: (
        spmd.manual_to_auto_spmd_partition(t, GRID, [0, -1], (8, 16))
    ),
}


@pytest.mark.parametrize("message", MISUSES)
def test_misuse_is_an_error_that_names_it(message):
    with pytest.raises(ValueError, match=message):
        harness.lower_for(lambda inputs: {"y": MISUSES[message](inputs["x"])}, {"x": VALUE}, EIGHT)


def test_the_number_of_devices_holds_inside_its_block_only():
    """Without a program there is no number of devices to compare with."""
    with tf.Graph().as_default():
        tensor = tf.zeros((8, 16))
        with spmd.num_devices(2), pytest.raises(ValueError, match="there are 2 devices"):
            spmd.split(tensor, 0, 4)
        assert spmd.split(tensor, 0, 4).shape == (8, 16)


def test_a_tensor_of_unknown_rank_is_an_error():
    with tf.Graph().as_default():
        tensor = tf.compat.v1.placeholder(tf.float32, shape=None)
        with pytest.raises(ValueError, match="unknown rank"):
            spmd.split(tensor, 0, 2)


@pytest.mark.parametrize(
    "mesh, mapping",
    [(LINE, [0, -1]), (LINE, [-1, 0]), (GRID, [0, 1]), (GRID, [1, -1]), (GRID, [-1, -1]), (CUBE, [2, 0])],
)
def test_manual_mode_round_trip(mesh, mapping):
    """To one device's part and back: the value, and the gradient through it."""

    def function(inputs: dict) -> dict:
        own = spmd.auto_to_manual_spmd_partition(inputs["x"], mesh, mapping)
        return {"y": spmd.manual_to_auto_spmd_partition(own * own, mesh, mapping, VALUE.shape)}

    found = harness.run(harness.with_gradients(function), {"x": VALUE}, EIGHT)
    expected = harness.run(harness.with_gradients(lambda inputs: {"y": inputs["x"] * inputs["x"]}), {"x": VALUE})
    np.testing.assert_array_equal(found["values/y"], VALUE * VALUE)
    np.testing.assert_array_equal(found["gradients/x"], expected["gradients/x"])


def test_manual_mode_runs_operators_per_device_as_written():
    """A running sum starts anew on every device."""

    def function(inputs: dict) -> dict:
        own = spmd.auto_to_manual_spmd_partition(inputs["x"], GRID, [0, -1])
        assert own.shape == (2, 16)
        return {"y": spmd.manual_to_auto_spmd_partition(tf.cumsum(own), GRID, [0, -1], VALUE.shape)}

    expected = np.cumsum(VALUE.reshape(4, 2, 16), axis=1).reshape(8, 16)
    np.testing.assert_allclose(harness.run(function, {"x": VALUE}, EIGHT)["y"], expected, rtol=0, atol=TOLERANCE)


def test_manual_mode_gathers_on_each_device_without_communication():
    """Each device looks ids up in its own table, and gives its table's gradient back."""
    random = np.random.default_rng(2)
    table, ids = random.normal(size=(8, 6, 5)).astype(np.float32), random.integers(0, 6, (8, 3)).astype(np.int32)
    inputs = {"table": table, "ids": ids}

    def gather(inputs: dict) -> dict:
        table = spmd.auto_to_manual_spmd_partition(inputs["table"], LINE, [0, -1, -1])
        ids = spmd.auto_to_manual_spmd_partition(inputs["ids"], LINE, [0, -1])
        found = tf.gather(table, ids, axis=1, batch_dims=1)
        return {"y": spmd.manual_to_auto_spmd_partition(found, LINE, [0, -1, -1], (8, 3, 5))}

    logical_axes = {"table": "EVM", "ids": "ET", "values/y": "ETM", "gradients/table": "EVM"}
    executable = harness.compile_for(harness.with_gradients(gather), inputs, EIGHT, logical_axes)
    found = harness.arrays(executable(inputs))
    plain = harness.with_gradients(lambda i: {"y": tf.gather(i["table"], i["ids"], axis=1, batch_dims=1)})
    assert harness.collectives(executable) == {}
    np.testing.assert_array_equal(found["values/y"], np.take_along_axis(table, ids[..., None], axis=1))
    np.testing.assert_allclose(
        found["gradients/table"], harness.run(plain, inputs)["gradients/table"], rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize(
    "switch",
    [
        lambda t: spmd.auto_to_manual_spmd_partition(t, LINE, [0, -1]),
        lambda t: spmd.manual_to_auto_spmd_partition(t, LINE, [0, -1], (64, 16)),
    ],
)
def test_manual_mode_of_eager_tensors_is_an_error(switch):
    with pytest.raises(ValueError, match="inside a program"):
        switch(tf.constant(VALUE))
