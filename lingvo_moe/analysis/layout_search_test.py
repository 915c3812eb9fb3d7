"""Protects the search for layouts: it finds the papers' own unaided, respects what is given, and spends its budget."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import time

import pytest

from lingvo_moe import experiment
from lingvo_moe.analysis import layout_search, layout_text, plan
from lingvo_moe.analysis.layout_search import Found, Ranking
from lingvo_moe.analysis.layout_space import Space
from lingvo_moe.analysis.plan import Memory, Plan
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout

for family in ("dense_lm", "hybrid_lm", "m4"):
    importlib.import_module(f"params.{family}")


def slice_of(*chips: int) -> Slice:
    """A slice without libtpu's description of its devices."""
    devices = 2 * chips[0] * chips[1] * chips[2]
    return Slice(f"v3:{'x'.join(map(str, chips))}", "v3", chips, tuple(range(devices)))


def ranked(name: str, chips: tuple[int, ...], **fields) -> Ranking:
    """The ranking of a model's layouts."""
    config, target = experiment.get(name), slice_of(*chips)
    return layout_search.rank(config, target, Space(len(target.devices), (config.input.batch_size,), **fields))


@pytest.mark.parametrize(
    ("name", "chips", "policy"),
    [
        ("dense_lm.Dense64BMesh8x16", (8, 8, 1), "keep_hidden"),
        ("hybrid_lm.MoE33B8E", (4, 4, 1), "keep_hidden"),
        ("m4.MoE2048E36L", (32, 32, 1), "keep_outputs"),
    ],
)
def test_the_papers_layout_is_found_on_its_mesh(name, chips, policy):
    """Nothing that the cost model finds faster is much faster, and what it finds is at least as fast."""
    config = experiment.get(name)
    ranking = ranked(name, chips, mesh=config.mesh, remats=(policy,), pipelines=("none",), microbatches=1)
    assert ranking.own is not None
    first, own = ranking.best[0].estimate, ranking.own.estimate
    assert own.seconds * 0.95 < first.seconds <= own.seconds * 1.0001
    assert any(found.estimate.seconds <= own.seconds * 1.0001 for found in ranking.best)


def test_two_dimensional_sharding_is_preferred_to_pipelines():
    """The narrow 16B model, GSPMD tables 3 and 4: on 256 cores the best pipeline is slower."""
    remats = ("keep_hidden",)
    flat = ranked(
        "dense_lm.Narrow16BMesh32x8", (16, 8, 1), mesh=DeviceMesh((32, 8)), remats=remats, pipelines=("none",)
    )
    config = experiment.unchecked("dense_lm.Narrow16BMesh32x8")
    space = Space(256, (config.input.batch_size,), DeviceMesh((4, 16, 4)), ("full",), ("gpipe",))
    staged = layout_search.rank(config, slice_of(16, 8, 1), space)
    assert flat.best[0].estimate.tokens_per_second > 1.1 * staged.best[0].estimate.tokens_per_second


def test_choices_differ():
    """Of the same mesh, policy and schedule, and nearly the same time, one is compiled."""
    ranking = ranked("dense_lm.Dense64BMesh8x16", (8, 8, 1), mesh=DeviceMesh((8, 16)), pipelines=("none",))
    speeds: dict[tuple, float] = {}
    for found in ranking.choices():
        candidate = found.candidate
        key = (candidate.remat, candidate.microbatches)
        assert found.estimate.tokens_per_second < 0.99 * speeds.get(key, float("inf"))
        speeds[key] = found.estimate.tokens_per_second
    assert sum(1 for _ in ranking.choices()) < len(ranking.best)


def test_what_the_user_sets_does_not_vary():
    """A policy and a mesh stay; the batch varies only where asked, from one row on; a layout is set or looked for."""
    config = experiment.get("dense_lm.Small", ["remat=full", "model.pipeline=none"])
    mesh = DeviceMesh((4, 2))
    space = layout_search.space_of(config, 8, ["remat=full", "model.pipeline=none"], mesh, False)
    assert (space.mesh, space.remats, space.pipelines, space.batch_sizes) == (mesh, ("full",), ("none",), (16,))
    assert layout_search.space_of(config, 8, [], None, True).batch_sizes == (8, 16, 32, 64)
    single = experiment.unchecked("dense_lm.Small", ["input.batch_size=1"])
    assert layout_search.space_of(single, 8, [], None, True).batch_sizes == (1, 2, 4)
    with pytest.raises(UserError, match="--set layout=...: --search=layout looks for it; leave out --set layout"):
        layout_search.space_of(config, 8, ["layout=gspmd"], None, False)
    with pytest.raises(UserError, match="use --mesh to try one mesh alone"):
        layout_search.space_of(config, 8, ["mesh=8"], None, False)


def test_nothing_that_fits_is_an_error():
    """With the least memory that a layout needs, as far as weights leave headroom at all."""
    with pytest.raises(UserError, match="no layout fits a device of v3:4x4x1, of .* legal ones.*larger --topology"):
        config = experiment.unchecked("dense_lm.Dense1T")
        layout_search.rank(config, slice_of(4, 4, 1), Space(32, (128,), DeviceMesh((8, 4)), pipelines=("none",)))


