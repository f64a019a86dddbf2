"""A request's state at one moment, as plain data: for people, tests, traces and the admin interface."""

from __future__ import annotations

from dataclasses import dataclass

from kvern.request import BlockedBy, Request, RequestStatus
from kvern.scheduler.running_batch import RunningBatch


@dataclass(frozen=True, slots=True)
class RequestView:
    id: str
    status: RequestStatus
    blocked_by: BlockedBy | None
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


def view_of(request: Request, batch: RunningBatch, blocked_by: BlockedBy | None) -> RequestView:
    row = request.row
    if row >= 0:
        tokens, table = batch.tokens_of(row), batch.tables_of(row)[0].tolist()
        num_computed = int(batch.num_computed[row])
    else:
        tokens, table, num_computed = request.token_ids, [], request.num_computed_tokens
    return RequestView(
        id=request.id,
        status=request.status,
        blocked_by=blocked_by,
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
