"""The programs for a Cloud TPU are right: the same step, one shard of the state per core, many steps in one loop.

There is no TPU here. Graphs are built for the description of a real slice of 8 cores, and read by these tests and by
TensorFlow's own TPU bridge; the functions in them are run by other means.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import re

import numpy as np
import pytest

from lingvo_moe import experiment, program_cache, tree
from lingvo_moe import steps as step_functions
from lingvo_moe.engines import topology, tpu_strategy, tpu_strategy_graph
from lingvo_moe.engines.tpu_strategy import Engine, Training, train_loop
from lingvo_moe.engines.tpu_strategy_graph import TPUGraph
from lingvo_moe.engines.tpu_strategy_variables import ShardedVariable, TensorSharding
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.layers.embedding import Embedding, Softmax, cross_entropy
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.lazy import tf
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.program import Program, lower
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps
from lingvo_moe.testing import harness, local_tpu
from lingvo_moe.testing.local_tpu import CHIPS
from lingvo_moe.utils import free_ports

pytestmark = pytest.mark.slow

MESHES = ["8", "4x2"]
TRANSLATION = (
    "model.num_layers=2",
    "model.encoder_layer_pattern=moe",
    "model.layer_pattern=dense",
    "model.model_dim=16",
    "model.hidden_dim=32",
    "model.num_heads=2",
    "model.head_dim=8",
    "model.num_experts=8",
    "model.num_groups=8",
    "model.source_vocabulary=64",
    "model.target_vocabulary=64",
    "input.batch_size=8",
    "input.source_length=16",
    "input.target_length=16",
    "decoding_batch=8",
)
# Losses of a few nats after sums of float32 products in another order, by another build of XLA, and Adafactor steps
# that divide gradients, with their rounding, by their own root mean square.
TRAINED_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneLayer(Layer):
    """A lookup, experts and a projection, with random routing."""

    @property
    def _layers(self) -> dict:
        return {
            "embedding": Embedding(vocabulary=16, model_dim=8),
            "experts": MixtureOfExperts(model_dim=8, hidden_dim=16, num_experts=8, num_groups=8),
            "softmax": Softmax(vocabulary=16, model_dim=8),
        }

    def weights(self) -> dict:
        return {name: layer.weights() for name, layer in self._layers.items()}

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        shape = batch["ids"].shape
        inputs = self._layers["embedding"](theta["embedding"], batch["ids"], tf.zeros_like(batch["ids"]), context)
        outputs, metrics = self._layers["experts"](theta["experts"], inputs, tf.zeros(shape, tf.bool), context)
        nll, _ = cross_entropy(self._layers["softmax"](theta["softmax"], inputs + outputs, context), batch["labels"])
        loss = tf.reduce_mean(nll)
        return loss + 0.01 * metrics["aux_loss"], {
            "cross_entropy": loss,
            "tokens": tf.constant(float(shape.num_elements())),
        }


ONE_LAYER_BATCH = {name: Spec((8, 4), "int32", "BT") for name in ("ids", "labels")}


def one_layer(mesh: str) -> Steps:
    return Steps(OneLayer(), Adafactor(), Layout.of(DeviceMesh.parse(mesh)))


def one_layer_batch(step: int) -> dict:
    ids = np.random.default_rng(step).integers(0, 16, (8, 4)).astype(np.int32)
    return {"ids": ids, "labels": (ids + 1) % 16}


@functools.cache
def model(mesh: str) -> tuple[Steps, dict]:
    """Returns a small translation model with experts for one mesh axis, one layer for two."""
    if mesh != "8":
        return one_layer(mesh), ONE_LAYER_BATCH
    config = experiment.get("m4.Quickstart", TRANSLATION, DeviceMesh.parse(mesh))
    return config.steps, config.batch_specs()


@functools.cache
def graph(mesh: str) -> TPUGraph:
    """Returns the graph with all programs of `model`."""
    return tpu_strategy_graph.build(CHIPS, *model(mesh))


@functools.cache
def one_layer_module(mesh: str) -> str:
    """Returns the TPU bridge's MLIR for training one layer: one call on all cores, fed from each core's variables."""
    from tensorflow.python import pywrap_mlir  # the bridge has no public name

    definition = tpu_strategy_graph.build(CHIPS, one_layer(mesh), ONE_LAYER_BATCH, ("train",)).definition
    module = pywrap_mlir.import_graphdef(definition, "", False)
    return pywrap_mlir.experimental_run_pass_pipeline(module, "tf-replicated-clustering-bridge-v2", False)


@functools.cache
def on_this_machine(mesh: str) -> Training:
    """Returns one layer's training, with the variables of all cores on the CPU."""
    return local_tpu.engine().training(one_layer(mesh), ONE_LAYER_BATCH)


