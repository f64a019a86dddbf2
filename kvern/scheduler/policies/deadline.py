"""Least slack first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvern.scheduler.policies.base import Policy, RequestInfo


class Deadline(Policy):
    """Least slack to the target first: the next token of a request is due at

        arrival + ttft + tpot * (output tokens so far)

    and the slack is what is left until then, less the time its uncomputed tokens take. Targets are the request's own
    (ttft_target, tpot_target) or the defaults given here, in seconds; token_time is the expected time to compute one
    prompt token. With shed=True, a request that has had no token and cannot have its first in time ends at once with
    an error; otherwise it is served late.
    """

    name = "deadline"
    dynamic = True

    def __init__(self, ttft: float = 1.0, tpot: float = 0.1, token_time: float = 0.001, shed: bool = False) -> None:
        for option, value in (("ttft", ttft), ("tpot", tpot), ("token_time", token_time)):
            if value < 0:
                raise ValueError(f"deadline: {option} must not be negative, got {value}")
        self.ttft, self.tpot, self.token_time, self.sheds = ttft, tpot, token_time, shed

    def slack(self, request: RequestInfo, now: float) -> float:
        """Seconds that may still be wasted before its next token is late; negative if it is."""
        ttft = self.ttft if request.ttft_target is None else request.ttft_target
        tpot = self.tpot if request.tpot_target is None else request.tpot_target
        due = request.arrival_time + ttft + tpot * request.num_output_tokens
        return due - now - self.token_time * request.num_uncomputed_tokens

    def rank(self, request: RequestInfo, now: float) -> Any:
        return self.slack(request, now)

    def shed(self, request: RequestInfo, now: float) -> str | None:
        if not self.sheds or request.num_output_tokens:
            return None
        slack = self.slack(request, now)
        return f"its first token would be {-slack:.3f} s late" if slack < 0 else None

    def explain(self, request: RequestInfo, now: float) -> Mapping[str, float]:
        return {"slack": self.slack(request, now)}
