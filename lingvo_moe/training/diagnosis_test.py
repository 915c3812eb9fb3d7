"""A diagnosis describes the step that training makes, names the first non-finite number, and agrees on all meshes."""

from __future__ import annotations

import functools
import math
import pathlib

import jax
import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.engines.pjrt import Engine, Executable, Training
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.base import matrix
from lingvo_moe.program import DIAGNOSED
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing import harness
from lingvo_moe.training.diagnosis import Diagnosis, Finding

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

MOE = "decoder/layer_1/feed_forward"
# Sums over a few thousand float32 numbers, of which each went through four layers, in another order.
TOLERANCE = 1e-4
# A mean over a hundred tokens, each of them some logarithms, for which the compiler has a polynomial.
ENTROPY_TOLERANCE = 1e-5
# The program is another one than training's, in which the compiler may fuse k * l_aux into the sum of the loss, or not.
REPLAY_TOLERANCE = 2 * harness.FLOAT32_ROUNDING


def experiment_on(mesh: str) -> Experiment:
    """Returns two repeats of a dense layer and a layer with experts, scanned and rematerialised, with dropout."""
    return tiny.tiny_language_model(
        tiny.Data(pathlib.Path("none"), pathlib.Path("none")),
        "model.num_layers=4",
        "model.layer_pattern=dense,moe",
        "model.unroll=false",
        "model.remat=full",
        "model.residual_dropout=0.1",
        mesh=DeviceMesh.parse(mesh),
    )


@functools.cache
def diagnose_on(mesh: str) -> Executable:
    config = experiment_on(mesh)
    return Engine(config.mesh.size, "cpu").compile(config.steps.diagnose(config.batch_specs()))


def a_batch(seed: int) -> dict:
    specs, random = experiment_on("1").batch_specs(), np.random.default_rng(seed)
    batch = tree.map_leaves(lambda spec: random.integers(4, 200, spec.shape, np.int32), specs)
    rows, length = batch["target"]["ids"].shape
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return {"target": batch["target"] | {"segment_ids": np.int32(positions < length - 5), "positions": positions}}


@functools.cache
def trained() -> Training:
    """Returns the training state after two steps on one device."""
    config = experiment_on("1")
    training = Engine(1, "cpu").training(config.steps, config.batch_specs(), evaluates=False)
    training.initialise(3)
    training.train([a_batch(0), a_batch(1)])
    return training


@functools.cache
def state() -> dict:
    """Returns what a diagnosis reads of `trained`, on the host."""
    return jax.tree.map(np.array, {name: trained().state[name] for name in DIAGNOSED if name in trained().state})


def diagnosis(mesh: str = "1", **changes: np.ndarray) -> Diagnosis:
    """Returns a diagnosis of the third step, with some weights replaced, each named by its path with `__` for `/`."""
    theta = tree.flatten(state()["theta"]) | {path.replace("__", "/"): value for path, value in changes.items()}
    outputs = diagnose_on(mesh)({"state": state() | {"theta": tree.unflatten(theta)}, "batch": a_batch(2)})
    return Diagnosis.of(outputs, experiment_on(mesh).model.weights())


def changed(path: str, row: tuple, value: float) -> dict[str, np.ndarray]:
    weight = tree.flatten(state()["theta"])[path].copy()
    weight[row] = value
    return {path.replace("/", "__"): weight}


def test_the_diagnosed_step_is_the_one_that_training_makes():
    """Loss and gradient have the random numbers of dropout and routers; the norms of the gradients add up."""
    found, before = diagnosis(), jax.tree.map(np.array, trained().state)
    metrics = {name: float(value) for name, value in trained().train([a_batch(2)]).items()}
    trained().load(before)
    for name, value in found.metrics.items():
        assert value == pytest.approx(metrics[name], rel=REPLAY_TOLERANCE), name
    norms = [value**2 for value in found.gradients.values()]
    assert math.sqrt(sum(norms)) == pytest.approx(metrics["gradient_norm"], rel=TOLERANCE)
    assert found.not_finite() is None and found.summary().startswith("all numbers are finite; the largest: ")
    assert trained().diagnose(a_batch(2), 2)["metrics"]["loss"] == np.float32(found.metrics["loss"])