def numbered(specs: dict) -> dict:
    """Returns a tree of arrays without equal elements."""
    return tree.map_leaves(lambda spec: np.arange(np.prod(spec.shape), dtype=spec.dtype).reshape(spec.shape), specs)


@pytest.mark.parametrize("mesh", MESHES)
def test_each_program_is_one_replica_over_all_cores_for_the_partitioner(mesh):
    metadata = graph(mesh).metadata()
    assert len(metadata) == len(tpu_strategy_graph.PROGRAMS)
    for node in metadata:
        assert node.attr["num_replicas"].i == 1 and node.attr["num_cores_per_replica"].i == 8
        assert node.attr["use_spmd_for_xla_partitioning"].b
        cores = np.reshape(node.attr["device_assignment"].list.i, (8, 4)).tolist()
        assert list(map(tuple, cores)) == [(x, y, 0, core) for y in range(2) for x in range(2) for core in range(2)]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_variable_is_sharded_as_the_layout_says(mesh):
    """Every core has a variable of its shard; XLA has the same sharding, also where it is read and assigned."""
    steps, _ = model(mesh)
    variables, specs = graph(mesh).variables(), tree.flatten(steps.state_specs())
    assert variables.keys() == specs.keys() and graph(mesh).handles() == 8 * len(specs)
    for path, spec in specs.items():
        found, mapping = variables[path], steps.layout.dims_mapping(spec.logical_axes)
        shape = spmd.shard_shape(spec.shape, steps.layout.mesh.devices, mapping)
        assert found.shard_shape[-len(shape) :] == shape if shape else found.shard_shape == (), path
        assert np.prod(found.shard_shape) == np.prod(shape), path
        assert np.prod(found.partition_dims) == (8 if max((-1, *mapping)) >= 0 else 1), path
        assert sorted(found.devices) == [f"/job:worker/task:0/device:TPU:{core}" for core in range(8)]
        assert found.annotated, path


def test_experts_are_sharded_and_gates_replicated():
    """As in GShard's Algorithm 2 on one mesh axis, and in GSPMD on two."""
    one, two = graph("8").variables(), graph("4x2").variables()
    expert, gate = "theta/encoder/layer_0/feed_forward/wi", "theta/encoder/layer_0/feed_forward/gate"
    assert one[expert].partition_dims == (1, 8, 1, 1) and one[expert].shard_shape == (1, 1, 16, 32)
    assert two["theta/experts/wi"].partition_dims == (4, 1, 2) and two["theta/experts/wi"].shard_shape == (2, 8, 8)
    assert one[gate].partition_dims == two["theta/experts/gate"].partition_dims == ()


@pytest.mark.parametrize("mesh", MESHES)
def test_the_steps_are_one_loop_on_the_device(mesh):
    """One loop runs the step and carries the state, which is read and written once, outside of it."""
    (loop,) = graph(mesh).loops()
    steps, batch_specs = model(mesh)
    assert len(loop.input) >= len(tree.flatten(steps.state_specs())) + len(tree.flatten(batch_specs))
    assert "InfeedDequeue" not in graph(mesh).operators() and "_XlaRecvAtHost" not in graph(mesh).operators()


