"""Drafts from a request's own text: prompt lookup decoding (Saxena 2023, "Prompt lookup decoding").

What was said once is often said again: code that is edited, a document that is quoted, a name, a loop. So the last few
tokens are looked up among the earlier ones, and what followed them there is proposed to follow here. No second model,
no memory between calls, no randomness: the same tokens give the same drafts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvern.step import Int32

MAX_N = 4
MIN_N = 2  # a single token in common says little, and every wrong draft costs
WINDOW = 32768  # tokens looked back; what a call costs grows with it


class Proposer(Protocol):
    """Guesses how a request goes on. Right or wrong, the text stays what it is; only the time it takes changes."""

    def propose(self, token_ids: Int32) -> list[int]:
        """Tokens that may follow `token_ids` (prompt and output so far, not to be kept or changed); may be none."""
        ...


class NgramProposer:
    """Proposes up to `num_tokens` tokens: those after the latest earlier occurrence of the longest n-gram, of MAX_N
    down to MIN_N tokens, that the request ends with."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def propose(self, token_ids: Int32) -> list[int]:
        if len(token_ids) <= MIN_N:
            return []
        token_ids = token_ids[-WINDOW:]
        last = len(token_ids) - 1
        found = np.flatnonzero(token_ids[MIN_N - 1 : last] == token_ids[last]) + (MIN_N - 1)
        for k in range(1, MAX_N):  # places whose last k tokens agree; those of them with one more
            longer = found[found >= k]
            longer = longer[token_ids[longer - k] == token_ids[last - k]]
            if not len(longer):
                if k < MIN_N:
                    return []
                break
            found = longer
        period = last - int(found[-1])
        # The copy may run into the place it is written to: then the last `period` tokens come again and again.
        follows = token_ids[len(token_ids) - period :][: self.num_tokens].tolist()
        return [follows[i % len(follows)] for i in range(self.num_tokens)]