def test_all_weights_and_blocks_are_listed_in_the_order_of_computation():
    found = diagnosis()
    layer = [f"layer_0/{block}" for block in ("self_attention", "feed_forward")] + [
        f"layer_1/{block}" for block in ("self_attention", "feed_forward")
    ]
    assert list(found.blocks) == [
        "embedding",
        *(f"decoder/{block}[{i}]" for i in range(2) for block in layer),
        "decoder/norm",
        "softmax",
    ]
    assert set(found.weights) == set(found.gradients)
    assert next(iter(found.gradients)) == "softmax/projection" and list(found.gradients)[-1] == "embedding/table"
    weights = list(found.weights)
    assert weights.index(f"{MOE}/wo[0]") < weights.index("decoder/layer_0/self_attention/norm/scale[1]")
    gate = tree.flatten(state()["theta"])[f"{MOE}/gate"]
    assert found.weights[f"{MOE}/gate[1]"] == pytest.approx(np.sqrt(np.mean(np.square(gate[1]))), rel=1e-6)
    lines = found.text().splitlines()
    assert lines[0].split()[:2] == ["after", "rms"] and [line.split()[0] for line in lines[1:12]] == list(found.blocks)
    assert lines[5].startswith(f"{MOE}[0] ") and len(lines[5].split()) == 7 and len(lines[4].split()) == 5


def test_a_model_without_summaries_has_an_empty_table():
    """Models of one's own need not call `Context.summarize`, nor give the largest value of what they summarise."""
    outputs = {"metrics": {"loss": 1.0, "gradient_norm": 5.0}, "weights": {"w": 2.0}, "gradients": {"w": 5.0}}
    weights = {"w": matrix("MH", fan_in="M", M=4, H=4)}
    found = Diagnosis.of(outputs, weights)
    assert found.blocks == {} and found.summary().endswith("the largest: the norm of the gradient of w is 5")
    assert found.text().splitlines()[0].startswith("after") and found.as_json()["blocks"] == {}
    found = Diagnosis.of(outputs | {"blocks": {"part": {"share": 0.5}}}, weights)
    assert found.blocks == {"part": {"share": 0.5}} and "part" in found.text()


def test_meshes_agree():
    expected, found = diagnosis(), diagnosis("4x2")
    for field in ("metrics", "weights", "gradients"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=TOLERANCE, abs=1e-6), field
    for place, values in expected.blocks.items():
        assert found.blocks[place] == pytest.approx(values, rel=TOLERANCE), place


def test_a_router_with_zero_weights_has_maximal_entropy():
    """Only the router whose weights are zero."""
    found = diagnosis(**changed(f"{MOE}/gate", (1,), 0.0)).blocks
    for quantity in ("router_entropy", "load_entropy"):
        assert found[f"{MOE}[1]"][quantity] == pytest.approx(math.log(4), rel=ENTROPY_TOLERANCE)
        assert found[f"{MOE}[0]"][quantity] < math.log(4) - 1e-3


def test_a_nan_in_one_expert_of_one_repeat_is_named():
    """The weight is named first, then the activations that depend on it; earlier ones are finite."""
    healthy, found = diagnosis(), diagnosis(**changed(f"{MOE}/wi", (1, 2, 0, 0), np.nan))
    assert (found.not_finite().kind, found.not_finite().scope) == ("weight", f"{MOE}/wi[1]")
    assert "the root mean square of weight decoder/layer_1/feed_forward/wi[1] is nan" in found.summary()
    spoilt = [place for place, values in found.blocks.items() if not math.isfinite(values["max"])]
    assert spoilt == [f"{MOE}[1]", "decoder/norm", "softmax"] and math.isnan(found.metrics["loss"])
    assert found.blocks["decoder/layer_1/self_attention[1]"] == healthy.blocks["decoder/layer_1/self_attention[1]"]
    marked = [line for line in found.text().splitlines() if "<-" in line]
    assert len(marked) == 1 and marked[0].startswith(f"{MOE}[1] ")
    assert found.as_json()["worst"] == {"kind": "weight", "scope": f"{MOE}/wi[1]", "value": "nan"}