@pytest.mark.parametrize("mesh", MESHES)
def test_the_step_equals_the_lowered_program_node_for_node(mesh, monkeypatch):
    """What `Steps.train` lowers for PJRT and libtpu is traced once more, and equals the function in the TPU's graph."""
    steps, batch_specs = model(mesh)
    lowered = {}

    def keep(name: str, function, inputs: dict, *rest, **others) -> Program:
        lowered.update(function=function, specs=tree.flatten(inputs))
        return Program(name, steps.layout.mesh, (), (), (), b"")

    monkeypatch.setattr(program_cache._settings, "directory", None)  # or another test would find what `keep` returns
    monkeypatch.setattr(step_functions, "lower", keep)
    steps.train(batch_specs)

    def train_step(*tensors):
        return list(tree.flatten(lowered["function"](tree.unflatten(dict(zip(lowered["specs"], tensors))))).values())

    with spmd.annotating_for(8), tf.Graph().as_default() as traced:
        function = tf.function(train_step, jit_compile=True, autograph=False).get_concrete_function(
            *(tf.TensorSpec(spec.shape, spec.dtype) for spec in lowered["specs"].values())
        )
        function.add_to_graph(traced)
    assert graph(mesh).step() == tpu_strategy_graph.digest(traced.as_graph_def().library, function.name.decode())


def test_another_step_has_another_digest():
    other = dataclasses.replace(one_layer("4x2"), optimizer=Adafactor(clipping_threshold=2.0))
    assert tpu_strategy_graph.build(CHIPS, other, ONE_LAYER_BATCH, ("train",)).step() != graph("4x2").step()


@pytest.mark.parametrize("mesh", MESHES)
def test_the_bridge_reads_and_writes_each_shard_on_its_own_core(mesh):
    """TensorFlow's TPU bridge reads and assigns each core's variable by itself, and none of another shape."""
    module = one_layer_module(mesh)
    specs = tree.flatten(one_layer(mesh).state_specs())
    layout = one_layer(mesh).layout
    parts = collections.Counter(
        "x".join(map(str, (*TensorSharding(spec, layout).shard_shape, {"float32": "f32", "int32": "i32"}[spec.dtype])))
        for spec in specs.values()
    )
    read = collections.Counter(re.findall(r'"tf\.ReadVariableOp".*-> tensor<(.*)>\n', module))
    assigned = collections.Counter(re.findall(r'"tf\.AssignVariableOp".*, tensor<([^>]*)>\) -> \(\)', module))
    assert read == assigned == {shape: 8 * count for shape, count in parts.items()}
    assert module.count('"tf_device.cluster_func"') == 1


def test_no_core_receives_the_shard_of_another():
    """With copies the bridge would take results from the wrong cores, so a sharded tensor has one shard per core."""
    for found in graph("4x2").variables().values():
        assert np.prod(found.partition_dims) in (1, 8)
    copied = graph("4x2").variables()["optimizer_state/embedding/table/row"]
    assert (copied.partition_dims, copied.shard_shape) == ((4, 2), (1, 8)), "four copies of two halves"


