"""From logits to tokens, for a batch.

What happens to a row, in this order: logit bias, min_tokens (EOS and stop ids are masked), repetition, then
frequency and presence penalties, temperature, min_p, top_k, top_p, one draw. Each cut works on what the one before
it left, renormalised. The draw is the inverse of the cumulative distribution in token id order, at the one number
`rng.uniform(seed, position)`.

A row's result depends on nothing but its logits, its parameters and history, and its position: rows that need more
than an argmax are computed each in a buffer of its own, so neighbours and batch order change no bit. `sample_rows` does
it in NumPy, one after the other, and is the oracle of the native kernel (kvern.sampling.native).

The sampler owns what it remembers of a row between add_row and remove_row; it writes to nothing it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.sampling.logprobs import token_logprobs
from kvern.sampling.penalties import TokenHistory, apply_penalties, has_penalties
from kvern.sampling.rng import uniform
from kvern.sampling.topk import top
from kvern.sampling_params import SamplingParams
from kvern.step import Int32, TokenLogprobs

Float32 = NDArray[np.float32]

_NOWHERE = np.zeros(0, dtype=np.intp)
_SUM_BLOCK = 256
_NUCLEUS_SHIFT = 20  # of a float32's bits: leaves sign, exponent and 3 bits of the mantissa, 8 bins an octave


class SampledTokens(NamedTuple):
    """token_ids: int32 [n], 0 where the row failed. logprobs: row -> of the sampled token, for rows that asked.
    errors: row -> why no token could be sampled."""

    token_ids: Int32
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


class RowState:
    """What the sampler keeps of a row that needs more than an argmax. record: for whoever samples, to keep what it has
    made of the others."""

    __slots__ = ("bias_ids", "bias_values", "history", "min_tokens_end", "record", "sampling", "stop_ids")

    def __init__(
        self, sampling: SamplingParams, token_ids: Int32, num_prompt_tokens: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        if sampling.seed is None and not sampling.greedy:
            raise ValueError("a request that samples needs a seed")
        self.sampling = sampling
        self.min_tokens_end = num_prompt_tokens + sampling.min_tokens
        ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
        self.stop_ids = np.array(sorted(ending), dtype=np.int64)
        bias = sampling.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self.bias_values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self.record: Any = None
        self.history: TokenHistory | None = None
        if has_penalties(sampling):
            self.history = TokenHistory(token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])


# (logits, places [n] of the rows' logits among them, rows, positions [n]) -> tokens [n], -1 where all are masked
SampleRows = Callable[[Float32, NDArray[np.intp], Sequence[RowState], Int32], Int32]


def sample_rows(logits: Float32, places: NDArray[np.intp], rows: Sequence[RowState], positions: Int32) -> Int32:
    tokens = [
        _sample_row(logits[place], row, position)
        for place, row, position in zip(places.tolist(), rows, positions.tolist(), strict=True)
    ]
    return np.array(tokens, dtype=np.int32)


class Sampler:
    """Samples tokens for the rows of a running batch of a model with `vocab_size` tokens."""

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...] = (), sample_rows: SampleRows = sample_rows
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._sample_rows = sample_rows
        self._rows: dict[int, RowState] = {}  # only those that need more than an argmax
        self._logprobs: dict[int, int] = {}  # row -> how many alternatives it asked for

    def add_row(self, row: int, sampling: SamplingParams, token_ids: Int32, num_prompt_tokens: int) -> None:
        """A request enters `row`, with its prompt and output so far; whatever was there is forgotten.

        Raises ValueError if it samples (temperature above 0) and has no seed.
        """
        self.remove_row(row)
        plain = sampling.greedy and not sampling.min_tokens and not sampling.logit_bias and not has_penalties(sampling)
        if not plain:
            self._rows[row] = RowState(sampling, token_ids, num_prompt_tokens, self.eos_token_ids)
        if sampling.logprobs is not None:
            self._logprobs[row] = sampling.logprobs

    def remove_row(self, row: int) -> None:
        """Forget `row`. Fine if there is nothing."""
        self._rows.pop(row, None)
        self._logprobs.pop(row, None)

    @property
    def largest_only(self) -> bool:
        """Whether no row needs more of its logits than the largest: `sample` then reads `best` alone."""
        return not (self._rows or self._logprobs)

    def append(self, rows: Int32, tokens: Int32) -> None:
        """rows[i] ([n] int32) got the output token tokens[i]; several tokens of one row come in their order."""
        if not self._rows:
            return
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            state = self._rows.get(row)
            if state is not None and state.history is not None:
                state.history.extend((token,))

    def sample(
        self,
        logits: Float32,
        rows: Int32,
        positions: Int32,
        *,
        places: NDArray[np.intp] | None = None,
        best: tuple[Int32, Float32] | None = None,
    ) -> SampledTokens:
        """One token for the occupants of rows [n], from logits[places] (default: logits [n, vocab]).

        positions [n]: index in the sequence of the token that is sampled. best: index and value of each logits row's
        largest, if they are known; NaN counts as largest. Greedy is the exact argmax, the lowest id on a tie. A row
        without a finite largest logit fails alone, in `errors`.
        """
        if best is None:
            index = logits.argmax(axis=1).astype(np.int32)
            best = index, np.take_along_axis(logits, index[:, None], axis=1)[:, 0]
        tokens, peaks = best
        if places is None:
            places = np.arange(len(rows)) if self._rows or self._logprobs else _NOWHERE
            tokens = tokens.copy()
        else:
            tokens, peaks = tokens[places], peaks[places]
        errors: dict[int, str] = {}
        finite = np.isfinite(peaks)
        if np.count_nonzero(finite) < len(finite):
            for i in (~finite).nonzero()[0].tolist():
                errors[int(rows[i])] = f"the model's largest logit is {peaks[i]}"
                tokens[i] = 0
        if self._rows:
            listed = rows.tolist()
            index = [i for i, row in enumerate(listed) if row in self._rows and row not in errors]
            if index:
                states = [self._rows[listed[i]] for i in index]
                sampled = self._sample_rows(logits, places[index], states, positions[index])
                for i in (sampled < 0).nonzero()[0].tolist():
                    errors[listed[index[i]]] = "no token is left to sample: all are masked"
                tokens[index] = np.maximum(sampled, 0)
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logprobs:
            for i, row in enumerate(rows.tolist()):
                if row in self._logprobs and row not in errors:
                    logprobs[row] = token_logprobs(logits[places[i]], int(tokens[i]), self._logprobs[row])
        return SampledTokens(tokens, logprobs, errors)

    def token_logprobs(self, logits_row: Float32, token: int, k: int) -> TokenLogprobs:
        """See kvern.sampling.logprobs.token_logprobs."""
        return token_logprobs(logits_row, token, k)


def _sample_row(raw: Float32, state: RowState, position: int) -> int:
    """The token, or -1 if every token is masked."""
    sampling = state.sampling
    logits = raw.astype(np.float32, order="C", copy=True)
    if len(state.bias_ids):
        logits[state.bias_ids] += state.bias_values
    if position < state.min_tokens_end:
        logits[state.stop_ids] = -np.inf
    if state.history is not None:
        apply_penalties(logits, state.history, sampling)
    best = int(logits.argmax())
    if logits[best] == -np.inf:
        return -1
    if sampling.greedy:
        return best
    assert sampling.seed is not None  # add_row saw to it
    logits -= logits[best]
    return _draw(logits, sampling, uniform(sampling.seed, position))


def _draw(logits: Float32, sampling: SamplingParams, number: float) -> int:
    """A token from logits whose maximum is 0 (overwritten), at `number` in [0, 1)."""
    if sampling.temperature != 1.0:
        logits /= np.float32(sampling.temperature)
    kept: NDArray[np.intp] | None = None  # token ids still in the race, ascending; None: all
    if sampling.min_p > 0.0:
        kept = np.flatnonzero(logits >= np.float32(math.log(sampling.min_p)))
        logits = logits[kept]
    if 0 < sampling.top_k < len(logits):
        cut = np.sort(top(logits, sampling.top_k))
        kept = cut if kept is None else kept[cut]
        logits = logits[cut]
    weights = np.exp(logits, out=logits)
    if sampling.top_p < 1.0:
        cut = _nucleus(weights, sampling.top_p)
        kept = cut if kept is None else kept[cut]
        weights = weights[cut]
    index = _inverse_cdf(weights, number)
    return index if kept is None else int(kept[index])


def _nucleus(weights: Float32, top_p: float) -> NDArray[np.intp]:
    """Indices, ascending, of the fewest largest weights that hold `top_p` of the sum (Holtzman et al. 2020).

    Equal weights go in by index. Sorts only what a histogram cannot decide: positive floats are ordered as their
    bits are, so the leading bits are the bins, and only the bin in which the sum passes `top_p` is looked into.
    """
    total = float(weights.sum(dtype=np.float64))
    need = top_p * total
    # All weights below this one hold together less than what is left out.
    among = np.flatnonzero(weights >= np.float32((1.0 - top_p) * total / len(weights)))
    weights = weights[among]
    bins = weights.view(np.uint32) >> _NUCLEUS_SHIFT
    held = np.cumsum(np.bincount(bins, weights=weights)[::-1])
    step = min(int(np.searchsorted(held, need)), len(held) - 1)
    border = len(held) - 1 - step
    keep = bins > border
    edge = np.flatnonzero(bins == border)
    edge = edge[np.argsort(-weights[edge], kind="stable")]
    cumulative = np.cumsum(weights[edge], dtype=np.float64) + (held[step - 1] if step else 0.0)
    keep[edge[: int(np.searchsorted(cumulative, need)) + 1]] = True
    return among[keep]


def _inverse_cdf(weights: Float32, number: float) -> int:
    """The index i at which the running sum of weights[: i + 1] first passes number * total.

    Sums of blocks find the block, a running sum inside it the index: one fast pass instead of a slow one.
    """
    starts = np.arange(0, len(weights), _SUM_BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    target = number * float(blocks[-1])
    block = _first_above(blocks, target)
    before = float(blocks[block - 1]) if block else 0.0
    start = int(starts[block])
    inside = np.cumsum(weights[start : start + _SUM_BLOCK], dtype=np.float64)
    return start + _first_above(inside, target - before)


def _first_above(cumulative: NDArray[np.float64], target: float) -> int:
    """First index whose cumulative value is above target; the last that adds anything, if rounding left none."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    return index if index < len(cumulative) else int(np.searchsorted(cumulative, cumulative[-1]))
