"""Annotations change neither value nor gradient, put partitions on the named devices, and report misuse."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe.engines import compilation
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

EIGHT = Layout.of(DeviceMesh((8,)))
LINE, GRID, CUBE = (np.arange(8).reshape(shape) for shape in ((8,), (4, 2), (2, 2, 2)))
VALUE = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
# GShard figure 10: the same 2x4 partitions on a mesh topology and on a tree topology.
FIGURE_10 = {"mesh": np.array([[0, 1, 5, 4], [2, 3, 7, 6]]), "tree": np.array([[0, 1, 2, 3], [4, 5, 6, 7]])}

# Sums of 16 products, whose order depends on the number of devices.
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


def shards(annotate) -> dict[int, tuple[slice, slice]]:
    """Returns the rows and columns of an annotated [8, 16] matrix that each device holds; nothing else shards it."""
    program = harness.lower_for(lambda inputs: {"y": annotate(inputs["x"] * 2.0)}, {"x": VALUE}, EIGHT)
    replicated = NamedSharding(Mesh(np.array(jax.devices("cpu")).reshape(2, 2, 2), ("a", "b", "c")), PartitionSpec())
    call = jax.jit(compilation.exported(program).call, in_shardings=replicated)
    (value,) = jax.tree.leaves(call(VALUE))
    ranges = {
        shard.device.id: [range(*part.indices(size)) for part, size in zip(shard.index, value.shape)]
        for shard in value.addressable_shards
    }
    return {device: (slice(r.start, r.stop), slice(c.start, c.stop)) for device, (r, c) in ranges.items()}


@pytest.fixture(scope="module")
def unannotated() -> dict:
    return harness.run(product(lambda t: t), {"x": VALUE})


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_value_and_gradient_are_unchanged(name, unannotated):
    """An annotation is about sharding alone."""
    outputs = harness.run(product(ANNOTATIONS[name]), {"x": VALUE}, EIGHT)
    for path, expected in unannotated.items():
        np.testing.assert_allclose(outputs[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


# Padding of the positive operand with zeros would be visible in each: as infinity, as the maximum of negative numbers,
# in a mean.
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

# The shape of a matrix, the number of devices, and an annotation whose partitions are unequal.
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
    """Applies every operator, with an annotated input and output, and returns their values and gradients."""
    return harness.with_gradients(
        lambda inputs: {name: annotate(OPERATORS[name](annotate(tensor))) for name, tensor in inputs.items()}
    )


def operands(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns a positive matrix for every operator."""
    random = np.random.default_rng(3)
    return {name: random.uniform(0.5, 1.5, shape).astype(np.float32) for name in OPERATORS}


@functools.cache
def unpartitioned(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return harness.run(each_operator(lambda t: t), operands(shape))


def check_each_operator(shape: tuple[int, int], num_devices: int, annotate):
    executable = harness.compile_for(each_operator(annotate), operands(shape), Layout.of(DeviceMesh((num_devices,))))
    assert harness.collectives(executable), "nothing is partitioned"
    outputs = harness.arrays(executable(operands(shape)))
    for path, expected in unpartitioned(shape).items():
        np.testing.assert_allclose(
            outputs[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=path
        )


@pytest.mark.slow
@pytest.mark.parametrize("shape, num_devices, annotate", UNEVEN.values(), ids=UNEVEN)
def test_padding_of_uneven_partitions_is_invisible(shape, num_devices, annotate):
    """GShard section 3.3, uneven partitions: no operator's value or gradient shows the padding."""
    check_each_operator(shape, num_devices, annotate)


@pytest.mark.slow
@given(
    shape=strategies.sampled_from([(7, 13), (10, 3)]),
    mesh_shape=strategies.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]),
    data=strategies.data(),
)
@settings(max_examples=5, phases=[Phase.generate])  # each example is compiled, so none is shrunk
def test_uneven_partitions_on_any_mesh(shape, mesh_shape, data):
    """Any order of the devices, any mesh axes; those that nothing maps to hold copies (GSPMD section 3.1)."""
    mesh = np.array(data.draw(strategies.permutations(range(8)))).reshape(mesh_shape)
    mapping = data.draw(strategies.permutations([-1, *range(mesh.ndim)]))[:2]
    check_each_operator(shape, 8, lambda t: spmd.mesh_split(t, mesh, mapping))


@pytest.mark.parametrize("annotate", ANNOTATIONS.values(), ids=ANNOTATIONS)
def test_eager_tensors_are_returned_unchanged(annotate):
    """Outside a program there is nothing to partition."""
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
    """Bit for bit."""
    outputs = harness.run(product(annotate), {"x": VALUE})
    for path, expected in unannotated.items():
        np.testing.assert_array_equal(outputs[path], expected)


def test_split_puts_partition_i_on_device_i():
    """GShard section 3.2."""
    assert shards(lambda t: spmd.split(t, 1, 8)) == {i: (slice(0, 8), slice(2 * i, 2 * i + 2)) for i in range(8)}