@pytest.mark.parametrize(
    "mesh, logical_axes",
    [
        ("8", "EMH"),
        ("8", "BM"),
        ("4x2", "MH"),
        ("4x2", "BT"),
        ("4x2", "H"),
        ("2x4", "GM"),
        ("8", "m"),
        ("4x2", "me"),
        ("8x1", "BM"),
        ("2x2x2", "RM"),
        ("2x2x2", "H"),
    ],
)
def test_shards_cover_a_tensor(mesh, logical_axes):
    """Cores are those that XLA names for each shard; joined at their indices, the shards are the tensor."""
    layout = Layout.of(DeviceMesh.parse(mesh))
    sharding = TensorSharding(Spec((8,) * len(logical_axes), "float32", logical_axes), layout)
    whole = np.arange(8 ** len(logical_axes)).reshape(sharding.spec.shape)
    shown = layout.mesh.devices if sharding.replicated else np.array(sharding.cores).reshape(sharding.partition_dims)
    expected = np.asarray(
        spmd.mesh_sharding(layout.mesh.devices, sharding._stored_mapping).proto.tile_assignment_devices
    )
    np.testing.assert_array_equal(shown.ravel(), expected if expected.size else np.arange(8))
    found = np.full_like(whole, -1)
    for where in sharding.slices():
        found[where] = whole[where]
        assert whole[where].size == np.prod(sharding.shard_shape)
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize(
    "mesh, logical_axes",
    [("4x2", "BM"), ("4x2", "H"), ("4x2", "MH"), ("4x2", "m"), ("2x2x2", "H"), ("2x2x2", "RM"), ("2x2x2", "RBM")],
)
def test_storing_copies_changes_no_value_and_moves_no_data(mesh, logical_axes):
    """Along one mesh axis, along two, along none."""
    layout = Layout.of(DeviceMesh.parse(mesh))
    value = np.random.default_rng(0).normal(size=(8,) * len(logical_axes)).astype(np.float32)
    sharding = TensorSharding(Spec(value.shape, "float32", logical_axes), layout)
    executable = harness.compile_for(
        lambda inputs: {"y": sharding.restored(sharding.stored(inputs["x"]))},
        {"x": value},
        layout,
        {"x": logical_axes, "y": logical_axes},
    )
    np.testing.assert_array_equal(executable({"x": value})["y"], value)
    assert harness.collectives(executable) == {}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_loop_of_steps_is_the_steps(mesh):
    """Three steps in one function against three calls of the PJRT engine's program, on the same 8 devices."""
    steps = one_layer(mesh)
    engine = harness.engine(steps.layout)
    state = tree.map_leaves(np.asarray, engine.compile(steps.init())({"seed": np.int32([0, 1])})["state"])
    batches = [one_layer_batch(step) for step in range(3)]
    stacked = tree.map_leaves(lambda *arrays: np.stack(arrays), *batches)
    loop = train_loop(steps.train_function(ONE_LAYER_BATCH), steps.state_specs(), ONE_LAYER_BATCH, steps.layout)
    logical_axes = {f"state/{path}": spec.logical_axes for path, spec in tree.flatten(steps.state_specs()).items()}
    in_one = harness.run(loop, {"state": state, "batches": stacked}, steps.layout, logical_axes)
    step_by_step, executable = {"state": state}, engine.compile(steps.train(ONE_LAYER_BATCH))
    for batch in batches:
        step_by_step = executable({"state": step_by_step["state"], "batch": batch})
    for path, value in harness.arrays(step_by_step).items():
        np.testing.assert_allclose(in_one[path], value, rtol=TRAINED_TOLERANCE, atol=TRAINED_TOLERANCE, err_msg=path)
    assert in_one["state/step"] == 3


def test_tensorflow_alone_has_the_losses_of_the_pjrt_engine():
    """Three steps compiled by TensorFlow's XLA on the CPU, with no JAX and no strategy."""
    steps = one_layer("1")
    state = tree.map_leaves(
        np.asarray, harness.engine(steps.layout).compile(steps.init())({"seed": np.int32([0, 1])})["state"]
    )
    loop = tf.function(
        train_loop(steps.train_function(ONE_LAYER_BATCH), steps.state_specs(), ONE_LAYER_BATCH, steps.layout),
        jit_compile=True,
        autograph=False,
    )
    executable = harness.engine(steps.layout).compile(steps.train(ONE_LAYER_BATCH))
    found, expected = {"state": tree.map_leaves(tf.constant, state)}, {"state": state}
    for batch in map(one_layer_batch, range(3)):
        found = loop(
            {"state": found["state"], "batches": tree.map_leaves(lambda array: tf.constant(array[None]), batch)}
        )
        expected = executable({"state": expected["state"], "batch": batch})
        for name, value in expected["metrics"].items():
            np.testing.assert_allclose(found["metrics"][name], value, rtol=TRAINED_TOLERANCE, err_msg=name)


