"""Protects the analytical cost model: it agrees with the compiled plans of docs/plans, and is fast."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib

import pytest

from lingvo_moe import experiment
from lingvo_moe.analysis import cost_model, layout_space, model_parts, plan
from lingvo_moe.analysis.cost_model import CostModel, Estimate
from lingvo_moe.engines.cluster import GPUS, Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.sharding.layout import DeviceMesh

for family in ("dense_lm", "hybrid_lm", "m4", "sparse_lm"):
    importlib.import_module(f"params.{family}")

_PLANS = pathlib.Path(__file__).parents[2] / "docs" / "plans"
_MODELS = (
    "dense_lm.Dense64BMesh8x16",
    "dense_lm.Dense1T",
    "dense_lm.Narrow16BMesh8x32",
    "dense_lm.Narrow16BMesh32x8",
    "dense_lm.Pipelined16BMesh2x16x8",
    "dense_lm.Pipelined16BMesh8x16x2",
    "hybrid_lm.MoE33B8E",
    "hybrid_lm.MoE804B64E",
    "m4.MoE128E12L",
    "m4.MoE2048E36L",
    "sparse_lm.MoE577B2048E",
)


def predicted(name: str) -> tuple[Estimate, plan.Plan]:
    """The prediction of a plan's settings, and the plan."""
    made = plan.Plan.load(_PLANS / f"{name}.json")
    config = experiment.get(made.model, made.changes, DeviceMesh.parse(made.mesh))
    generation, _, chips = made.topology.partition(":")
    target = Slice(made.topology, generation, tuple(map(int, chips.split("x"))), tuple(range(made.devices)))
    return CostModel(config, target).estimate(layout_space.registered(config)), made


@pytest.mark.parametrize("name", _MODELS)
def test_predictions_agree_with_compiled_plans(name):
    """Time within a seventh, collectives within an eighth, memory within a fifth."""
    estimate, made = predicted(name)
    assert estimate.seconds == pytest.approx(made.step_seconds, rel=1 / 7)
    assert sum(estimate.collectives.values()) == pytest.approx(made.collective_seconds, rel=1 / 8)
    assert estimate.bytes == pytest.approx(made.memory.total, rel=1 / 5)
    assert estimate.tokens == made.tokens


@pytest.mark.parametrize("name", ["dense_lm.Dense64BMesh16x32.gspmd_attempt_1", "m4.MoE128E12L.capacity_of_a6"])
def test_what_did_not_fit_is_predicted_not_to(name):
    """By the plans the first needs eight times a core's memory, the second a little more than all of it."""
    estimate, made = predicted(name)
    assert not made.fits and not estimate.fits


def test_the_papers_order_of_pipelines_is_predicted():
    """Two stages are faster than eight, and 2-D sharding is faster than all."""
    two, eight, none = (
        predicted(f"dense_lm.{name}")[0].tokens_per_second
        for name in ("Pipelined16BMesh2x16x8", "Pipelined16BMesh8x16x2", "Narrow16BMesh32x8")
    )
    assert eight < two < none


def test_bubbles_are_those_of_the_schedule():
    """(L - 1) / (M + L - 1) of what the stages compute: 7 of 39 iterations."""
    estimate, made = predicted("dense_lm.Pipelined16BMesh8x16x2")
    inside = estimate.compute["self_attention"] + estimate.compute["feed_forward"]
    assert 7 / 39 * inside < estimate.bubbles < 7 / 39 * estimate.seconds
    assert "bubbles 1" in estimate.reason()
    # Gradients, which are reduced once per step, have none.
    assert estimate.bubbles == pytest.approx(made.bubble_cycles / 940e6, rel=0.02)


def test_weights_and_optimizer_state_are_exact():
    """They are those of the program's inputs."""
    for name in ("dense_lm.Dense64BMesh8x16", "m4.MoE2048E36L", "dense_lm.Pipelined16BMesh2x16x8"):
        estimate, made = predicted(name)
        weights = made.memory.replicated_weights + made.memory.distributed_weights
        assert estimate.memory["weights"] == pytest.approx(weights, rel=1e-6)
        assert estimate.memory["optimizer state"] == pytest.approx(made.memory.optimizer_state, rel=1e-3)


def on_gpus(monkeypatch, name: str, mesh: str, topology: str, *assignments: str) -> dict[str, float]:
    """The seconds of products by part, on nodes of eight GPUs."""
    monkeypatch.setattr(cost_model, "WORK_BYTES", dict.fromkeys(cost_model.WORK_BYTES, 0.0))
    config = experiment.get(name, assignments, DeviceMesh.parse(mesh))
    gpu, _, nodes = topology.partition(":")
    target = Cluster(f"{topology}x8", gpu, int(nodes), 8, tuple(range(config.mesh.size)))
    return CostModel(config, target).estimate(layout_space.registered(config)).compute


def test_exact_products_run_outside_of_a_gpus_matrix_units(monkeypatch):
    """As in the roofline of plans: 75 TFLOP/s of a B200. Operands in bfloat16 are exact already."""

    def feed_forward(*assignments: str) -> float:
        return on_gpus(monkeypatch, "dense_lm.Dense64BMesh8x16", "8x2", "b200:2", *assignments)["feed_forward"]

    narrow, wide = (f"model.activation_dtype={dtype}" for dtype in ("bfloat16", "float32"))
    rounded, exact = feed_forward(wide), feed_forward(wide, "matmul_precision=highest")
    assert exact / rounded == pytest.approx(GPUS["b200"].tf32_flops / GPUS["b200"].float32_flops)
    assert feed_forward(narrow, "matmul_precision=highest") == feed_forward(narrow)


def test_products_of_routers_are_exact_on_gpus(monkeypatch):
    """Whatever the precision of other products, so their times on two GPUs are as the GPUs' float32 speeds."""
    flops = [
        on_gpus(monkeypatch, "m4.MoE2048E36L", "128", f"{gpu}:16")["gating"] * GPUS[gpu].float32_flops
        for gpu in ("a100", "b200")
    ]
    assert flops[0] == pytest.approx(flops[1])


def test_parts_that_are_alike_are_divided_once():
    """Those of the encoder and the decoder: most of a search's time is spent on dividing."""
    config = experiment.get("m4.MoE128E12L")
    model = CostModel(config, Slice("v3:8x8x1", "v3", (8, 8, 1), tuple(range(128))))
    model.estimate(layout_space.registered(config))
    parts = model_parts.parts_of(config, config.input.batch_size, 1)
    assert len(model._part_costs) == len({dataclasses.replace(part, stack="") for part in parts}) < len(parts)


def test_recomputing_more_takes_less_memory_and_more_time():
    """The policies in order."""
    config = experiment.get("dense_lm.Dense64BMesh8x16")
    model = CostModel(config, Slice("v3:8x8x1", "v3", (8, 8, 1), tuple(range(128))))
    own = layout_space.registered(config)
    estimates = [
        model.estimate(dataclasses.replace(own, remat=remat)) for remat in ("full", "keep_outputs", "keep_hidden")
    ]
    assert [e.seconds for e in estimates] == sorted((e.seconds for e in estimates), reverse=True)
    assert [e.bytes for e in estimates] == sorted(e.bytes for e in estimates)
