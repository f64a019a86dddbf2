"""Which angle belongs to which position and dimension."""

import math

import numpy as np
import pytest

from kvern.config import InvalidConfig
from kvern.layers.rotary import inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_plain_frequencies():
    got = inverse_frequencies(8, 10000.0)
    assert got.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert (inverse_frequencies(8, 10000.0, {"rope_type": "default"}) == got).all()


def test_linear_scaling_divides_positions():
    got = inverse_frequencies(8, 10000.0, {"rope_type": "linear", "factor": 4.0})
    assert got.tolist() == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


def test_llama3_keeps_high_frequencies_divides_low_ones_and_ramps_between():
    plain, got = inverse_frequencies(128, 500000.0), inverse_frequencies(128, 500000.0, LLAMA3)
    wavelength = 2 * math.pi / plain
    high, low = wavelength < 8192 / 4, wavelength > 8192
    assert high.any() and low.any() and not (high | low).all()
    np.testing.assert_allclose(got[high], plain[high], rtol=1e-12)
    np.testing.assert_allclose(got[low], plain[low] / 8, rtol=1e-12)
    between = ~(high | low)
    assert (np.diff(plain[between] / got[between]) > 0).all()
    assert ((plain / got)[between] > 1).all() and ((plain / got)[between] < 8).all()


def test_factors_as_a_gguf_file_stores_them_give_the_same():
    plain, want = inverse_frequencies(128, 500000.0), inverse_frequencies(128, 500000.0, LLAMA3)
    got = inverse_frequencies(128, 500000.0, {"rope_type": "factors", "factors": (plain / want).tolist()})
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_what_is_not_known_is_refused():
    with pytest.raises(InvalidConfig, match="yarn"):
        inverse_frequencies(8, 10000.0, {"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(InvalidConfig, match="factor"):
        inverse_frequencies(8, 10000.0, {"rope_type": "linear"})
