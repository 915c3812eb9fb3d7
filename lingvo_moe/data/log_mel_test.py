"""Log-mel features are those of the definition, have the stated number of frames, and depend little on loudness."""

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


def mel(hertz):
    return 2595 * np.log10(1 + hertz / 700)  # HTK's scale


def triangles(bins: int) -> np.ndarray:
    """Returns the weights of the bands, `[bins, 20]`: each rises, on the mel scale, from one edge to the next one."""
    edges = np.linspace(mel(60.0), mel(4000.0), 20 + 2)
    at = mel(np.linspace(0.0, 4000.0, bins))[:, None]
    rising = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    weights = np.maximum(0.0, np.minimum(rising, falling))
    weights[0] = 0.0  # the constant part belongs to no band
    return weights


def by_definition(samples: np.ndarray) -> np.ndarray:
    """Returns the features of at least 200 samples, 8000 a second: frames of 25 ms, one each 10 ms."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200)  # Hann's, periodic
    frames = [samples[start : start + 200] * window for start in range(0, len(samples) - 199, 80)]
    power = np.abs(np.fft.rfft(frames, 256)) ** 2
    energies = np.log(power @ triangles(129) + 1e-3)
    return (energies - energies.mean(0)) / np.sqrt(energies.var(0) + 1e-3)


def test_features_are_those_of_the_definition():
    """Against NumPy, of a rising tone and noise: window, power, bands, floor and normalisation."""
    times = np.arange(8000) / 8000
    rising = np.sin(2 * np.pi * (100 * times + 1900 * times**2))  # from 100 to 3900 Hz
    samples = 0.3 * rising + 1e-3 * np.random.default_rng(0).normal(size=8000)
    expected = by_definition(samples)
    assert np.abs(expected).max() > 3  # the tone stands out of each band
    np.testing.assert_allclose(features_of(samples), expected, atol=2e-3)


@pytest.mark.parametrize("samples, frames", [(10, 1), (200, 1), (279, 1), (280, 2), (8000, 98)])
def test_a_frame_every_step(samples, frames):
    """Windows of 200 samples, 80 apart; at least one."""
    found = features_of(np.random.default_rng(0).normal(size=samples))
    assert found.shape == (frames, FEATURES.num_bins) and np.all(np.isfinite(found))


def test_loudness_matters_by_the_floor_alone():
    """A factor adds the same number to each logarithm, and means are subtracted: but not of energies near the floor.

    Samples are in [-1, 1]. Loud noise, whose energies are 1 and more, may be louder; quiet noise may not.
    """
    noise = np.random.default_rng(0).uniform(-0.25, 0.25, size=4000)
    np.testing.assert_allclose(features_of(noise), features_of(4 * noise), atol=2e-2)
    assert np.abs(features_of(1e-3 * noise) - features_of(4e-3 * noise)).max() > 0.5


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
