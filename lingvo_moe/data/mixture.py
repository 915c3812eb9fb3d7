"""Temperature sampling of languages: example n of the training stream as a pure function of the seed and n.

A massively multilingual corpus has a few languages with millions of pairs and many with hundreds. M4 (Arivazhagan et
al. 2019, section 4) samples language l with probability p_l proportional to n_l ** (1 / temperature), where n_l is its
number of pairs: temperature 1 keeps the proportions of the corpus, infinity gives all languages the same probability;
M4 and GShard use 5.

The stream is divided into windows of WINDOW examples. Every window contains language l exactly quota_l times, where
quota_l is p_l * WINDOW rounded to an integer, at least one (method of largest remainders), and the quotas sum to
WINDOW. Inside a window the languages are in a pseudo-random order that depends on (seed, window). So example n is
example c of its language,

    c = (n // WINDOW) * quota_l + (the number of examples of l before n in its window)

and its pair is entry c % n_l of the pseudo-random permutation of range(n_l) that depends on (seed, l, c // n_l): within
an epoch of a language every pair occurs once. No example depends on the sampling of another one, so a stream resumes at
any n in constant time, and every host computes its own examples.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import ArrayLike

from lingvo_moe.errors import UserError

WINDOW = 1 << 16
_FEISTEL_ROUNDS = 8  # with 4, the orders of a few entries are measurably not equally frequent


@dataclasses.dataclass(frozen=True)
class Mixture:
    """An endless stream over several languages by temperature sampling, with random access.

    Attributes:
      sizes: the number of pairs of each language; a language without pairs is never sampled.
      temperature: > 0, may be `math.inf`.
      seed: of the stream.

    Raises:
      UserError: no pairs at all, more languages than WINDOW, or a temperature that is not positive.
    """

    sizes: tuple[int, ...]
    temperature: float = 5.0
    seed: int = 0

    def __post_init__(self):
        if not self.temperature > 0:
            raise UserError(
                f"temperature={self.temperature}: expected a number above 0 (1: in proportion, inf: all equal)."
            )
        if not any(self.sizes):
            raise UserError("the corpus has no training pairs. Build it again: python -m tools.build_corpus.")
        if len(self.sizes) > WINDOW:
            raise UserError(f"{len(self.sizes)} languages are more than a mixture supports ({WINDOW}).")

    @functools.cached_property
    def quotas(self) -> np.ndarray:
        """The number of examples of each language in a window, `[languages] int64`; sums to WINDOW."""
        sizes = np.asarray(self.sizes, np.float64)
        present = sizes > 0
        weights = np.where(present, (sizes / sizes.max()) ** (1 / self.temperature), 0.0)
        ideal = weights / weights.sum() * WINDOW
        quotas = np.where(present, np.maximum(np.floor(ideal), 1), 0)
        while (missing := WINDOW - quotas.sum()) != 0:
            step = np.sign(missing)
            gain = np.where(present & (quotas + step >= 1), step * (ideal - quotas), -np.inf)
            quotas[np.argmax(gain)] += step
        return quotas.astype(np.int64)

    def sample(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the stream has at some positions.

        Args:
          indices: of the examples, `[N] int64`.

        Returns:
          The language of each example and the index of its pair in that language, both `[N] int64`.
        """
        indices = np.asarray(indices, np.int64)
        windows, offsets = np.divmod(indices, WINDOW)
        languages, counts = np.empty_like(indices), np.empty_like(indices)
        for window in np.unique(windows):
            mask = windows == window
            languages[mask], counts[mask] = (values[offsets[mask]] for values in _window(self, int(window)))
        counts += windows * self.quotas[languages]
        sizes = np.asarray(self.sizes, np.int64)[languages]
        epochs, entries = np.divmod(counts, sizes)
        return languages, permute(entries, sizes, _key(self.seed, 1, languages, epochs))


@functools.lru_cache(maxsize=4)
def _window(mixture: Mixture, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the language at each offset, and its count before that offset in the window: both `[WINDOW] int64`."""
    offsets = np.arange(WINDOW, dtype=np.int64)
    shuffled = permute(offsets, WINDOW, _key(mixture.seed, 0, window, 0))
    languages = np.repeat(np.arange(len(mixture.sizes)), mixture.quotas)[shuffled]
    by_language = np.argsort(languages, kind="stable")
    before = np.empty_like(offsets)
    before[by_language] = offsets - np.repeat(np.cumsum(mixture.quotas) - mixture.quotas, mixture.quotas)
    return languages, before


def permute(entries: ArrayLike, sizes: ArrayLike, keys: ArrayLike) -> np.ndarray:
    """Returns the image of each entry under the pseudo-random permutation of range(size) that a key selects.

    A Feistel network on the smallest even number of bits that holds the size, repeated until the result is below the
    size (Black and Rogaway 2002, "cycle walking"): exact for every size, without storing the permutation.

    Args:
      entries: `[N] int64`, 0 <= entry < size.
      sizes: `[N]` or scalar `int64`.
      keys: `[N]` or scalar `uint64`.

    Returns:
      `[N] int64`.
    """
    entries, sizes, keys = np.broadcast_arrays(entries, sizes, keys)
    half_bits = (np.ceil(np.log2(sizes)).astype(np.uint64) + np.uint64(1)) // np.uint64(2)
    result = entries.astype(np.uint64)
    outside = np.arange(entries.size)
    while outside.size:
        result[outside] = _feistel(result[outside], half_bits[outside], keys[outside])
        outside = outside[result[outside] >= sizes[outside].astype(np.uint64)]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for number in range(_FEISTEL_ROUNDS):
        left, right = right, left ^ (_hash(right ^ _hash(keys + np.uint64(number))) & mask)
    return left << half_bits | right


def _key(seed: int, purpose: int, first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Returns a `uint64` hash of the four arguments, per element."""
    key = _hash(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    for part in (purpose, first, second):
        key = _hash(key ^ np.atleast_1d(np.asarray(part, np.int64)).astype(np.uint64))
    return key


def _hash(values: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea, Flood 2014) of a `uint64` array; arithmetic wraps."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
