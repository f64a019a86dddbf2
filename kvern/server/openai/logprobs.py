"""Log probabilities in the two shapes of the API: four parallel lists (completions), one object per token (chat).

A token's name is its text; where its bytes are no whole characters it is "bytes:\\xe2\\x82", so that different tokens
keep different names. Probability 0 is written as -9999.0: JSON has no infinity.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from kvern.outputs import LogprobsAt

if TYPE_CHECKING:
    from kvern.tokenizer import Tokenizer

LOWEST = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST


class TokenNames:
    """How tokens are written: by text, or as "token_id:17"."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, token: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token))


class CompletionLogprobs:
    """The legacy shape, for one choice, growing: `add` gives the lists for the tokens added.

    text_offset counts characters of the choice's text, which begins with the first token added.
    top: how many alternatives were asked for. The token itself is always among the names, once.
    """

    def __init__(self, tokenizer: Tokenizer, names: TokenNames, top: int) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(
        self, tokens: Sequence[int], positions: Sequence[LogprobsAt | None], hidden: Container[int] = ()
    ) -> dict[str, list[Any]]:
        """tokens[i] has the log probabilities positions[i]; None is for the first token of a prompt. Tokens in
        `hidden` do not show in the text."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, position in zip(tokens, positions, strict=True):
            name = self._names.name(token)
            lists["tokens"].append(name)
            lists["token_logprobs"].append(None if position is None else finite(position[token].logprob))
            lists["top_logprobs"].append(None if position is None else self._alternatives(token, name, position))
            lists["text_offset"].append(self._offset)
            if token not in hidden:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return lists

    def _alternatives(self, token: int, name: str, position: LogprobsAt) -> dict[str, float]:
        best = {name: finite(position[token].logprob)}
        for other in _likeliest(position, self._top):
            best.setdefault(self._names.name(other), finite(position[other].logprob))
        return best


def chat_logprobs(
    names: TokenNames, tokens: Sequence[int], positions: Sequence[LogprobsAt], top: int
) -> dict[str, Any]:
    """The chat shape. `top_logprobs` holds exactly the `top` likeliest tokens, best first."""
    content = []
    for token, position in zip(tokens, positions, strict=True):
        entry = _chat_entry(names, token, position)
        entry["top_logprobs"] = [_chat_entry(names, other, position) for other in _likeliest(position, top)]
        content.append(entry)
    return {"content": content, "refusal": None}


def _likeliest(position: LogprobsAt, top: int) -> list[int]:
    """The `top` likeliest tokens, best first. The token itself may be there too, but need not."""
    return sorted(position, key=lambda token: position[token].rank)[:top]


def _chat_entry(names: TokenNames, token: int, position: LogprobsAt) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": finite(position[token].logprob), "bytes": names.bytes(token)}
