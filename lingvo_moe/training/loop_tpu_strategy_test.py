"""Training on the TPUStrategy engine has the losses of the PJRT engine; each resumes from the other's checkpoint.

The slice is this machine, see `testing.local_tpu`.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.engines import pjrt, tpu_strategy
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing import harness, local_tpu
from lingvo_moe.training import loop
from lingvo_moe.training.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

# As in engines/tpu_strategy_test.py: sums of float32 products in another order, by another build of XLA.
TRAINED_TOLERANCE = 1e-5
CHANGES = (
    "model.num_experts=8",
    "model.num_groups=8",
    "input.batch_size=8",
    "training.steps_per_loop=3",
    "training.log_every=3",
    "training.checkpoint_every=3",
    "training.evaluate_every=6",
)


class _Slice:
    """A slice on this machine, which compiles once for all runs; each begins with `initialise` or `load`."""

    def __init__(self):
        self._engine = local_tpu.engine()
        self.devices, self.platform = self._engine.devices, self._engine.platform

        self._training: tpu_strategy.Training | None = None

    def training(self, steps, batch_specs: dict, evaluates: bool) -> tpu_strategy.Training:
        self._training = self._training or self._engine.training(steps, batch_specs, evaluates)
        return self._training


@pytest.fixture(scope="module")
def engines() -> dict:
    """Both engines, whose programs run on this machine and are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        tiny.compile_once(patch)
        local_tpu.run_programs_here(patch)
        yield {"pjrt": pjrt.Engine(8, "cpu"), "tpu_strategy": _Slice()}


def _experiment(data: tiny.Data, steps: int) -> Experiment:
    return dataclasses.replace(
        tiny.tiny_language_model(data, *CHANGES, f"training.steps={steps}"), mesh=DeviceMesh((8,))
    )


def _train(data: tiny.Data, steps: int, engine, logdir: pathlib.Path, weights=None) -> dict[str, float]:
    return loop.train("tiny", _experiment(data, steps), engine, logdir, initial_weights=weights)


@pytest.fixture(scope="module")
def uninterrupted(data, engines, tmp_path_factory) -> pathlib.Path:
    """The log directory of six steps on the PJRT engine."""
    logdir = tmp_path_factory.mktemp("uninterrupted")
    _train(data, 6, engines["pjrt"], logdir)
    return logdir


def _assert_same_losses(found: pathlib.Path, expected: pathlib.Path):
    for run in ("train", "valid"):
        losses, wanted = (tiny.curves(logdir, run)["cross_entropy"] for logdir in (found, expected))
        assert wanted
        for step in wanted:
            np.testing.assert_allclose(list(losses[step]), list(wanted[step]), rtol=TRAINED_TOLERANCE)


def test_a_run_has_the_losses_of_the_pjrt_engine(data, engines, uninterrupted, tmp_path):
    """Two loops of three steps from the same seed, then the held-out loss."""
    metrics = _train(data, 6, engines["tpu_strategy"], tmp_path)
    assert metrics["skipped"] == 0 and np.isfinite(metrics["valid/cross_entropy"])
    _assert_same_losses(tmp_path, uninterrupted)


@pytest.mark.parametrize("first, then", [("pjrt", "tpu_strategy"), ("tpu_strategy", "pjrt")])
def test_each_engine_resumes_from_the_checkpoint_of_the_other(data, engines, uninterrupted, tmp_path, first, then):
    for name, steps in ((first, 3), (then, 6)):
        _train(data, steps, engines[name], tmp_path)
    assert Checkpoints(tmp_path).latest() == 6
    _assert_same_losses(tmp_path, uninterrupted)


def test_each_engine_starts_with_the_weights_of_a_checkpoint(data, engines, uninterrupted, tmp_path):
    """One reads them into its devices, the other into its variables."""
    for name, engine in engines.items():
        _train(data, 3, engine, tmp_path / name, uninterrupted)
    _assert_same_losses(tmp_path / "tpu_strategy", tmp_path / "pjrt")
    first = [min(tiny.curves(logdir)["cross_entropy"][3]) for logdir in (tmp_path / "pjrt", uninterrupted)]
    assert first[0] < first[1]


def _assert_one_weight_is_set(training, before: dict[str, np.ndarray]):
    """A sharded one, from its whole value."""
    path = max((path for path in before if path.startswith("theta/")), key=lambda path: before[path].size)
    value = np.arange(before[path].size, dtype=np.float32).reshape(before[path].shape)
    training.set_weight(path.removeprefix("theta/"), value)
    for name, array in harness.arrays(training.state).items():
        np.testing.assert_array_equal(array, value if name == path else before[name], err_msg=name)


def test_both_engines_initialise_the_same_bits(data, engines):
    config = _experiment(data, 6)
    states = []
    for engine in engines.values():
        training = engine.training(config.steps, config.batch_specs(), False)
        training.initialise(config.training.seed)
        states.append(harness.arrays(training.state))
        _assert_one_weight_is_set(training, states[-1])
    assert states[0].keys() == states[1].keys() == tree.flatten(config.steps.state_specs()).keys()
    for path, value in states[0].items():
        np.testing.assert_array_equal(states[1][path], value, err_msg=path)
