"""A request's state at one moment, as plain data: for people, tests, traces and the admin interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvern.request import BlockedBy, Request, RequestStatus
from kvern.scheduler.running_batch import RunningBatch


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request waits, in numbers. `str()` says it in words."""

    reason: BlockedBy
    rank: int | None  # how many were before it when somebody was last admitted, or could be; None: not in line
    blocks_short: int  # blocks it needs beyond those it could have now; 0 if there are enough
    overtaken_by: int  # requests admitted before it while it was short of blocks
    waits_for: str | None = None  # the sibling whose prompt it shares
    blocks_pinned: int = 0  # blocks that pinned prefixes hold, if it is short of blocks
    policy: Mapping[str, float] | None = None  # where it stands with the policy, in the policy's own terms

    def __str__(self) -> str:
        parts = [self.reason.value]
        if self.rank is not None:
            parts.append("next in line" if self.rank == 0 else f"{self.rank} before it")
        if self.blocks_short:
            pinned = f" ({self.blocks_pinned} are pinned)" if self.blocks_pinned else ""
            parts.append(f"short of {self.blocks_short} blocks{pinned}")
        if self.overtaken_by:
            parts.append(f"overtaken by {self.overtaken_by}")
        if self.waits_for is not None:
            parts.append(f"waits for the prompt of {self.waits_for}")
        parts += [f"{name} {value:g}" for name, value in (self.policy or {}).items()]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RequestView:
    id: str
    status: RequestStatus
    blocked_by: BlockedBy | None
    explanation: Explanation | None  # of a request that waits
    priority: int
    tenant: str | None
    arrival_time: float
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    block_ids: list[int]  # of the first group
    output_token_ids: list[int]
    error: str | None


def view_of(request: Request, batch: RunningBatch, explanation: Explanation | None) -> RequestView:
    row = request.row
    if row >= 0:
        tokens, table = batch.tokens_of(row), batch.tables_of(row)[0].tolist()
        num_computed = int(batch.num_computed[row])
    else:
        tokens, table, num_computed = request.token_ids, [], request.num_computed_tokens
    return RequestView(
        id=request.id,
        status=request.status,
        blocked_by=explanation.reason if explanation is not None else None,
        explanation=explanation,
        priority=request.priority,
        tenant=request.tenant,
        arrival_time=request.arrival_time,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=len(tokens),
        num_computed_tokens=num_computed,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        block_ids=table,
        output_token_ids=tokens[request.num_prompt_tokens :].tolist(),
        error=request.error,
    )
