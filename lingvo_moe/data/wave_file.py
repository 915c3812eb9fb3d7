"""Reads recordings from WAV files."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from lingvo_moe.errors import UserError
from lingvo_moe.utils.counts import counted

CONVERT = "Convert it, for example with: ffmpeg -i FILE -ac 1 -ar RATE -c:a pcm_s16le NEW.wav"
_ENCODING = np.dtype("<i2")


def read(path: Path, where: str = "") -> tuple[int, np.ndarray]:
    """Reads a recording.

    Args:
      path: the file.
      where: what names it, for errors; its path is added.

    Returns:
      (samples per second, samples `[count] int16`).

    Raises:
      UserError: a file that cannot be read, or has no samples of 16 bits of one channel.
    """
    where = f"{where}: {path}" if where else str(path)
    try:
        with wave.open(str(path), "rb") as file:
            found = file.getnchannels(), 8 * file.getsampwidth()
            rate, samples = file.getframerate(), file.readframes(file.getnframes())
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}).") from None
    except (wave.Error, EOFError) as error:
        raise UserError(f"{where}: not a WAV file of PCM samples ({error}). {CONVERT}") from None
    if found != (1, 16):
        raise UserError(
            f"{where}: {counted(found[0], 'channel')} of {found[1]} bits; expected one of 16 bits. {CONVERT}"
        )
    if not samples:
        raise UserError(f"{where}: no sample; leave it out.")
    return rate, np.frombuffer(samples, _ENCODING)
