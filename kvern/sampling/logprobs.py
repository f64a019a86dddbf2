"""Logprobs of one position."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvern.sampling.topk import top
from kvern.step import TokenLogprobs

LOGPROB_FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say


def token_logprobs(logits: NDArray[np.float32], token: int, k: int) -> TokenLogprobs:
    """Logprobs of `token` and of the k likeliest tokens, from one row of raw logits [vocab].

    Natural logarithms of softmax(logits), before temperature, penalties, biases and cuts. The same token has the
    same float wherever it stands in the result. `rank` is the token's place in the order of the list: by logit,
    the lower id first on a tie. Nothing is below LOGPROB_FLOOR. Raises ValueError if the logits hold NaN or have
    no finite maximum.
    """
    peak = float(logits.max())
    if not math.isfinite(peak):
        raise ValueError(f"the largest logit is {peak}")
    log_total = peak + math.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64))
    own = logits[token]
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token] == own))
    ids = [token, *top(logits, k).tolist()] if k else [token]
    return TokenLogprobs(ids, [max(value - log_total, LOGPROB_FLOOR) for value in logits[ids].tolist()], rank)
