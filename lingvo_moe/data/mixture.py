"""Which example is number n of the training stream: a pure function of the seed and n.

A massively multilingual corpus has a few languages with millions of pairs and many with hundreds. M4 (Arivazhagan et
al. 2019, section 4) draws language l with probability p_l proportional to n_l ** (1 / temperature), n_l being its
number of pairs: temperature 1 keeps the proportions of the corpus, infinity makes all languages equal; M4 and GShard
use 5.

The stream is cut into blocks of BLOCK examples. Every block holds language l exactly quota_l times, quota_l being
p_l * BLOCK rounded to a whole number, at least one (largest remainders), and the quotas add up to BLOCK. Inside a block
the languages stand in a pseudo-random order that depends on (seed, block). So example n is number c of its language,

    c = (n // BLOCK) * quota_l + (how often l stands before n in its block)

and the pair that it names is entry c % n_l of the pseudo-random permutation of range(n_l) that depends on
(seed, l, c // n_l): within an epoch of a language every pair comes once. Nothing is drawn one after another, so a
stream resumes at any n in constant time, and hosts can each take their own n.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from lingvo_moe.errors import UserError

BLOCK = 1 << 16
_FEISTEL_ROUNDS = 8  # with 4, the orders of a handful of entries are visibly not equally frequent


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A temperature-weighted, endless, randomly addressable stream over several languages.

    Attributes:
      sizes: the number of pairs of each language; a language without pairs is never drawn.
      temperature: > 0, may be `math.inf`.
      seed: another seed is another stream.

    Raises:
      UserError: no pairs at all, more languages than a block has places, or a temperature that is not positive.
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
            raise UserError("The corpus has no training pairs. Build it again: python -m tools.build_corpus.")
        if len(self.sizes) > BLOCK:
            raise UserError(f"{len(self.sizes)} languages are more than a mixture can hold ({BLOCK}).")

    @functools.cached_property
    def quotas(self) -> np.ndarray:
        """How often each language stands in a block, `[languages] int64`; sums to BLOCK."""
        sizes = np.asarray(self.sizes, np.float64)
        present = sizes > 0
        weights = np.where(present, (sizes / sizes.max()) ** (1 / self.temperature), 0.0)
        ideal = weights / weights.sum() * BLOCK
        quotas = np.where(present, np.maximum(np.floor(ideal), 1), 0)
        while (missing := BLOCK - quotas.sum()) != 0:
            step = np.sign(missing)
            gain = np.where(present & (quotas + step >= 1), step * (ideal - quotas), -np.inf)
            quotas[np.argmax(gain)] += step
        return quotas.astype(np.int64)

    def draw(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (language, index of the pair in its language), both `[N] int64`, of the examples `numbers` `[N]`."""
        numbers = np.asarray(numbers, np.int64)
        blocks, places = np.divmod(numbers, BLOCK)
        languages, counts = np.empty_like(numbers), np.empty_like(numbers)
        for block in np.unique(blocks):
            here = blocks == block
            languages[here], counts[here] = (values[places[here]] for values in _block(self, int(block)))
        counts += blocks * self.quotas[languages]
        sizes = np.asarray(self.sizes, np.int64)[languages]
        epochs, entries = np.divmod(counts, sizes)
        return languages, permute(entries, sizes, _key(self.seed, 1, languages, epochs))


@functools.lru_cache(maxsize=4)
def _block(mixture: Mixture, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each place's language, and how often it stands before that place in the block: both `[BLOCK] int64`."""
    places = np.arange(BLOCK, dtype=np.int64)
    shuffled = permute(places, np.int64(BLOCK), _key(mixture.seed, 0, np.int64(block), np.int64(0)))
    languages = np.repeat(np.arange(len(mixture.sizes)), mixture.quotas)[shuffled]
    by_language = np.argsort(languages, kind="stable")
    before = np.empty_like(places)
    before[by_language] = places - np.repeat(np.cumsum(mixture.quotas) - mixture.quotas, mixture.quotas)
    return languages, before


def permute(entries: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns where a pseudo-random permutation of range(size), named by a key, sends each entry.

    A Feistel network on the smallest even number of bits that holds the size, walked on until it lands inside (Black
    and Rogaway 2002, "cycle walking"): exact for every size, without storing the permutation.

    Args:
      entries: `[N] int64`, 0 <= entry < size.
      sizes: `[N]` or scalar `int64`.
      keys: `[N]` or scalar `uint64`.
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
    for turn in range(_FEISTEL_ROUNDS):
        left, right = right, left ^ (_hash(right ^ _hash(keys + np.uint64(turn))) & mask)
    return left << half_bits | right


def _key(seed: int, purpose: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns a `uint64` per element that depends on all four."""
    key = _hash(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    for part in (np.int64(purpose), first, second):
        key = _hash(key ^ np.atleast_1d(part).astype(np.uint64))
    return key


def _hash(values: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea, Flood 2014) of a `uint64` array; arithmetic wraps."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
