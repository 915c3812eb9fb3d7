"""Log-mel features of recordings, as `tf.signal` computes them: what a speech model reads."""

from __future__ import annotations

import dataclasses

from lingvo_moe import ranges
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ranges import ABOVE_0, COUNT, Range

# Added to the energy of a band, so that silence has a logarithm. Noise of one unit of 16 bits has energies near 6e-7,
# noise of a hundredth of full scale near 3e-2: what is much quieter than the latter, the floor hides.
_FLOOR = 1e-3


@dataclasses.dataclass(frozen=True)
class LogMel:
    """The logarithms of the energies in bands of frequencies, of one frame after another.

    Of each band, mean and standard deviation over the recording are 0 and 1, so a voice's loudness and the channel do
    not matter as far as energies are above the floor. Of a recording with pauses they do: the louder it is, the further
    the voice stands out of the pauses, whose energies are the floor.

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
        counts = dict.fromkeys(("sample_rate", "num_bins"), COUNT)
        numbers = dict.fromkeys(("frame_seconds", "step_seconds", "highest"), ABOVE_0)
        ranges.check("input.features.", self, {**counts, **numbers, "lowest": Range()})
        for name in ("step_seconds", "frame_seconds"):
            samples = getattr(self, name) * self.sample_rate
            if not 0.5 < samples <= COUNT.maximum:  # rounded, they are a length in int32
                raise UserError(
                    f"input.features.{name} is {getattr(self, name)}, {samples:.3g} samples at sample_rate="
                    f"{self.sample_rate}; expected {COUNT} samples."
                )
        if self.frame_seconds < self.step_seconds:
            raise UserError(
                f"input.features.frame_seconds is {self.frame_seconds}, less than step_seconds, {self.step_seconds}: "
                f"samples between two frames would be lost."
            )
        if not self.lowest < self.highest <= self.sample_rate / 2:
            raise UserError(
                f"input.features.lowest and highest are {self.lowest} and {self.highest} Hz; expected "
                f"0 <= lowest < highest <= {self.sample_rate / 2}, half of sample_rate."
            )

    def __call__(self, samples: tf.Tensor) -> tf.Tensor:
        """`[samples] float32` in [-1, 1] to `[frames, F] float32`; a recording shorter than a frame has one frame."""
        length, step = self._samples(self.frame_seconds), self._samples(self.step_seconds)
        padded = tf.pad(samples, [[0, tf.maximum(length - tf.size(samples), 0)]])
        spectrum = tf.abs(tf.signal.stft(padded, length, step))
        bands = tf.signal.linear_to_mel_weight_matrix(
            self.num_bins, spectrum.shape[-1], self.sample_rate, self.lowest, self.highest
        )
        energies = tf.math.log(tf.square(spectrum) @ bands + _FLOOR)
        mean, variance = tf.nn.moments(energies, axes=[0])
        return (energies - mean) * tf.math.rsqrt(variance + _FLOOR)

    def _samples(self, seconds: float) -> int:
        return round(seconds * self.sample_rate)
