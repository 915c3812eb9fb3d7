"""The engine shards inputs and outputs as the program says, reuses donated memory, and refuses wrong inputs."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lingvo_moe.engines import pjrt
from lingvo_moe.engines.pjrt import Engine, Executable
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.testing import harness
from lingvo_moe.utils import cuda

pytestmark = pytest.mark.slow

GRID = Layout.of(DeviceMesh((4, 2)))
LOGICAL_AXES = {"state/w": "MH", "batch/x": "BM", "y": "BH"}


def inputs_of() -> dict:
    random = np.random.default_rng(0)
    return {
        "state": {"w": random.normal(size=(8, 16)).astype(np.float32), "step": np.int32(1)},
        "batch": {"x": random.normal(size=(8, 8)).astype(np.float32)},
    }


def step(inputs: dict) -> dict:
    state = inputs["state"]
    return {
        "state": {"w": 0.5 * state["w"], "step": state["step"] + 1},
        "y": tf.matmul(inputs["batch"]["x"], state["w"]),
    }


@pytest.fixture(scope="module")
def program():
    return harness.lower_for(step, inputs_of(), GRID, LOGICAL_AXES, donated=("state",))


@pytest.fixture(scope="module")
def executable(program) -> Executable:
    return harness.engine(GRID).compile(program)


def test_outputs_are_correct_and_sharded(executable):
    inputs = inputs_of()
    outputs = executable(inputs)
    # Eight products, summed in another order.
    np.testing.assert_allclose(
        outputs["y"], inputs["batch"]["x"] @ inputs["state"]["w"], rtol=0, atol=8 * 8 * harness.FLOAT32_ROUNDING
    )
    np.testing.assert_array_equal(outputs["state"]["w"], 0.5 * inputs["state"]["w"])
    assert int(outputs["state"]["step"]) == 2
    assert outputs["y"].sharding.spec == outputs["state"]["w"].sharding.spec == PartitionSpec("x", "y")
    assert {part.data.shape for part in outputs["state"]["w"].addressable_shards} == {(2, 8)}
    assert outputs["state"]["step"].sharding.is_fully_replicated


def test_two_runs_are_equal_bit_for_bit(executable):
    one, other = (harness.arrays(executable(inputs_of())) for _ in range(2))
    for path in one:
        np.testing.assert_array_equal(one[path], other[path])


def test_outputs_reuse_the_memory_of_donated_inputs(executable):
    """Each device's shard of `w` is 2 x 8 floats; the step is one more integer."""
    state = executable(inputs_of())["state"]
    outputs = executable({"state": state, "batch": inputs_of()["batch"]})
    assert executable.memory().alias_size_in_bytes >= 2 * 8 * 4
    assert state["w"].is_deleted() and not outputs["state"]["w"].is_deleted()


def test_shardings_are_those_of_the_inputs_below_a_path(executable):
    """And of the outputs that replace them."""
    state, shardings = executable(inputs_of())["state"], executable.shardings("state")
    assert shardings.keys() == state.keys() == {"w", "step"}
    assert shardings["w"] == state["w"].sharding
    assert shardings["step"].is_fully_replicated and state["step"].sharding.is_fully_replicated
    assert executable.shardings("batch").keys() == {"x"}


def test_hlo_is_the_partitioned_module(executable):
    assert "num_partitions=8" in executable.hlo()
    assert "f32[2,8]" in executable.hlo(), "a device's shard of w"


def test_a_program_for_another_number_of_devices_is_an_error(program):
    with pytest.raises(UserError, match=r"test is made for 8 devices \(4x2\); this engine has 2. Pass --devices=8"):
        Engine(2, platform="cpu").compile(program)


def test_more_devices_than_there_are_is_an_error():
    with pytest.raises(UserError, match="--devices=9: there are 8 cpu devices; ask for at most that many"):
        Engine(9, platform="cpu")


@pytest.mark.parametrize(
    "platform, message",
    [
        (None, "the environment variable JAX_PLATFORMS=tpu: Unable to initialize"),
        ("tpu", "--platform=tpu: JAX finds no"),
    ],
)
def test_a_platform_without_devices_is_named_as_it_was_given(monkeypatch, platform, message):
    def fail(_):
        raise RuntimeError("Unable to initialize backend 'tpu': no TPU.\nmore")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(UserError, match=message) as raised:
        Engine(1, platform)
    assert "more" not in str(raised.value)


@pytest.mark.parametrize("number", [0, "8", GRID.mesh])
def test_an_engine_of_no_number_of_devices_is_an_error(number):
    """A mesh is what layouts take."""
    with pytest.raises(UserError, match="an engine of .* devices: expected a number from 1"):
        Engine(number, platform="cpu")


