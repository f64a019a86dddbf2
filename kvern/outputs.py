"""What a user of the offline API gets back."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Logprob(NamedTuple):
    """logprob: natural logarithm of the probability the model gave the token, before temperature and cuts.
    rank: 1 for the likeliest token of the vocabulary. decoded_token: its text, "" where it has none of its own."""

    logprob: float
    rank: int
    decoded_token: str = ""


# One position: token id -> Logprob. Holds the chosen token and the likeliest alternatives.
LogprobsAt = dict[int, Logprob]


class RequestMetrics(msgspec.Struct):
    """Times in seconds on the engine's monotonic clock; None until the event has happened."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class CompletionOutput(msgspec.Struct):
    """One completion. finish_reason: "stop", "length", "abort" or "error", None while it runs.
    stop_reason: the stop string or stop token id that ended it, None for EOS and the rest."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[LogprobsAt] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """All completions of one prompt. `prompt_logprobs[0]` is None: nothing precedes the first token.
    `error` says in words why a request ended with finish_reason "error"."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[LogprobsAt | None] | None = None
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
    error: str | None = None
