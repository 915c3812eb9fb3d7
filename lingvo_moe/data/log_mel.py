"""Log-mel features of recordings, as `tf.signal` computes them: what a speech model reads."""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf

_FLOOR = 1e-3  # added to the energy of a bin: a sample of 16 bits is at least 3e-5, and 512 of them make up a frame


@dataclasses.dataclass(frozen=True)
class LogMel:
    """The logarithms of the energies in bands of frequencies, of one frame after another.

    Of each band, mean and standard deviation over the recording are 0 and 1, so a voice's loudness and the channel do
    not matter.

    Attributes:
      sample_rate: of the recordings, in samples per second.
      num_bins: F, the bands, whose widths are equal on the mel scale.
      frame_seconds: of a frame's window.
      step_seconds: from a frame to the next one.
      lowest, highest: edges of the bands, in Hz.

    Raises:
      UserError: sizes that give no features.
    """

    sample_rate: int = 22_050
    num_bins: int = 80
    frame_seconds: float = 0.025
    step_seconds: float = 0.01
    lowest: float = 60.0
    highest: float = 7600.0

    def __post_init__(self):
        for name in ("sample_rate", "num_bins", "step_seconds"):
            if getattr(self, name) <= 0:
                raise UserError(f"features.{name} is {getattr(self, name)}; expected a number above 0.")
        if self.frame_seconds < self.step_seconds:
            raise UserError(
                f"features.frame_seconds is {self.frame_seconds}, less than step_seconds, {self.step_seconds}: samples "
                f"between two frames would be lost."
            )
        if not 0 <= self.lowest < self.highest <= self.sample_rate / 2:
            raise UserError(
                f"features.lowest and highest are {self.lowest} and {self.highest} Hz; expected 0 <= lowest < highest "
                f"<= {self.sample_rate / 2}, half of sample_rate."
            )

    def __call__(self, samples: tf.Tensor) -> tf.Tensor:
        """`[samples] float32` in [-1, 1] to `[frames, F] float32`; a recording shorter than a frame has one frame."""
        length, step = (round(seconds * self.sample_rate) for seconds in (self.frame_seconds, self.step_seconds))
        padded = tf.pad(samples, [[0, tf.maximum(length - tf.size(samples), 0)]])
        spectrum = tf.abs(tf.signal.stft(padded, length, step))
        bands = tf.signal.linear_to_mel_weight_matrix(
            self.num_bins, spectrum.shape[-1], self.sample_rate, self.lowest, self.highest
        )
        energies = tf.math.log(tf.square(spectrum) @ bands + _FLOOR)
        mean, variance = tf.nn.moments(energies, axes=[0])
        return (energies - mean) * tf.math.rsqrt(variance + _FLOOR)
