"""Engines by name, and what each of them refuses."""

from __future__ import annotations

import pytest

from lingvo_moe.engines import registry
from lingvo_moe.engines.registry import EngineOptions
from lingvo_moe.errors import UserError
from lingvo_moe.testing.fake_engine import FakeEngine


def _without_options():
    return FakeEngine()


@pytest.fixture(autouse=True)
def registrations_end_with_the_test():
    with registry.ENGINES.isolated():
        yield


def test_a_registered_engine_is_made_by_its_name():
    asked = []
    registry.register_engine("mine")(lambda options: asked.append(options) or FakeEngine(options.num_devices))
    options = EngineOptions(purpose="decode", num_devices=4)
    assert len(registry.make("mine", options).devices) == 4 and asked == [options]
    assert registry.ENGINES.names() == ("pjrt", "tpu_strategy", "mine")


def test_an_unknown_name_is_an_error():
    with pytest.raises(
        UserError, match="engine 'pjtr' is unknown. Did you mean pjrt.*Known: pjrt, tpu_strategy. --import"
    ):
        registry.make("pjtr", EngineOptions())


def test_what_makes_no_engine_is_named():
    """When it is registered, or else when it has been called."""
    with pytest.raises(UserError, match=r"^engine 'mine' takes \(\); it is called with \(options\)"):
        registry.register_engine("mine")(_without_options)
    registry.register_engine("none")(lambda options: None)
    with pytest.raises(UserError, match="^engine 'none': the result, None, has no devices, platform, .*Engine in"):
        registry.make("none", EngineOptions())


def test_the_pjrt_engine_is_one_of_them():
    assert len(registry.make("pjrt", EngineOptions(num_devices=2, platform="cpu")).devices) == 2


@pytest.mark.parametrize("purpose", ["evaluate", "decode", "diagnose"])
def test_the_tpu_strategy_engine_refuses_what_it_cannot_do_before_it_looks_for_a_tpu(purpose):
    with pytest.raises(
        UserError, match="--engine=tpu_strategy only trains; .* with --engine=pjrt, which reads the same"
    ):
        registry.make("tpu_strategy", EngineOptions(purpose=purpose, tpu="local"))
