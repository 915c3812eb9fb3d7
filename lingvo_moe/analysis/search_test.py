"""Protects the search for settings: it tries the requested dimensions, keeps the fastest, reports refusals."""

from __future__ import annotations

import dataclasses

import pytest

from lingvo_moe import experiment
from lingvo_moe.analysis import plan, plan_text, search
from lingvo_moe.analysis.plan import Memory, Plan
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError

_MODEL = "m4.Small"
_SLICE = Slice("v3:2x2x1", "v3", (2, 2, 1), tuple(range(8)))
# Artificial seconds of a step by policy; "none" does not fit.
_SECONDS = {"full": 4.0, "keep_outputs": 2.0, "keep_hidden": 3.0}


def build(assignments):
    return experiment.get(_MODEL, assignments)


def artificial_plan(name, config, tpu, program="train", changes=()) -> Plan:
    """Returns an artificial plan: time by policy times the batch to the power of 0.9; a batch of 128 does not fit."""
    model, batch = config.model, config.input.batch_size
    fits = model.remat in _SECONDS and batch < 128
    return Plan(
        model=name,
        changes=tuple(changes),
        program=program,
        topology=tpu.name,
        mesh=str(config.mesh),
        devices=8,
        weights=1,
        layout=config.layout,
        remat=model.remat,
        batch_size=batch,
        num_groups=model.num_groups,
        num_experts=model.num_experts,
        num_layers=model.num_layers,
        activation_dtype=model.activation_dtype,
        tokens=config.input.tokens,
        model_flops=1.0,
        memory=Memory(1, 1, 1, 1, 1 if fits else None, 16 * 2**30, None if fits else 17 * 2**30),
        collectives=(),
        cycles=100 if fits else None,
        rematerialised_cycles=5 if fits else None,
        cycles_by_part={},
        compute_seconds=_SECONDS[model.remat] * (batch / 32) ** 0.9 if fits else None,
        unknown_loops=0,
        lower_seconds=0.0,
        compile_seconds=0.0,
    )


@pytest.fixture
def trials(monkeypatch):
    monkeypatch.setattr(plan, "make", artificial_plan)

    def run(dimensions, assignments=("model.remat=full",), target=_SLICE):
        return list(search.search(_MODEL, target, dimensions, assignments, build))

    return run


def test_first_trial_has_the_unchanged_settings(trials):
    """The others are compared with it."""
    assert [trial.changes for trial in trials([])] == [()]


def test_plans_have_the_users_settings_and_those_of_the_trial(trials):
    """Whoever reads a saved plan rebuilds its model from these, and the last of two values counts."""
    given = ("model.num_layers=8", "model.remat=full")
    found = {trial.changes: trial.plan for trial in trials(["remat"], given)}
    assert found[()].changes == given
    assert found["model.remat=keep_outputs",].changes == (*given, "model.remat=keep_outputs")
    assert build(found["model.remat=keep_outputs",].changes).model.remat == "keep_outputs"


def test_all_rematerialisation_policies_are_tried(trials):
    """One that does not fit is slower than any."""
    results = {trial.changes: trial for trial in trials(["remat"])}
    assert set(results) == {(), ("model.remat=none",), ("model.remat=keep_outputs",), ("model.remat=keep_hidden",)}
    assert results["model.remat=none",].tokens_per_second == 0.0
    assert max(results.values(), key=lambda t: t.tokens_per_second).changes == ("model.remat=keep_outputs",)


def test_a_cluster_of_gpus_is_searched_as_a_slice_is(trials):
    """Policies and meshes for its GPUs, two nodes of four; the plans, and the lines of the trials, are of GPUs."""
    cluster = Cluster("h100:2x4", "h100", 2, 4, tuple(range(8)))
    found = trials(["remat", "mesh"], target=cluster)
    assert {trial.plan.topology for trial in found} == {"h100:2x4"}
    assert {trial.plan.device for trial in found} == {"GPU"}
    best = max(found, key=lambda trial: trial.tokens_per_second)
    assert "model.remat=keep_outputs" in best.changes and "tokens/s" in plan_text.trial(best)
    meshes = {change for trial in found for change in trial.changes if change.startswith("mesh=")}
    assert meshes == {"mesh=4x2", "mesh=2x4"}  # beside the model's own, 8


