"""Which drafts are accepted, and what is sampled in their place.

The model is run over all drafts of a row at once; then each position is sampled as if there were no drafts, in order,
and a draft counts if it is what was sampled. So the text with drafts *is* the text without, greedy or not, for every
seed:

  - The logits at a position are those of a run without drafts, as long as all tokens before it are; and the first token
    that differs from its draft ends the run.
  - Bias, min_tokens and penalties see the position's own history: what was sampled before it is appended first.
  - The random number of a position is a function of seed and position (kvern.sampling.rng): it does not matter in
    which step, or how often, a position is sampled.

Rejection sampling (Leviathan, Kalman, Matias 2023) keeps only the distribution, at the price of other texts. It accepts
more where a draft model has probabilities of its own; a draft that was looked up has none, and its chance is the same
either way: the model's probability of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvern.sampling.sampler import Float32, Sampler
from kvern.step import Int32, TokenLogprobs


@dataclass(slots=True)
class Verified:
    """token_ids: int32 [n, k], the accepted drafts, then one token of the model's own; count: int32 [n], how many of
    the k are valid, 0 if the row failed. logprobs: row -> one entry per valid token. errors: row -> why it failed."""

    token_ids: Int32
    count: Int32
    logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]


def count_drafts(drafts: dict[int, list[int]], rows: Int32) -> Int32:
    """How many drafts each of rows [n] has: int32 [n]."""
    if not drafts:
        return np.zeros(len(rows), dtype=np.int32)
    return np.array([len(drafts.get(row, ())) for row in rows.tolist()], dtype=np.int32)


def sample_and_verify(
    sampler: Sampler,
    logits: Float32,
    rows: Int32,
    positions: Int32,
    drafts: dict[int, list[int]],
    best: tuple[Int32, Float32] | None = None,
) -> Verified:
    """Sample the occupants of rows [n], whose next token is the one at positions [n], against drafts (row -> tokens).

    logits: [sum of 1 + number of drafts, vocab], row after row: of the token at positions[i], then of the one after
    each of its drafts. best: index and value of the largest of each, if known. The sampler learns of every valid token.

    A failure at the first position is the row's. One further on only ends the run before it: without drafts, the tokens
    up to there would have been delivered.
    """
    num_drafts = count_drafts(drafts, rows)
    first = np.cumsum(num_drafts + 1) - (num_drafts + 1)
    proposed = np.full((len(rows), int(num_drafts.max(initial=0)) + 1), -1, dtype=np.int32)
    for i in num_drafts.nonzero()[0].tolist():
        proposed[i, : num_drafts[i]] = drafts[int(rows[i])]
    result = Verified(np.zeros_like(proposed), np.zeros(len(rows), dtype=np.int32), {}, {})
    going: NDArray[np.intp] = np.arange(len(rows))
    for column in range(proposed.shape[1]):
        places = first[going] + column
        sampled = sampler.sample(logits, rows[going], positions[going] + column, places=places, best=best)
        tokens = sampled.token_ids
        if sampled.errors:
            if not column:
                result.errors.update(sampled.errors)
            good = [row not in sampled.errors for row in rows[going].tolist()]
            going, tokens = going[good], tokens[good]
        for row, entry in sampled.logprobs.items():
            result.logprobs.setdefault(row, []).append(entry)
        result.token_ids[going, column] = tokens
        result.count[going] = column + 1
        sampler.append(rows[going], tokens)
        going = going[tokens == proposed[going, column]]
        if not len(going):
            break
    return result