def test_the_loop_compiles_for_a_slice_and_keeps_the_state_in_place():
    """Compiled for 8 TPU v3 cores: one loop, and the new state reuses the memory of the old one."""
    steps, stacked = (
        one_layer("8"),
        {
            name: dataclasses.replace(spec, shape=(3, *spec.shape), logical_axes="r" + spec.logical_axes)
            for name, spec in ONE_LAYER_BATCH.items()
        },
    )
    loop = train_loop(steps.train_function(ONE_LAYER_BATCH), steps.state_specs(), ONE_LAYER_BATCH, steps.layout)
    compiled = topology.Slice.of("v3:2x2x1").compile(
        lower("loop", loop, {"state": steps.state_specs(), "batches": stacked}, {}, steps.layout, donated=("state",))
    )
    state = sum(
        np.prod(TensorSharding(spec, steps.layout).shard_shape) * 4
        for spec in tree.flatten(steps.state_specs()).values()
    )
    assert re.search(r"= \(.*\) while\(", compiled.hlo())
    assert compiled.memory().alias_size_in_bytes >= state


@pytest.mark.parametrize("mesh", MESHES)
def test_the_state_round_trips_through_arrays(mesh):
    training, state = on_this_machine(mesh), numbered(one_layer(mesh).state_specs())
    training.load(state)
    found, expected = tree.flatten(training.state), tree.flatten(state)
    assert list(found) == list(expected)
    for path, variable in found.items():
        assert (variable.shape, variable.dtype) == (expected[path].shape, expected[path].dtype)
        np.testing.assert_array_equal(np.asarray(variable), expected[path], err_msg=path)


class Lazy:
    """An array that exists only in shards; it records the size of the largest one read."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self.largest = shape, 0

    def __getitem__(self, where: tuple[slice, ...]) -> np.ndarray:
        part = np.zeros([s.stop - s.start for s in where], np.float32)
        self.largest = max(self.largest, part.size)
        return part


def test_a_sharded_weight_is_loaded_and_read_shard_by_shard():
    sharding = TensorSharding(Spec((8, 4, 16), "float32", "EMH"), Layout.of(DeviceMesh((8,))))
    variable, source = ShardedVariable(sharding, ["/device:CPU:0"] * 8, "experts"), Lazy((8, 4, 16))
    variable.load(source)
    assert source.largest == 64 and [part.shape for _, part in variable.shards()] == [(1, 4, 16)] * 8


@pytest.mark.parametrize("mesh", MESHES)
def test_a_host_receives_the_rows_of_its_own_cores(mesh):
    """On a slice with several hosts each receives its cores' rows, and all together receive the batch."""
    engine = tpu_strategy_graph.stand_in(CHIPS)
    engine.hosts = [f"/device:CPU:0/{core // 2}" for core in range(8)]
    feed = tpu_strategy.Feed(engine, ONE_LAYER_BATCH, one_layer(mesh).layout, count=3)
    rows = 1 if mesh == "8" else 2
    shape = (2, 3, rows, 4) if mesh == "8" else (2, 1, 3, rows, 4)
    assert {path: [tuple(spec.shape) for spec in specs] for path, specs in feed.specs().items()} == {
        path: [shape] * 4 for path in ONE_LAYER_BATCH
    }


@pytest.mark.parametrize("mesh", MESHES)
def test_fed_tensors_have_the_declared_specs(mesh):
    training = on_this_machine(mesh)
    placed = training.feed(3).send([one_layer_batch(step) for step in range(3)])
    assert {path: [(tuple(t.shape), t.dtype) for t in parts] for path, parts in placed.items()} == {
        path: [(tuple(s.shape), s.dtype) for s in specs] for path, specs in training.feed(3).specs().items()
    }
    assert int(tf.reduce_sum(placed["ids"][0])) == sum(one_layer_batch(step)["ids"].sum() for step in range(3)) * (
        1 if mesh == "8" else 2
    )


