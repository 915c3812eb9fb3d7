"""Log-mel features find the frequency of a tone, have the stated number of frames, and ignore loudness."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lingvo_moe.data.log_mel import LogMel
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf

FEATURES = LogMel(sample_rate=8000, num_bins=20, highest=4000.0)


def features_of(samples: np.ndarray) -> np.ndarray:
    return FEATURES(tf.constant(samples.astype(np.float32))).numpy()


def mel(hertz: float) -> float:
    return 2595 * np.log10(1 + hertz / 700)


@pytest.mark.parametrize("hertz", [300.0, 1000.0, 3000.0])
def test_a_tone_that_begins_is_loudest_in_its_band(hertz):
    """Half a second of silence, then the tone: its energy rises most in the band whose centre is nearest."""
    times = np.arange(8000) / 8000
    tone = np.where(times > 0.5, np.sin(2 * np.pi * hertz * times), 0.0)
    edges = np.linspace(mel(FEATURES.lowest), mel(FEATURES.highest), FEATURES.num_bins + 2)
    nearest = np.abs(edges[1:-1] - mel(hertz)).argmin()
    energies = np.abs(np.fft.rfft(tone[4000:4200] * np.hanning(200), 256)) ** 2
    assert abs(np.fft.rfftfreq(256, 1 / 8000)[energies.argmax()] - hertz) < 40  # the oracle hears the tone, too
    found = features_of(tone)
    assert found[60:, nearest].min() > found[:45, nearest].max()


@pytest.mark.parametrize("samples, frames", [(10, 1), (200, 1), (279, 1), (280, 2), (8000, 98)])
def test_a_frame_every_step(samples, frames):
    """Windows of 200 samples, 80 apart; at least one."""
    found = features_of(np.random.default_rng(0).normal(size=samples))
    assert found.shape == (frames, FEATURES.num_bins) and np.all(np.isfinite(found))


def test_loudness_does_not_matter():
    """Far above the floor, a factor adds the same number to each logarithm, and means are subtracted."""
    samples = np.random.default_rng(0).normal(size=4000)
    # The floor is 1e-3 of energies of 1e2 and more.
    np.testing.assert_allclose(features_of(samples), features_of(4 * samples), atol=1e-2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_bins": 0}, "input.features.num_bins is 0; expected at least 1"),
        ({"frame_seconds": math.nan}, "input.features.frame_seconds is nan; expected a number above 0"),
        ({"frame_seconds": math.inf}, "input.features.frame_seconds is inf; expected a number above 0"),
        ({"frame_seconds": 1e30}, "frame_seconds is 1e[+]30, .* samples at .*; expected at least 1 and at most"),
        ({"step_seconds": 2e-5}, "step_seconds is 2e-05, 0.441 samples at sample_rate=22050; expected at least 1"),
        ({"lowest": math.nan}, "input.features.lowest is nan; expected at least 0"),
        ({"frame_seconds": 0.001}, "less than step_seconds"),
        ({"highest": 5000.0, "sample_rate": 8000}, "4000.0, half of sample_rate"),
    ],
)
def test_impossible_features_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        LogMel(**changes)
