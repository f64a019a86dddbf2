"""Repetition, presence and frequency penalties over the tokens a request has seen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvern.sampling_params import SamplingParams


class TokenHistory:
    """The distinct tokens of one sequence, each with how often it occurs in the output (0: only in the prompt).

    Grows with what was seen, not with the vocabulary.
    """

    def __init__(self, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        seen = np.unique(prompt)
        self._size = len(seen)
        self._slot = dict(zip(seen.tolist(), range(self._size), strict=True))
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = seen
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self.extend(output.tolist())

    @property
    def ids(self) -> NDArray[np.int64]:
        """[seen] distinct, in order of appearance after the prompt's."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """[seen] occurrences in the output, aligned with `ids`."""
        return self._counts[: self._size]

    def extend(self, output: Iterable[int]) -> None:
        for token in output:
            slot = self._slot.get(token)
            if slot is None:
                slot = self._slot[token] = self._size
                if slot == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[slot] = token
                self._size += 1
            self._counts[slot] += 1


def has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )  # fmt: skip


def apply_penalties(logits: NDArray[np.float32], history: TokenHistory, sampling: SamplingParams) -> None:
    """Change one row of logits [vocab] in place.

    Repetition (Keskar et al. 2019, CTRL): the logits of all tokens seen, in prompt or output, are divided by the
    penalty if positive, multiplied by it otherwise. Then presence (once) and frequency (times the occurrences)
    are subtracted for tokens of the output.
    """
    ids, counts = history.ids, history.output_counts
    seen = logits[ids]
    if sampling.repetition_penalty != 1.0:
        penalty = np.float32(sampling.repetition_penalty)
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
    seen -= np.float32(sampling.frequency_penalty) * counts
    seen -= np.float32(sampling.presence_penalty) * (counts > 0)
    logits[ids] = seen
