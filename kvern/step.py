"""The words the scheduler and the executor exchange: SchedulerOutput one way, ModelRunnerOutput the other.

Both are plain data, columnar (one array element per scheduled row) and enough to replay a step. Every array of
SchedulerOutput named "[n]" has one element per scheduled row, in scheduling order; ModelRunnerOutput answers in
the same order. A *row* is a request's place in the running batch, on both sides: the executor keeps its own copy
of each row's tokens and block table, and brings it up to date from the differences sent here.

Order in which an executor must apply a SchedulerOutput:
  1. finished_rows, preempted_rows: forget what those rows held.
  2. blocks_to_disk, blocks_to_swap_out, blocks_to_copy, blocks_from_disk, blocks_to_swap_in, deleted_from_disk,
     blocks_to_zero, in this order; of each, every source is read before any destination is written.
  3. new_requests: fill the row from scratch. 4. new_blocks: append to the tables.
  5. compute positions num_computed .. num_computed + num_new of every row; sample where `samples` says so.
Steps are applied in the order of step_id, also when several are planned ahead. One that was planned while drafts of a
row were not yet verified counts on all of them: if some were rejected, the row's positions begin so many earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.request import ImageSpan, Request, RequestStatus
from kvern.sampling_params import SamplingParams

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class NewRequest(NamedTuple):
    """A request that enters a row in this step, whole: also one that comes back after a preemption."""

    request_id: str
    row: int
    token_ids: Int32  # prompt and the output so far
    num_prompt_tokens: int
    sampling: SamplingParams
    tables: list[list[int]]  # its block table in each group, blocks of this step included
    num_computed_tokens: int  # before this step: cached, or kept
    lora: str | None = None
    images: tuple[ImageSpan, ...] = ()


class NewBlocks(NamedTuple):
    """Blocks put into tables of rows that were in the batch before: table[g][rows[i]][index[i]] = blocks[g, i].
    Mostly appended; a shared last block of a fork is replaced by its copy."""

    rows: Int32  # [k]
    index: Int32  # type: ignore[assignment]  # [k]
    blocks: Int32  # [groups, k]

    @staticmethod
    def none() -> NewBlocks:
        return _NO_BLOCKS


_EMPTY = np.zeros(0, dtype=np.int32)
_EMPTY.flags.writeable = False
_NO_BLOCKS = NewBlocks(_EMPTY, _EMPTY, _EMPTY.reshape(1, 0))


@dataclass(slots=True)
class SchedulerOutput:
    step_id: int
    rows: Int32  # [n]
    epochs: Int64  # [n] admission number of each row's occupant; a result counts only while it still matches
    request_ids: list[str]  # [n]; steps with the same rows share it, so it is not to be modified
    num_computed: Int32  # [n] tokens in the cache before this step: the first position to compute
    num_new: Int32  # [n] tokens to compute, drafts included
    samples: NDArray[np.bool_]  # [n] whether the row's last computed position yields a token
    total_num_scheduled_tokens: int
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: NewBlocks = _NO_BLOCKS
    encoder_inputs: list[tuple[str, str]] = field(default_factory=list)  # (request id, image id) to encode first
    freed_encoder_ids: list[str] = field(default_factory=list)  # image ids whose embeddings may be dropped
    draft_tokens: dict[int, list[int]] = field(default_factory=dict)  # row -> drafts at the end of its num_new
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)  # (source, destination)
    blocks_to_zero: list[int] = field(default_factory=list)
    blocks_to_disk: list[tuple[str, int, str]] = field(default_factory=list)  # ("device" or "host", block, file name)
    blocks_from_disk: list[tuple[str, int]] = field(default_factory=list)  # (file name, device block)
    deleted_from_disk: list[str] = field(default_factory=list)  # file names
    finished_req_ids: list[str] = field(default_factory=list)  # finished since the last step, each told once
    finished_rows: list[int] = field(default_factory=list)
    preempted_req_ids: list[str] = field(default_factory=list)
    preempted_rows: list[int] = field(default_factory=list)
    ignored_req_ids: list[str] = field(default_factory=list)  # ended in this step because they can never fit
    connector_metadata: Any = None  # from the scheduler's half of a connector to the executor's
    num_lookahead_slots: int = 0
    running_queue_size: int = 0

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """{request id: tokens}. Built on each call: for people and tests, not for the loop."""
        return dict(zip(self.request_ids, self.num_new.tolist(), strict=True))

    @property
    def empty(self) -> bool:
        """True if there is nothing to compute. Block moves and finished rows may still be told."""
        return self.total_num_scheduled_tokens == 0

    @property
    def has_work(self) -> bool:
        """True if the executor must see this output even if there is nothing to compute."""
        return not self.empty or bool(
            self.connector_metadata is not None or self.finished_rows or self.preempted_rows or self.blocks_to_copy
            or self.blocks_to_swap_in or self.blocks_to_swap_out or self.blocks_to_zero
            or self.blocks_to_disk or self.blocks_from_disk or self.deleted_from_disk
        )  # fmt: skip


class TokenLogprobs(NamedTuple):
    """Logprobs at one position. Index 0 is the token itself, then the likeliest tokens, best first
    (the token itself appears again among them if it is one of them)."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the token itself, 1 = likeliest


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step gave. Rows where nothing was sampled have count 0.

    token_ids: [n, k] int32, k = 1 + most drafts of any row; count: [n] int32, how many of the k are valid.
    logprobs: row -> one entry per valid token, only for rows that asked.
    prompt_logprobs: row -> (first position, entries): the logprobs of tokens first, first+1, ... of the prompt.
    drafts: row -> tokens proposed for the next step.
    kv_arrived, kv_sent: ids of requests whose transfers have ended; kv_failed: id -> places in its table whose block
    could not be loaded.
    lost: (file name, device block) of blocks_from_disk whose file was not there or damaged.
    errors: row -> message: this row failed alone (NaN logits and the like); it ends with an error.
    """

    token_ids: Int32
    count: Int32
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    kv_arrived: list[str] = field(default_factory=list)
    kv_failed: dict[str, list[int]] = field(default_factory=dict)
    kv_sent: list[str] = field(default_factory=list)
    lost: list[tuple[str, int]] = field(default_factory=list)

    @staticmethod
    def nothing() -> ModelRunnerOutput:
        """The result of an empty step."""
        return ModelRunnerOutput(np.zeros((0, 1), dtype=np.int32), _EMPTY)

    @staticmethod
    def of(tokens: list[list[int]]) -> ModelRunnerOutput:
        """From one list of tokens per scheduled row; an empty list where nothing was sampled."""
        width = max([1, *map(len, tokens)])
        ids = np.zeros((len(tokens), width), dtype=np.int32)
        for i, ts in enumerate(tokens):
            ids[i, : len(ts)] = ts
        return ModelRunnerOutput(ids, np.array([len(ts) for ts in tokens], dtype=np.int32))


class FinishedRequest(NamedTuple):
    request: Request
    status: RequestStatus
    stop_reason: int | str | None
    error: str | None


@dataclass(slots=True)
class StepOutputs:
    """What a step delivers to the requests' owners: the tokens of every row that got some, and who ended.

    request_ids[i] got token_ids[i, :count[i]] (trimmed after a stop). A request in `finished` may or may not be
    among them. Columnar, so that a step of a thousand streams is no loop over a thousand objects here.
    """

    request_ids: list[str]
    token_ids: Int32  # [m, k]
    count: Int32  # [m]
    finished: list[FinishedRequest] = field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)

    def add(self, request_id: str, tokens: Int32) -> None:
        """Tokens of one more request, outside the columns: the exception, not the rule."""
        width = max(self.token_ids.shape[1], len(tokens))
        ids = np.zeros((len(self.request_ids) + 1, width), dtype=np.int32)
        ids[:-1, : self.token_ids.shape[1]] = self.token_ids
        ids[-1, : len(tokens)] = tokens
        self.request_ids = [*self.request_ids, request_id]
        self.token_ids, self.count = ids, np.append(self.count, np.int32(len(tokens)))

    def tokens(self) -> dict[str, list[int]]:
        """{request id: tokens}, for people and tests."""
        return {r: self.token_ids[i, : self.count[i]].tolist() for i, r in enumerate(self.request_ids)}


def to_jsonable(value: Any) -> Any:
    """`value` (a SchedulerOutput, a ModelRunnerOutput or a part of one) as plain lists, dicts and numbers."""
    import dataclasses

    import msgspec

    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value, str_keys=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_jsonable(getattr(value, name)) for name in value._fields}
    if isinstance(value, dict):
        return {str(k): to_jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(v) for v in value]
    return value