def test_functions_use_variables_that_outlive_them():
    """As on a TPU, where the state outlives a call."""
    training = on_this_machine("4x2")
    trained = training._train.get_concrete_function(training.feed(2).specs(), 2)
    evaluated = training._evaluate.get_concrete_function(training.feed(1).specs())
    assert set(trained.structured_outputs) == {
        "cross_entropy",
        "tokens",
        "loss",
        "gradient_norm",
        "learning_rate",
        "skipped",
        "skipped_in_a_row",
    }
    assert set(evaluated.structured_outputs) == {"cross_entropy", "tokens"}
    diagnosed = training._diagnose.get_concrete_function(training.feed(1).specs(), tf.TensorSpec((), tf.int32))
    assert {"metrics/loss", "blocks/router_entropy", "weights/experts/wi", "gradients/experts/wi"} <= set(
        diagnosed.structured_outputs
    )
    training._initialise.get_concrete_function(tf.TensorSpec((2,), tf.int32))


def test_a_state_of_another_model_is_refused():
    state = numbered(one_layer("8").state_specs())
    with pytest.raises(UserError, match="belongs to another model; they differ in seed"):
        on_this_machine("8").load({name: value for name, value in state.items() if name != "seed"})
    with pytest.raises(UserError, match=r"the value has shape \[3\], the variable \[2\]"):
        on_this_machine("8").load(state | {"seed": np.zeros(3, np.int32)})


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(UserError, match="the slice has 8 cores, the mesh is 4; pass --mesh=8"):
        Training(tpu_strategy_graph.stand_in(CHIPS), one_layer("4"), ONE_LAYER_BATCH)


def test_windowed_einsums_by_xla_are_refused():
    """TensorFlow compiles without options of a program."""
    steps = dataclasses.replace(one_layer("8"), windowed_einsum_mib=0)
    with pytest.raises(UserError, match="cannot compile with windowed_einsum_mib=0; use --engine=pjrt"):
        Training(tpu_strategy_graph.stand_in(CHIPS), steps, ONE_LAYER_BATCH)


def test_a_dimension_that_the_cores_do_not_divide_is_refused():
    specs = {name: dataclasses.replace(spec, shape=(6, 4)) for name, spec in ONE_LAYER_BATCH.items()}
    with pytest.raises(
        UserError, match=r"batch ids \[1, 6, 4\] has a dimension of 6, which mesh axis x of 8 cores does not"
    ):
        tpu_strategy.Feed(tpu_strategy_graph.stand_in(CHIPS), specs, one_layer("8").layout, count=1)


@pytest.mark.parametrize(
    "installed, pattern",
    [(False, "no TPU support.*install tensorflow-tpu==2.20.0"), (True, "Is this the virtual machine of a slice")],
)
def test_a_missing_tpu_is_reported_with_the_remedy(monkeypatch, installed, pattern):
    def version(package: str) -> str:
        if not installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return "2.20.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match=rf"--tpu=local: no TPU can be reached .*{pattern}"):
        Engine.connect("local")


@pytest.mark.parametrize("tpu, pattern", [("", "--tpu is missing"), ("grpc://nowhere", "expected grpc://HOST:PORT")])
def test_a_malformed_address_is_reported(tpu, pattern):
    with pytest.raises(UserError, match=pattern):
        Engine.connect(tpu)


def test_an_unreachable_address_is_reported_at_once():
    address = free_ports.address()
    with pytest.raises(UserError, match=f"--tpu=grpc://{address}: nothing answers there"):
        Engine.connect(f"grpc://{address}")
    with pytest.raises(UserError, match="--tpu=grpc://[.][.]:80: nothing answers there .*label empty"):
        Engine.connect("grpc://..:80")
