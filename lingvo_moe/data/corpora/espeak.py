"""Speech synthesis with eSpeak NG, of the package espeakng-loader: text to samples, offline.

A process has one synthesiser. The samples of a text depend on the voice and, in the last digits, on what the process
has synthesised before, so a process that synthesises the same texts in the same order gets the same samples.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import numpy as np

from lingvo_moe.errors import UserError

# Of espeak-ng/speak_lib.h, version 1.52.
_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: `espeak_Synth` returns when the callback has had all samples
_UTF8 = 1
_RATE, _PITCH = 1, 3
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
_SEED = 1


class Espeak:
    """The synthesiser of this process.

    Attributes:
      sample_rate: of what it returns, in samples per second.
    """

    def __init__(self):
        """Loads the library; raises UserError if the package is not installed, or not complete."""
        if importlib.util.find_spec("espeakng_loader") is None:
            raise UserError(
                "recordings are spoken by eSpeak NG, and the package espeakng-loader is not installed. Install it: "
                "pip install espeakng-loader==0.2.4."
            )
        import espeakng_loader

        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_Synth.argtypes = [
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        data = espeakng_loader.get_data_path().encode()
        self.sample_rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
        if self.sample_rate <= 0:  # an error's number
            raise UserError("eSpeak NG cannot read its data; install the package espeakng-loader again.")
        self._chunks: list[bytes] = []
        self._callback = _Callback(self._collect)  # as long as the library may call it
        self._library.espeak_SetSynthCallback(self._callback)
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(_SEED))

    def synthesize(self, text: str, voice: str, rate: int = 175, pitch: int = 50) -> np.ndarray:
        """Returns the samples of a text, `[count] int16`.

        Args:
          text: in the language of the voice.
          voice: a language of eSpeak NG and a variant: `en-us+f3`.
          rate: words per minute.
          pitch: 0 to 99.

        Raises:
          UserError: there is no such voice, or it cannot speak the text.
        """
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise UserError(f"eSpeak NG has no voice {voice!r}; see docs/languages.md in its repository.")
        self._library.espeak_SetParameter(_RATE, rate, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        self._chunks.clear()
        encoded = text.encode() + b"\0"
        if self._library.espeak_Synth(encoded, len(encoded), 0, 1, 0, _UTF8, None, None):
            raise UserError(f"eSpeak NG cannot speak {text!r} with the voice {voice!r}.")
        return np.frombuffer(b"".join(self._chunks), np.int16).copy()

    def _collect(self, samples: Any, count: int, events: Any) -> int:
        del events
        if count > 0:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
        return 0  # continue