def outputs_of(**changes: float) -> tuple[dict, dict]:
    """Returns outputs of `diagnose` for two repeats of a block and a projection, and their weights."""
    weights = {
        "stack": {"block": {"w": matrix("MH", fan_in="M", M=2, H=3).repeated(2)}},
        "softmax": {"projection": matrix("MV", fan_in="M", M=2, V=5)},
    }
    outputs = {
        "metrics": {"loss": 1.0, "gradient_norm": 2.0},
        "blocks": {
            "stack": {"block": {"rms": np.ones(2), "max": np.full(2, 2.0)}},
            "softmax": {"rms": 1.0, "max": 3.0},
        },
        "weights": {"stack": {"block": {"w": np.ones(2)}}, "softmax": {"projection": 1.0}},
        "gradients": {"stack": {"block": {"w": np.ones(2)}}, "softmax": {"projection": 1.0}},
    }
    leaves = {path: np.array(value, np.float32) for path, value in tree.flatten(outputs).items()}
    for path, value in changes.items():
        leaves[path.replace("__", "/")] = np.array(value, np.float32)
    return tree.unflatten(leaves), weights


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (
            {"blocks__stack__block__max": [2, np.inf], "metrics__loss": np.nan},
            Finding("activation", "stack/block[1]", math.inf),
        ),
        ({"blocks__softmax__max": np.inf, "metrics__loss": np.inf}, Finding("activation", "softmax", math.inf)),
        ({"metrics__loss": np.inf, "gradients__softmax__projection": np.inf}, Finding("loss", "", math.inf)),
        ({"gradients__stack__block__w": [np.inf, 1]}, Finding("gradient", "stack/block/w[0]", math.inf)),
        ({"gradients__stack__block__w": [np.inf, np.inf]}, Finding("gradient", "stack/block/w[1]", math.inf)),
    ],
)
def test_the_first_non_finite_number_is_in_forward_then_backward_order(changes, finding):
    assert Diagnosis.of(*outputs_of(**changes)).not_finite() == finding


def test_the_largest_number_is_named_if_all_are_finite():
    """A gradient of 1e20 is finite but its square is not, and so the step was skipped."""
    found = Diagnosis.of(*outputs_of(gradients__stack__block__w=[1e20, 1], metrics__gradient_norm=np.inf))
    assert found.not_finite() is None and found.largest() == Finding(
        "gradient", "stack/block/w[0]", pytest.approx(1e20)
    )
    assert found.summary() == (
        "all numbers are finite, but not the gradient's squared norm; the largest: the norm of the "
        "gradient of stack/block/w[0] is 1e+20"
    )
    assert not found.as_json()["finite"] and Diagnosis.of(*outputs_of()).as_json()["finite"]


def test_metrics_with_long_names_are_aligned():
    """A model of one's own may call a metric anything."""
    metrics = {"loss": 1.0, "embedding_penalty": 2.0, "gradient_norm": 5.0}
    outputs = {"metrics": metrics, "weights": {"w": 2.0}, "gradients": {"w": 5.0}}
    lines = Diagnosis.of(outputs, {"w": matrix("MH", fan_in="M", M=4, H=4)}).text().splitlines()
    assert {"loss               1", "embedding_penalty  2", "gradient_norm      5"} < set(lines)


def test_blocks_of_tied_embeddings_have_no_weights():
    """A tied translation model, as m4.Pocket, summarises embeddings and logits, but has one table alone."""
    no_data = tiny.Data(pathlib.Path("none"), pathlib.Path("none"))
    config = tiny.tiny(no_data, "model.tied_embeddings=true", "model.source_vocabulary=256")
    program = config.steps.diagnose(config.batch_specs())
    outputs = {output.path: np.ones(output.shape, output.dtype) for output in program.outputs}
    found = Diagnosis.of(tree.unflatten(outputs), config.model.weights())
    blocks = list(found.blocks)
    assert "embedding/table" in found.weights and not any("softmax" in scope for scope in found.weights)
    assert blocks[:2] == ["source_embedding", "target_embedding"] and blocks[-2:] == ["decoder/norm", "softmax"]
    assert blocks.index("encoder/norm") < blocks.index("decoder/layer_0/self_attention[0]")
    assert "logits, largest  1" in found.text()


def test_a_block_without_weights_precedes_the_output_of_its_layer():
    """A user's layer may summarise what it computes on the way, under any name."""
    outputs, weights = outputs_of()
    outputs["blocks"]["stack"]["block"]["some_gates"] = {"max": np.ones(2)}
    found = Diagnosis.of(outputs, weights)
    repeats = [[f"stack/block/some_gates[{i}]", f"stack/block[{i}]"] for i in range(2)]
    assert list(found.blocks) == [*repeats[0], *repeats[1], "softmax"]
