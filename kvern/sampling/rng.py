"""Random numbers without state: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011).

A draw is a function of (seed, position) alone, so a request gets the same numbers in any batch slot, after a
preemption, or when its step is computed again.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key each round: golden ratio, sqrt(3) - 1
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The 128 random bits of `counter` under `key`; all words are 32 bits, unsigned."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1), a multiple of 2**-53, that belongs to `position` of the sequence under `seed`.

    Seeds count modulo 2**64: -1 and 2**64 - 1 are the same one.
    """
    return (_bits(seed, position, 0) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of the request number `index` under `seed`, 64 bits; no number that `uniform` uses."""
    return _bits(seed, index, 1)


def _bits(seed: int, index: int, purpose: int) -> int:
    """64 bits: the key is the seed, the counter the index and what the bits are for."""
    key = (seed & _MASK, seed >> 32 & _MASK)
    high, low, _, _ = philox4x32((index & _MASK, index >> 32 & _MASK, purpose, 0), key)
    return high << 32 | low