def test_split_in_fewer_partitions_than_devices_copies_to_the_others():
    """Every device holds a partition."""
    by_device = shards(lambda t: spmd.split(t, 0, 2))
    assert by_device[0] == (slice(0, 4), slice(0, 16)) and by_device[1] == (slice(4, 8), slice(0, 16))
    assert sorted(rows.start for rows, _ in by_device.values()) == [0] * 4 + [4] * 4


@pytest.mark.parametrize("topology", FIGURE_10)
def test_shard_follows_the_device_assignment(topology):
    """GShard appendix A.3, on both topologies of its figure 10."""
    expected = {
        int(device): (slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4))
        for (i, j), device in np.ndenumerate(FIGURE_10[topology])
    }
    assert shards(lambda t: spmd.shard(t, FIGURE_10[topology])) == expected


def test_mesh_split_shards_each_dimension_along_its_axis():
    """GSPMD section 3.1, with the mesh axes in another order than the dimensions."""
    expected = {
        int(device): (slice(4 * y, 4 * y + 4), slice(4 * x, 4 * x + 4)) for (x, y), device in np.ndenumerate(GRID)
    }
    assert shards(lambda t: spmd.mesh_split(t, GRID, [1, 0])) == expected


def test_tensor_is_replicated_along_unmapped_mesh_axes():
    """Partial tiling (GSPMD section 3.1)."""
    expected = {int(device): (slice(0, 8), slice(8 * y, 8 * y + 8)) for (_, y), device in np.ndenumerate(GRID)}
    assert shards(lambda t: spmd.mesh_split(t, GRID, [-1, 1])) == expected


def test_replicate_puts_the_tensor_on_every_device():
    """GShard section 3.2."""
    assert set(map(str, shards(spmd.replicate).values())) == {str((slice(0, 8), slice(0, 16)))}


def test_unspecified_dimensions_are_left_to_propagation():
    """Of a tensor that is sharded along both dimensions, -1 replicates the second; unspecified leaves it sharded."""

    def annotate_twice(unspecified_dims):
        return lambda t: spmd.mesh_split(spmd.mesh_split(t, GRID, [0, 1]) * 0.5, GRID, [0, -1], unspecified_dims)

    assert {columns.stop - columns.start for _, columns in shards(annotate_twice(())).values()} == {16}
    assert {columns.stop - columns.start for _, columns in shards(annotate_twice((1,))).values()} == {8}


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
    r"manual_dim is 1, but no mesh axis shards it": lambda t: spmd.auto_to_manual_spmd_partition(t, GRID, [0, -1], 1),
    "which 4 devices do not divide": lambda t: spmd.auto_to_manual_spmd_partition(t[:6], GRID, [0, -1]),
    r"has shape \(8, 16\), but a shard of \(8, 16\) over \(4, 2\) by \[0, -1\] has shape \(2, 16\)": lambda t: (
        spmd.manual_to_auto_spmd_partition(t, GRID, [0, -1], (8, 16))
    ),
}


@pytest.mark.parametrize("message", MISUSES)
def test_misuse_is_an_error_that_names_it(message):
    """The message names the function, the value and what was expected."""
    with pytest.raises(ValueError, match=message):
        harness.lower_for(lambda inputs: {"y": MISUSES[message](inputs["x"])}, {"x": VALUE}, EIGHT)


def test_num_devices_applies_inside_its_block_only():
    """Without a program there is no number of devices to compare with."""
    with tf.Graph().as_default():
        tensor = tf.zeros((8, 16))
        with spmd.annotating_for(2), pytest.raises(ValueError, match="there are 2 devices"):
            spmd.split(tensor, 0, 4)
        assert spmd.split(tensor, 0, 4).shape == (8, 16)


def test_tensor_of_unknown_rank_is_an_error():
    """Programs have static shapes."""
    with tf.Graph().as_default():
        tensor = tf.compat.v1.placeholder(tf.float32, shape=None)
        with pytest.raises(ValueError, match="unknown rank"):
            spmd.split(tensor, 0, 2)


@pytest.mark.parametrize(
    "mesh, mapping",
    [(LINE, [0, -1]), (LINE, [-1, 0]), (GRID, [0, 1]), (GRID, [1, -1]), (GRID, [-1, -1]), (CUBE, [2, 0])],
)
def test_manual_mode_round_trip(mesh, mapping):
    """The value and the gradient survive the switch to manual partitioning and back."""

    def function(inputs: dict) -> dict:
        shard = spmd.auto_to_manual_spmd_partition(inputs["x"], mesh, mapping)
        return {"y": spmd.manual_to_auto_spmd_partition(shard * shard, mesh, mapping, VALUE.shape)}

    outputs = harness.run(harness.with_gradients(function), {"x": VALUE}, EIGHT)
    expected = harness.run(harness.with_gradients(lambda inputs: {"y": inputs["x"] * inputs["x"]}), {"x": VALUE})
    np.testing.assert_array_equal(outputs["values/y"], VALUE * VALUE)
    np.testing.assert_array_equal(outputs["gradients/x"], expected["gradients/x"])


