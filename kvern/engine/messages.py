"""The words between a front (LLM, or the HTTP process) and the engine core, as msgspec structs.

In one process they are passed as objects; between processes they are msgpack over ZMQ. A front sends Add, Abort and
Control; the engine answers with StepReport and ControlReply. Request ids are made by the front and unique for its
lifetime. Every AddRequest is answered by exactly one RequestUpdate with a finish_reason, or by the one EngineFailure
that ends all.

An engine in its own process first gets StartEngine and answers with EngineProgress, then EngineReady or EngineFailure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvern.config import EngineConfig, ModelConfig, SchedulerConfig
from kvern.sampling_params import SamplingParams


class EngineDeadError(RuntimeError):
    """The engine cannot serve: it failed, its process died, it stalls, or it is shutting down."""


class AddRequest(msgspec.Struct, tag="add", kw_only=True, omit_defaults=True):
    """A validated request for one completion (n > 1 is several of these). arrival_time is on the monotonic clock.

    fork_of: id of an earlier AddRequest with the same prompt, which is then computed once. Targets in seconds."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    fork_of: str | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None


class AbortRequests(msgspec.Struct, tag="abort"):
    """Idempotent; unknown ids are fine."""

    request_ids: list[str]


class Control(msgspec.Struct, tag="control", kw_only=True):
    """A question or an order outside the flow of requests: "ping", "stats", "requests", "policy", "set_policy",
    "pins", "pin", "unpin", "shutdown"."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class ControlReply(msgspec.Struct, tag="reply", kw_only=True):
    call_id: int
    result: Any = None
    error: str | None = None
    param: str | None = None  # the field that is wrong, if the error is an InvalidRequest


# (token ids, logprobs, rank of the first id): see kvern.step.TokenLogprobs
WireLogprobs = tuple[list[int], list[float], int]


class RequestUpdate(msgspec.Struct, tag="update", kw_only=True, omit_defaults=True):
    """What a step means for one request beyond its plain new tokens: only sent when there is something to say."""

    logprobs: list[WireLogprobs] | None = None  # one per new token
    prompt_logprobs: list[WireLogprobs] | None = None  # of prompt tokens [prompt_logprobs_start:]
    prompt_logprobs_start: int = 0
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | None = None  # the stop token id
    error: str | None = None
    first_scheduled_time: float | None = None  # with the first token, and at the end
    num_cached_tokens: int = 0  # likewise
    num_preemptions: int = 0  # likewise


class EngineStats(msgspec.Struct, kw_only=True):
    """The scheduler's state after a step, and totals since start. `waiting_by_reason` keys are BlockedBy values."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_reason: dict[str, int] = {}
    num_blocks: int = 0  # usable ones
    num_free_blocks: int = 0
    num_pinned_blocks: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    policy_errors: int = 0
    policy_changes: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    last_step_seconds: float = 0.0


class StepReport(msgspec.Struct, tag="step", kw_only=True, omit_defaults=True):
    """One step, for all requests it touched. request_ids[i] got the tokens token_ids[i] (may be empty)."""

    request_ids: list[str]
    token_ids: list[list[int]]
    updates: dict[str, RequestUpdate] = {}
    time: float = 0.0  # when the step ended
    stats: EngineStats | None = None


class EngineFailure(msgspec.Struct, tag="failure"):
    """The engine cannot go on; every live request ends with this error. `invalid_config`: it could not start, and the
    message names the option to change."""

    message: str
    invalid_config: bool = False


class StartEngine(msgspec.Struct, tag="start"):
    config: EngineConfig


class EngineProgress(msgspec.Struct, tag="progress"):
    """A phase of loading has ended; it took `seconds`."""

    phase: str
    seconds: float


class EngineReady(msgspec.Struct, tag="ready"):
    model_config: ModelConfig
    limits: SchedulerConfig


ToEngine = StartEngine | AddRequest | AbortRequests | Control
FromEngine = EngineProgress | EngineReady | StepReport | ControlReply | EngineFailure
