"""Short jobs first, with ageing."""

from __future__ import annotations

from typing import Any

from kvern.scheduler.policies.base import Policy, RequestInfo


class Shortest(Policy):
    """Least expected work first: tokens still to compute plus tokens it may still produce.

    Waiting counts as work done, `ageing` tokens for each second. All waiting requests age alike, so the order is a
    fixed number per request, work + ageing * arrival time. Hence the bound: a request with W tokens of work is never
    overtaken by one that arrives more than W / ageing seconds after it.
    """

    name = "shortest"

    def __init__(self, ageing: float = 100.0) -> None:
        if ageing <= 0:
            raise ValueError(f"shortest: ageing must be above 0 tokens per second, got {ageing}")
        self.ageing = ageing

    def rank(self, request: RequestInfo, now: float) -> Any:
        left = request.max_output_tokens - request.num_output_tokens
        return request.num_uncomputed_tokens + left + self.ageing * request.arrival_time