def test_an_engine_takes_the_first_devices():
    assert Engine(2, platform="cpu").devices == jax.devices("cpu")[:2]
    assert Engine(1, platform="cpu", all_accelerators=True).devices == jax.devices("cpu")[:1]
    assert Engine(1, platform="cpu").platform == "cpu"
    assert len(Engine(np.prod((2, 2)), platform="cpu").devices) == 4


def test_more_processes_than_devices_of_the_mesh(monkeypatch):
    """All accelerators are taken; virtual devices, and a number that the user named, are divided among processes."""
    asked, gpus = [], [types.SimpleNamespace(platform="gpu")] * 32
    monkeypatch.setattr(pjrt, "_find_devices", lambda number, platform: asked.append(number) or gpus)
    assert Engine(8, None, all_accelerators=True, processes=32).devices == gpus and asked == [1]
    refusal = "8 devices cannot be divided among 32 processes; pass --devices=32"
    with pytest.raises(UserError, match=refusal):
        Engine(8, None, processes=32)
    monkeypatch.undo()
    with pytest.raises(UserError, match=refusal):
        Engine(8, "cpu", all_accelerators=True, processes=32)


def test_an_absent_platform_is_an_error():
    with pytest.raises(UserError, match="--platform=gpu.*CUDA for JAX is not installed: pip install"):
        Engine(1, platform="gpu")


def test_a_gpu_that_is_not_used_is_reported(monkeypatch, caplog):
    """Unless the user asks for the CPU: nobody trains on a CPU beside a GPU without knowing it."""
    monkeypatch.setattr(cuda.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert Engine(1, platform="cpu").platform == Engine(1).platform == "cpu"
    assert [record.message for record in caplog.records] == [
        f"the GPU of this machine is not used, because CUDA for JAX is not installed: {cuda.remedy()}."
    ]


def wrong(part: str, name: str, value) -> dict:
    inputs = inputs_of()
    inputs[part] = {**inputs[part], name: value}
    return inputs


@pytest.mark.parametrize(
    "inputs, message",
    [
        (wrong("batch", "x", np.zeros((8, 9), np.float32)), r"batch/x is float32\[8, 9\]; expected float32\[8, 8\]"),
        (wrong("batch", "x", np.zeros((8, 8))), r"batch/x is float64\[8, 8\]; expected float32\[8, 8\]"),
        (wrong("batch", "y", np.zeros(1)), r"inputs differ from those of its specs; missing: none; unknown: batch/y\."),
        ({"state": inputs_of()["state"]}, r"inputs differ from those of its specs; missing: batch/x; unknown: none\."),
    ],
)
def test_inputs_of_another_shape_dtype_or_name_are_errors_that_name_them(executable, inputs, message):
    with pytest.raises(ValueError, match=message):
        executable(inputs)


def test_weights_in_int8_are_an_error_with_the_commands_that_convert_them(executable):
    """A file of `checkpoint convert --dtype=int8`, as the released one, has other tensors than the program."""
    inputs = wrong("state", "w", np.zeros((8, 16), np.int8))
    inputs["state"]["w.scale"] = np.ones(8, np.float32)
    with pytest.raises(UserError, match="state/w is int8, expected float32: .* --input=FILE .* --dtype=float32`"):
        executable(inputs)


def test_training_that_is_called_too_early_or_with_an_unknown_weight_says_so(program):
    """A loop of one's own calls these methods in any order."""
    steps: Any = types.SimpleNamespace(train=lambda batch_specs: program)
    training = harness.engine(GRID).training(steps, {"x": Spec((8, 8), "float32", "BM")}, evaluates=False)
    for call in (lambda: training.train([inputs_of()["batch"]]), lambda: training.set_weight("w", np.zeros((8, 16)))):
        with pytest.raises(UserError, match=r"no training state yet; call initialise\(seed\) or load\(state\) first"):
            call()
    with pytest.raises(UserError, match="does not evaluate; call Engine.training with evaluates=True"):
        training.evaluate(inputs_of()["batch"])
    training.load({"theta": {"gate": np.zeros(2)}})
    with pytest.raises(UserError, match="the model has no weight gait. Did you mean gate"):
        training.set_weight("gait", np.zeros(2))


def test_a_sharded_input_of_another_shape_is_an_error_that_names_it(executable):
    with pytest.raises(ValueError, match=r"state/w is float32\[8, 4\]; expected float32\[8, 16\]"):
        executable(wrong("state", "w", jax.numpy.zeros((8, 4), "float32")))


def test_a_sharded_input_from_another_mesh_is_moved(executable):
    """From two devices to eight."""
    two = harness.compile_for(step, inputs_of(), Layout.of(DeviceMesh((2,))), LOGICAL_AXES)(inputs_of())
    outputs = executable({"state": two["state"], "batch": inputs_of()["batch"]})
    np.testing.assert_array_equal(outputs["state"]["w"], 0.25 * inputs_of()["state"]["w"])
    assert outputs["state"]["w"].sharding.spec == PartitionSpec("x", "y")