@pytest.fixture
def compiled(monkeypatch):
    """Compiles instead: the first is refused, the second does not fit, the n-th takes n seconds."""
    numbers = itertools.count(1)

    def make(name, config, target, program, changes):
        time.sleep(0.01)
        number, model = next(numbers), config.model
        if number == 1:
            raise UserError("the first is refused")
        fits = number != 2
        return Plan(
            model=name, changes=tuple(changes), program=program, topology=target.name, mesh=str(config.mesh),
            devices=8, weights=1, layout=config.layout, remat=model.remat, batch_size=16, num_groups=16,
            num_experts=0, num_layers=4, activation_dtype="float32", tokens=2048, model_flops=1.0,
            memory=Memory(1, 1, 1, 1, 1 if fits else None, 2**34, None if fits else 2**35), collectives=(),
            cycles=1, rematerialised_cycles=0, cycles_by_part={}, compute_seconds=float(number) if fits else None,
            unknown_loops=0, lower_seconds=0.0, compile_seconds=0.0,
        )  # fmt: skip

    monkeypatch.setattr(plan, "make", make)

    def run(ranking: Ranking, budget_seconds: float, top: int) -> list[Found]:
        return list(
            layout_search.compile_best(
                "dense_lm.Small",
                slice_of(2, 2, 1),
                ranking,
                lambda changes: experiment.get("dense_lm.Small", list(changes)),
                budget_seconds,
                top,
            )
        )

    return run


def test_the_models_own_settings_and_the_best_are_compiled(compiled):
    """As many as asked, unless the budget ends; refusals have a reason."""
    ranking = ranked("dense_lm.Small", (2, 2, 1), pipelines=("none",), microbatches=1)
    found = compiled(ranking, 100.0, 6)
    assert len(found) == 7 and found[0].changes == () and found[0].refusal == "the first is refused"
    assert [one.tokens_per_second for one in found] == [0.0, 0.0, *(2048 / n for n in range(3, 8))]
    assert found[1].plan and not found[1].plan.fits
    text = layout_text.results(found)
    lines = [line for line in text.splitlines() if layout_text.flags(found[2]) in line]
    assert lines[0].startswith("  1 ") and "3.000 s" in lines[0] and "register_layout(" in text
    assert "refused" in text and "no fit 32.00 GiB" in text


def test_a_plan_without_a_time_may_fit(compiled):
    """Of a generation without a published clock."""
    ranking = ranked("dense_lm.Small", (2, 2, 1), mesh=DeviceMesh((8,)), pipelines=("none",), microbatches=1)
    found = compiled(ranking, 100.0, 2)[-1]
    found = dataclasses.replace(found, plan=dataclasses.replace(found.plan, compute_seconds=None))
    for text in (layout_text.compiled(found), layout_text.results([found])):
        assert "unknown" in text and not re.search("no fit|not fit", text, re.IGNORECASE)


def test_a_layout_for_another_number_of_axes_is_not_compared(compiled):
    """The model's own is for two axes, the mesh has one: others are found, and the first that is compiled is one."""
    config = dataclasses.replace(experiment.unchecked("dense_lm.Small", ["layout=gspmd"]), mesh=DeviceMesh((8,)))
    space = Space(8, (config.input.batch_size,), config.mesh, pipelines=("none",), microbatches=1)
    ranking = layout_search.rank(config, slice_of(2, 2, 1), space)
    assert ranking.own is None and ranking.best
    text = layout_text.predictions(ranking)
    assert "own the model's own settings do not fit this mesh" in text and "faster than the model's own" not in text
    assert [bool(found.changes) for found in compiled(ranking, 100.0, 2)] == [True, True]


def test_no_compilation_starts_that_would_exceed_the_budget(compiled):
    """A hundredth of a second each: the first has no estimate, a second one no time."""
    ranking = ranked("dense_lm.Small", (2, 2, 1), pipelines=("none",), microbatches=1)
    assert len(compiled(ranking, 0.005, 6)) == 1


def test_the_flags_of_the_result_select_it():
    """They make the candidate's layout, and so do the lines for a file."""
    ranking = ranked("dense_lm.Small", (2, 2, 1), pipelines=("none",), microbatches=1)
    for found in list(ranking.choices())[:5]:
        config = experiment.get("dense_lm.Small", found.changes)
        assert Layout.of(config.mesh, config.layout).rules == found.candidate.layout.rules
        assert config.model.remat == found.candidate.remat
    lines = layout_text.registration(found.candidate.layout.rules, 2)
    rules: list[AxisRule] = []
    exec(lines, {"AxisRule": AxisRule, "register_layout": lambda name, given, num_mesh_axes: rules.extend(given)})
    assert tuple(rules) == found.candidate.layout.rules


def test_own_settings_that_do_not_fit_are_marked():
    """A row like those that fit would be taken for a layout that can be used; the count of faster ones stays."""
    ranking = ranked("dense_lm.Small", (2, 2, 1), mesh=DeviceMesh((4, 2)), pipelines=("none",), microbatches=1)
    assert ranking.own is not None
    small = dataclasses.replace(ranking.own.estimate, available=2.0**20)
    text = layout_text.predictions(dataclasses.replace(ranking, own=dataclasses.replace(ranking.own, estimate=small)))
    (own,) = (line for line in text.splitlines() if line.startswith("own "))
    needed = f"{small.bytes / 2**20:.2f} MiB"
    assert f"{needed} DOES NOT FIT, a device has 1.00 MiB  the model's own settings" in own
    assert text.count("DOES NOT FIT") == 1
    as_it_is = layout_text.predictions(ranking)
    assert "DOES NOT FIT" not in as_it_is and text.splitlines()[2] == as_it_is.splitlines()[2]


def test_predictions_are_printed_with_their_reason():
    """A legend of the marks, the rank of the model's own settings, and what takes the time."""
    text = layout_text.predictions(ranked("dense_lm.Small", (2, 2, 1), pipelines=("none",), microbatches=1))
    assert (
        text.startswith("[m] the cost model   [c] ")
        and "legal layouts; " in text
        and "feed_forward" in text
        and "own" in text
        and "--set=layout=" in text
    )
