"""The k largest of a row without sorting the row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 64


def top(values: NDArray[Any], k: int) -> NDArray[np.intp]:
    """Indices of the k largest of `values` ([n], no NaN), largest first, the lower index first on a tie.

    The k-th largest of the maxima of disjoint blocks bounds the k-th largest value from below: one pass over the
    row finds the maxima, a second one the few values above the bound, and only those are sorted.
    """
    n = len(values)
    if k >= n:
        among = np.arange(n)
    else:
        pool = np.maximum.reduceat(values, np.arange(0, n, _BLOCK))
        if len(pool) < k:
            pool = values
        bound = np.partition(pool, len(pool) - k)[len(pool) - k]
        among = np.flatnonzero(values >= bound)
    return among[np.argsort(-values[among], kind="stable")[:k]]
