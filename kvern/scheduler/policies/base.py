"""What a scheduling policy may decide, and what it is shown.

A policy orders requests, picks who gives way, and may hold a request's share of a step down. It sees requests through
read-only views and returns opinions; blocks, budgets, states and correctness stay in the core and cannot be broken
from here. A policy that raises is reported, and the step at hand is planned first come, first served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvern.request import Request
    from kvern.scheduler.state import SchedulerState


class RequestInfo:
    """A live, read-only view of one request. Counts are in tokens, times in seconds on the scheduler's clock."""

    __slots__ = ("_request", "_state")

    def __init__(self, request: Request, state: SchedulerState) -> None:
        self._request = request
        self._state = state

    @property
    def id(self) -> str:
        return self._request.id

    @property
    def tenant(self) -> str:
        """Who it is served for; "" if nobody was named."""
        return self._request.tenant or ""

    @property
    def priority(self) -> int:
        """As asked for by the client; lower is more urgent."""
        return self._request.priority

    @property
    def arrival_time(self) -> float:
        return self._request.arrival_time

    @property
    def ttft_target(self) -> float | None:
        """Seconds from arrival within which the first token is wanted."""
        return self._request.ttft_target

    @property
    def tpot_target(self) -> float | None:
        """Seconds within which each further token is wanted."""
        return self._request.tpot_target

    @property
    def running(self) -> bool:
        return self._request.row >= 0

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        row = self._request.row
        return int(self._state.batch.num_tokens[row]) if row >= 0 else self._request.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache, or planned to be in this step."""
        row = self._request.row
        return int(self._state.batch.num_computed[row]) if row >= 0 else self._request.num_computed_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are still to be computed, as far as is known without a look into the prefix cache."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def max_output_tokens(self) -> int:
        """It ends at the latest after so many output tokens."""
        return self._request.max_total_tokens - self.num_prompt_tokens

    @property
    def num_preemptions(self) -> int:
        return self._request.num_preemptions

    @property
    def num_blocks(self) -> int:
        """Blocks in its table."""
        row = self._request.row
        return int(self._state.batch.num_blocks[row]) if row >= 0 else 0

    def cached_prefix(self) -> int:
        """Tokens at its beginning that the prefix cache holds right now, if it waits."""
        return 0 if self.running else self._state.cache.lookup(self._request).num_tokens

    def __repr__(self) -> str:
        return f"RequestInfo({self.id!r})"


class Served(NamedTuple):
    """What one step gives one request: tokens computed for the first time, of its prompt or of its output. Tokens
    found in a cache, or computed again after a preemption, are not service and are not in here."""

    request: RequestInfo
    num_prompt_tokens: int
    num_output_tokens: int


class Policy:
    """Base of all policies. Every hook has a default; the defaults together are first come, first served.

    Interface version 1. Options given by the user arrive as keyword arguments of __init__.
    """

    name = "policy"
    version = 1
    # False: a request's rank stays the same while it waits, and is asked for once. True: ranks are asked for again
    # in each step that could admit somebody or cannot serve everybody, at a cost that grows with the queue.
    dynamic = False

    def rank(self, request: RequestInfo, now: float) -> Any:
        """The order of waiting and of running requests, smallest first: a number or a tuple of numbers. Among equal
        ranks the core puts resumed requests first, then goes by arrival."""
        return 0

    def pick_victim(self, running: Sequence[RequestInfo], now: float) -> RequestInfo:
        """Who leaves the batch when blocks are short: one of `running`, which is in running order."""
        return running[-1]

    def may_preempt(self, waiting: RequestInfo, running: RequestInfo, now: float) -> bool:
        """Whether `waiting`, which lacks a row, blocks or an adapter slot, may have them from `running`. Asked from the
        last of the running order on, until the answer is no."""
        return False

    def cap_tokens(self, request: RequestInfo, num_tokens: int, now: float) -> int:
        """At most so many of `num_tokens` tokens for this request in this step; at least one is always given."""
        return num_tokens

    def shed(self, request: RequestInfo, now: float) -> str | None:
        """A reason to end a waiting request unserved, or None. Asked when its turn comes."""
        return None

    def on_arrival(self, request: RequestInfo, now: float) -> None:
        """A request was added."""

    def on_served(self, served: Sequence[Served], now: float) -> None:
        """A step was planned that serves these."""

    def on_finish(self, request: RequestInfo, now: float) -> None:
        """A request has ended, for whatever reason."""

    def explain(self, request: RequestInfo, now: float) -> Mapping[str, float]:
        """Numbers that say where `request` stands with this policy: for people who ask why it waits."""
        return {}
