"""The generator against the published vectors of Philox4x32-10, and the numbers made of it."""

import numpy as np
import pytest

from kvern.sampling.rng import derive_seed, philox4x32, uniform

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_vectors(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniform_is_a_function_of_seed_and_position_made_of_53_bits():
    assert uniform(0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(s, p) for s in range(50) for p in range(50)}) == 2500


def test_all_64_bits_of_the_seed_count_and_negative_seeds_wrap():
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    assert len({uniform(1 << b, 0) for b in range(64)}) == 64


def test_derived_seeds_are_64_bits_of_their_own():
    seeds = [derive_seed(s, i) for s in (0, 1, -1) for i in range(1000)]
    assert len(set(seeds)) == 3000 and max(seeds) >= 2**63 and min(seeds) >= 0
    assert not {seed >> 11 for seed in seeds} & {int(uniform(s, i) * 2**53) for s in (0, 1, -1) for i in range(1000)}


def test_uniform_is_spread_evenly_along_positions_and_along_seeds():
    for draws in ([uniform(1234, p) for p in range(20_000)], [uniform(s, 17) for s in range(20_000)]):
        counts = np.bincount((np.array(draws) * 100).astype(int), minlength=100)
        chi2 = float(((counts - 200) ** 2 / 200).sum())
        assert chi2 < 149  # 99 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
