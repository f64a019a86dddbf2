"""Fair shares between tenants: the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024), with weights.

Each tenant has a counter of the service it has had: prompt_cost per prompt token and output_cost per output token,
divided by its weight. The tenant with the smallest counter goes next. A tenant that was away comes back with at least
the smallest counter of those that wait, so that nobody saves up service. While two tenants both have requests
waiting, their counters differ by at most

    max(prompt_cost * longest prompt, output_cost * most tokens that fit into the cache) / smallest weight

and the service they got, in that cost, by at most twice as much (Theorem 4.4 there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvern.scheduler.policies.base import Policy, RequestInfo, Served


class Fair(Policy):
    """weights: {tenant: weight}, 1 for those not named. prompt_cost, output_cost: of one token."""

    name = "fair"
    dynamic = True

    def __init__(
        self, weights: Mapping[str, float] | None = None, prompt_cost: float = 1.0, output_cost: float = 2.0
    ) -> None:
        self.weights = dict(weights or {})
        if any(weight <= 0 for weight in self.weights.values()):
            raise ValueError(f"fair: weights must be above 0, got {self.weights}")
        if prompt_cost < 0 or output_cost < 0:
            raise ValueError("fair: prompt_cost and output_cost must not be negative")
        self.prompt_cost, self.output_cost = prompt_cost, output_cost
        self.counters: dict[str, float] = {}
        self._live: dict[str, dict[str, RequestInfo]] = {}  # tenant -> its live requests, by id

    def rank(self, request: RequestInfo, now: float) -> Any:
        return self.counters[request.tenant]

    def on_arrival(self, request: RequestInfo, now: float) -> None:
        tenant = request.tenant
        if not self._waits(tenant):
            waiting = [self.counters[t] for t in self._live if self._waits(t)]
            # With nobody there, the one who left last sets the level: an idle moment is no fresh start.
            level = min(waiting) if waiting else max(self.counters.values(), default=0.0)
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), level)
        self._live.setdefault(tenant, {})[request.id] = request

    def _waits(self, tenant: str) -> bool:
        return any(not request.running for request in self._live.get(tenant, {}).values())

    def on_served(self, served: Sequence[Served], now: float) -> None:
        for request, num_prompt, num_output in served:
            cost = self.prompt_cost * num_prompt + self.output_cost * num_output
            self.counters[request.tenant] += cost / self.weights.get(request.tenant, 1.0)

    def on_finish(self, request: RequestInfo, now: float) -> None:
        self._live.get(request.tenant, {}).pop(request.id, None)

    def explain(self, request: RequestInfo, now: float) -> Mapping[str, float]:
        lowest = min(self.counters[tenant] for tenant, live in self._live.items() if live)
        counter = self.counters[request.tenant]
        return {"counter": counter, "lowest_counter": lowest, "ahead_by": counter - lowest}