def test_manual_mode_runs_operators_per_device_as_written():
    """A cumulative sum starts from zero on every device."""

    def function(inputs: dict) -> dict:
        shard = spmd.auto_to_manual_spmd_partition(inputs["x"], GRID, [0, -1])
        assert shard.shape == (2, 16)
        return {"y": spmd.manual_to_auto_spmd_partition(tf.cumsum(shard), GRID, [0, -1], VALUE.shape)}

    expected = np.cumsum(VALUE.reshape(4, 2, 16), axis=1).reshape(8, 16)
    np.testing.assert_allclose(harness.run(function, {"x": VALUE}, EIGHT)["y"], expected, rtol=0, atol=TOLERANCE)


def test_manual_mode_gathers_on_each_device_without_communication():
    """Each device looks ids up in its own shard of the table and computes that shard's gradient."""
    random = np.random.default_rng(2)
    table, ids = random.normal(size=(8, 6, 5)).astype(np.float32), random.integers(0, 6, (8, 3)).astype(np.int32)
    inputs = {"table": table, "ids": ids}

    def gather(inputs: dict) -> dict:
        table = spmd.auto_to_manual_spmd_partition(inputs["table"], LINE, [0, -1, -1])
        ids = spmd.auto_to_manual_spmd_partition(inputs["ids"], LINE, [0, -1])
        rows = tf.gather(table, ids, axis=1, batch_dims=1)
        return {"y": spmd.manual_to_auto_spmd_partition(rows, LINE, [0, -1, -1], (8, 3, 5))}

    logical_axes = {"table": "EVM", "ids": "ET", "values/y": "ETM", "gradients/table": "EVM"}
    executable = harness.compile_for(harness.with_gradients(gather), inputs, EIGHT, logical_axes)
    outputs = harness.arrays(executable(inputs))
    plain = harness.with_gradients(lambda i: {"y": tf.gather(i["table"], i["ids"], axis=1, batch_dims=1)})
    assert harness.collectives(executable) == {}
    np.testing.assert_array_equal(outputs["values/y"], np.take_along_axis(table, ids[..., None], axis=1))
    np.testing.assert_allclose(
        outputs["gradients/table"], harness.run(plain, inputs)["gradients/table"], rtol=0, atol=TOLERANCE
    )


def test_one_mesh_axis_is_manual_while_the_others_stay_automatic():
    """GSPMD section 3.4: each stage reads a row of its own of its weights, inside of which rows are sharded along x, y.

    No stage's weights leave it; the product within a stage is summed by an AllReduce over y alone.
    """
    random = np.random.default_rng(3)
    weights = random.normal(size=(2, 3, 4, 8)).astype(np.float32)  # stages, rows, M, H
    inputs = {"weights": weights, "x": random.normal(size=(2, 6, 4)).astype(np.float32), "rows": np.int32([2, 0])}

    def function(inputs: dict) -> dict:
        def per_stage(tensor: tf.Tensor, mapping: list[int]) -> tf.Tensor:
            return spmd.auto_to_manual_spmd_partition(tensor, CUBE, [0, *mapping], manual_dim=0)[0]

        weights, row = per_stage(inputs["weights"], [-1, -1, 2]), per_stage(inputs["rows"], [])
        x, weight = per_stage(inputs["x"], [1, -1]), weights[row]
        assert weights.shape == (3, 4, 8) and x.shape == (6, 4)
        hidden = spmd.mesh_split(tf.matmul(x, weight), CUBE, [1, 2], manual_axes=[0])
        y = spmd.mesh_split(tf.matmul(hidden, weight, transpose_b=True), CUBE, [1, -1], manual_axes=[0])
        return {"y": spmd.manual_to_auto_spmd_partition(y[None], CUBE, [0, 1, -1], (2, 6, 4), manual_dim=0)}

    layout = Layout.of(DeviceMesh((2, 2, 2)))
    axes = {"weights": "PrmH", "x": "PBm", "rows": "P", "y": "PBm"}
    executable = harness.compile_for(function, inputs, layout, axes)

    def plain(inputs: dict) -> dict:
        chosen = tf.gather(inputs["weights"], inputs["rows"], axis=1, batch_dims=1)
        return {"y": tf.matmul(tf.matmul(inputs["x"], chosen), chosen, transpose_b=True)}

    found = harness.run(harness.with_gradients(function), inputs, layout)
    for path, expected in harness.run(harness.with_gradients(plain), inputs).items():
        np.testing.assert_allclose(found[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    assert harness.collectives(executable) == {"all-reduce": 1}
    assert re.search(r"all-reduce\(.*replica_groups=(\{\{0,1\},|\[4,2\]<=\[8\])", executable.hlo())


@pytest.mark.parametrize(
    "switch",
    [
        lambda t: spmd.auto_to_manual_spmd_partition(t, LINE, [0, -1]),
        lambda t: spmd.manual_to_auto_spmd_partition(t, LINE, [0, -1], (64, 16)),
    ],
)
def test_manual_mode_of_eager_tensors_is_an_error(switch):
    """Manual partitioning exists inside a program only."""
    with pytest.raises(ValueError, match="inside a program"):
        switch(tf.constant(VALUE))