def test_each_dimension_starts_from_the_best_so_far(trials):
    """Batches are tried with the best policy; a larger batch gives more tokens per second until it does not fit."""
    results = trials(["batch", "remat"])
    batches = [trial for trial in results if any(c.startswith("input.batch_size") for c in trial.changes)]
    assert {trial.changes for trial in batches} == {
        (f"input.batch_size={size}", "model.remat=keep_outputs") for size in (8, 16, 64, 128)
    }
    best = max(results, key=lambda trial: trial.tokens_per_second)
    assert best.changes == ("input.batch_size=64", "model.remat=keep_outputs")


def test_meshes_have_all_cores_and_refusals_have_their_reason(trials):
    """8 cores do not divide 12 experts; the reason is the experiment's error."""
    results = trials(["mesh"], ("model.remat=full", "model.num_experts=12", "mesh=4x2"))
    by_change = {trial.changes: trial for trial in results}
    assert set(by_change) == {(), ("mesh=8",), ("mesh=2x4",), ("mesh=4x2",)} - {("mesh=4x2",)}
    refused = by_change["mesh=8",]
    assert refused.plan is None and "model.num_experts is 12" in refused.refusal
    assert "refused: model.num_experts is 12" in plan_text.trial(refused)


def test_groups_are_varied_only_with_experts(trials):
    """Dense models have none."""
    assert {t.changes for t in trials(["groups"])} == {(), *((f"model.num_groups={n}",) for n in (8, 16, 64, 128))}
    assert len(trials(["groups"], ("model.num_experts=0", "model.num_groups=1"))) == 1


def test_no_trial_has_less_than_a_row_or_a_group(trials):
    """A quarter of two is none."""
    small = ("model.remat=full", "mesh=2", "model.num_groups=2", "input.batch_size=2")
    tried = {change for trial in trials(["groups", "batch"], small) for change in trial.changes}
    assert {change for change in tried if change.endswith(("=0", "=1"))} == {
        "model.num_groups=1",
        "input.batch_size=1",
    }


def test_every_trial_has_a_line(trials):
    """With memory, or the reason why it does not fit."""
    lines = {trial.changes: plan_text.trial(trial) for trial in trials(["remat"])}
    assert (
        "does not fit: 17.00 of 16.00 GiB" in lines["model.remat=none",]
        and "2.000 s/step" in lines["model.remat=keep_outputs",]
    )


def test_a_generation_without_a_clock_is_not_searched(trials):
    """No trial has a time, so none would be the fastest; a line does not call unfit what fits."""
    unclocked = Slice("tpu7x:2x2x1", "tpu7x", (2, 2, 1), tuple(range(8)))
    with pytest.raises(UserError, match="tpu7x.*its clock is not published.*--search=layout --top=0"):
        trials(["remat"], target=unclocked)
    (trial,) = trials([])
    timeless = dataclasses.replace(trial.plan, compute_seconds=None)
    assert plan_text.trial(dataclasses.replace(trial, plan=timeless)).endswith("0.00 MiB per core [c], time unknown")


def test_unknown_dimension_is_an_error_with_a_suggestion():
    """The error names the flag and the value."""
    with pytest.raises(UserError, match="--search=remats: no such dimension. Did you mean remat"):
        search.check_dimensions(["remats"])


def test_trial_without_a_plan_has_no_throughput(trials):
    """So it is never the best."""
    worst = dataclasses.replace(trials([])[0], plan=None)
    assert worst.tokens_per_second == 0.0
