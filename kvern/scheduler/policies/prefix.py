"""Who can use the cache goes first, with ageing."""

from __future__ import annotations

from typing import Any

from kvern.scheduler.policies.base import Policy, RequestInfo


class Prefix(Policy):
    """Longest cached prefix first, so that what is cached is used before it is evicted.

    Each second of waiting counts like `ageing` cached tokens. Hence the bound: a request is never overtaken by one that
    arrives more than max_model_len / ageing seconds after it. Looks every waiting request up when the cache changes.
    """

    name = "prefix"
    dynamic = True

    def __init__(self, ageing: float = 100.0) -> None:
        if ageing <= 0:
            raise ValueError(f"prefix: ageing must be above 0 tokens per second, got {ageing}")
        self.ageing = ageing

    def rank(self, request: RequestInfo, now: float) -> Any:
        return self.ageing * request.arrival_time - request.cached_prefix()
