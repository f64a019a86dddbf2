"""One live request as the scheduler knows it, and the words for its state."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_IGNORED = "finished_ignored"  # can never fit
    FINISHED_ERROR = "finished_error"

    @property
    def finished(self) -> bool:
        return self in _FINISH_REASON

    @property
    def finish_reason(self) -> str | None:
        """The API's word for it: "stop", "length", "abort", "error"; None while the request lives."""
        return _FINISH_REASON.get(self)


_FINISH_REASON = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "error",
    RequestStatus.FINISHED_ERROR: "error",
}


class BlockedBy(enum.Enum):
    """Why a waiting request waits. There is always a reason."""

    TOKEN_BUDGET = "token_budget"
    MAX_NUM_SEQS = "max_num_seqs"
    NO_FREE_BLOCKS = "no_free_blocks"
    LORA_SLOTS = "lora_slots"
    ENCODER_BUDGET = "encoder_budget"
    GRAMMAR = "grammar"
    REMOTE_KV = "remote_kv"
    SWAP_SPACE = "swap_space"
    POLICY = "policy"
    PAUSED = "paused"


class ImageSpan(NamedTuple):
    """An image in a prompt: its embeddings stand in for the tokens offset .. offset + length - 1."""

    offset: int
    length: int
    id: str  # content hash: equal images are equal ids


class Request:
    """A request between arrival and end.

    While it runs, its progress stands in the row `row` of the running batch, and only there; `token_ids` and
    `num_computed_tokens` here are what it had when it last entered or left a row. The scheduler's `view()` gives
    the present state either way, and the reason why a waiting one waits.
    """

    __slots__ = (
        "arrival_time",
        "ask_connector",
        "block_hashes",
        "cache_salt",
        "epoch",
        "error",
        "first_scheduled_time",
        "fork_of",
        "group",
        "host_tables",
        "id",
        "images",
        "info",
        "lora",
        "max_total_tokens",
        "num_bypassed",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recached_tokens",
        "priority",
        "resumed",
        "row",
        "sampling",
        "serial",
        "status",
        "stop_reason",
        "tables",
        "tenant",
        "token_ids",
        "tpot_target",
        "ttft_target",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | NDArray[np.int32],
        sampling: SamplingParams,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        images: tuple[ImageSpan, ...] = (),
        fork_of: str | None = None,
        status: RequestStatus = RequestStatus.WAITING,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
    ) -> None:
        self.id = request_id
        self.sampling = sampling
        self.arrival_time = arrival_time
        self.priority = priority
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.lora = lora  # adapter, by a name that is never used again for other weights
        self.images = images
        self.fork_of = fork_of  # id of the sibling whose prompt is the same and need not be computed twice
        self.ttft_target = ttft_target  # seconds to the first token
        self.tpot_target = tpot_target  # seconds for each further token
        # int32 [prompt + output so far]
        self.token_ids: NDArray[np.int32] = np.asarray(prompt_token_ids, dtype=np.int32)
        self.num_prompt_tokens = len(self.token_ids)
        self.status = status  # WAITING, or what it waits for beside its turn
        self.serial = -1  # order of arrival, given by the scheduler; the last tie-breaker everywhere
        self.group = -1  # of siblings and forks: the serial of the first of them, given by the scheduler
        self.row = -1  # row in the running batch, -1 when not running
        self.epoch = -1  # number of the last admission; results of an older one are stale
        self.max_total_tokens = 0  # prompt + output never exceed this; set at admission to the scheduler
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # found in the prefix cache at the first admission
        self.num_recached_tokens = 0  # found again when resumed after a preemption
        self.num_lost_tokens = 0  # were computed when it was last preempted
        self.num_preemptions = 0
        self.num_bypassed = 0  # how many requests overtook it while it was short of blocks
        self.resumed = False  # has run before: goes before others of its rank
        self.num_charged_tokens = 0  # computed at least once; more of them is service
        self.host_tables: list[list[int]] = []  # where its cache is while it is SWAPPED, one table per group
        self.tables: Any = None  # int32 [groups, n], its blocks while it waits with a remote load behind it
        self.ask_connector = True  # whether a connector may be asked for its keys and values
        self.info: Any = None  # the policy's read-only view of it
        self.block_hashes: list[bytes] = []  # of its full blocks, in order; grown on demand, never rewritten
        self.first_scheduled_time: float | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known when it last entered or left a row."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        tokens: list[Any] = self.token_ids[self.num_prompt_tokens :].tolist()
        return tokens

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.status.name}, tokens={self.num_tokens}, row={self.row})"
