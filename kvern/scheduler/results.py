"""The way back: what a step sampled is appended, rejected drafts are taken back, requests end.

A result belongs to the occupant its row had when the step was planned, told by the row's epoch. What was sampled for
a request that has left its row since is delivered at most once, and never to another one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvern.request import Request, RequestStatus
from kvern.scheduler.running_batch import Rows
from kvern.scheduler.state import SchedulerState
from kvern.step import Int32, ModelRunnerOutput, SchedulerOutput, StepOutputs

_LENGTH = -1  # what stopped a row: this, or 1 + the place of the token in the row's stop ids; 0: nothing


def take_in(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> StepOutputs:
    if result.kv_arrived or result.kv_failed or result.kv_sent:
        _take_in_transfers(state, output, result)
    if result.lost:
        state.cache.forget_files([name for name, _ in result.lost])
        state.transfers.blocks_lost(output, [block for _, block in result.lost])
    rows: Rows = output.rows.astype(np.intp)
    live = state.batch.epoch[rows] == output.epochs
    sampled = result.count > 0
    if result.errors:
        sampled &= ~np.isin(output.rows, list(result.errors))
    _take_back_rejected(state, output, result)
    if state.config.async_scheduling:
        _settle_placeholders(state, output, live)
    if np.count_nonzero(state.batch.special):
        _release_images(state, output, live)
    chosen = live & sampled
    if np.count_nonzero(chosen) == len(chosen):
        ids, tokens, counts = output.request_ids, result.token_ids, result.count.copy()
    else:
        chosen = chosen.nonzero()[0]
        ids = [output.request_ids[i] for i in chosen.tolist()]
        rows, tokens, counts = rows[chosen], result.token_ids[chosen], result.count[chosen]
    if tokens.shape[1] > 1:
        counts = counts.copy()  # trimmed after a stop; it is the executor's otherwise
    stopped = _append_tokens(state, rows, tokens, counts)
    outputs = StepOutputs(ids, tokens, counts)
    if np.count_nonzero(live) < len(live):
        _deliver_late(state, outputs, output, result, (sampled & ~live).nonzero()[0].tolist())
    if result.logprobs or result.prompt_logprobs:
        _attach_logprobs(state, outputs, output, result)
    for i in stopped.nonzero()[0].tolist():
        _end_stopped(state, state.batch.request_at(int(rows[i])), int(stopped[i]))
    for row, message in result.errors.items():
        _end_failed(state, output, row, message)
    for row, drafts in result.drafts.items():
        if _live_index(state, output, row) is not None:
            _accept_drafts(state, row, drafts)
    state.stats.generated_tokens += int(np.add.reduce(outputs.count))
    outputs.finished, state.ended = state.ended, []
    return outputs


def _take_in_transfers(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
    for request_id, places in result.kv_failed.items():
        if request_id in state.transfers.loading:
            state.transfers.load_ended(request_id, failed=places)
        else:
            state.transfers.load_failed(output, request_id, places)
    for request_id in result.kv_arrived:
        state.transfers.load_ended(request_id)
    for request_id in result.kv_sent:
        state.transfers.sent(request_id)


def _release_images(state: SchedulerState, output: SchedulerOutput, live: NDArray[np.bool_]) -> None:
    """Tokens of this step are in the KV cache now: nobody has to look at their images again."""
    for i in (live & state.batch.special[output.rows]).nonzero()[0].tolist():
        request = state.batch.request_at(int(output.rows[i]))
        state.encoder.release(request.id, request.images, int(output.num_computed[i] + output.num_new[i]))


def _live_index(state: SchedulerState, output: SchedulerOutput, row: int) -> int | None:
    """Where `row` stands in `output`, or None if its occupant has changed or left since."""
    i = int(np.flatnonzero(output.rows == row)[0])
    return i if state.batch.epoch[row] == output.epochs[i] else None


def _append_tokens(state: SchedulerState, rows: Rows, tokens: Int32, counts: Int32) -> Int32:
    """Append the sampled tokens, one column at a time, and look for a reason to stop after each, in the order EOS and
    stop ids, then length. `counts` is trimmed after the stop. Returns what stopped each row."""
    batch = state.batch
    state.reservation.rows_grow()
    stopped = np.zeros(len(rows), dtype=np.int32)
    for column in range(tokens.shape[1]):
        now_rows, now_tokens, places = rows, tokens[:, 0], None
        if column:
            places = np.flatnonzero((counts > column) & (stopped == 0))
            if not len(places):
                break
            now_rows, now_tokens = rows[places], tokens[places, column]
        known = batch.append_tokens(now_rows, now_tokens)
        too_long = known >= batch.max_total[now_rows]
        hits = batch.stop_ids.take(now_rows, axis=0) == now_tokens[:, None]
        if np.count_nonzero(too_long) or np.count_nonzero(hits):
            hits[known < batch.min_total[now_rows]] = False
            why = np.where(too_long, _LENGTH, 0).astype(np.int32)
            why = np.where(hits.any(axis=1), 1 + hits.argmax(axis=1), why).astype(np.int32)
            ended = np.flatnonzero(why) if places is None else places[why != 0]
            stopped[ended] = why[why != 0]
            counts[ended] = column + 1
    return stopped


def _end_stopped(state: SchedulerState, request: Request, why: int) -> None:
    if why == _LENGTH:
        state.end(request, RequestStatus.FINISHED_LENGTH)
    else:
        token = int(state.batch.stop_ids[request.row, why - 1])
        state.end(request, RequestStatus.FINISHED_STOPPED, _stop_reason(state, request, token))


def _end_failed(state: SchedulerState, output: SchedulerOutput, row: int, message: str) -> None:
    """The request that had the row in this step, if it still waits for what it was to give."""
    i = int(np.flatnonzero(output.rows == row)[0])
    if state.batch.epoch[row] == output.epochs[i]:
        state.cache.distrust(state.batch.tables_of(row))
        state.end(state.batch.request_at(row), RequestStatus.FINISHED_ERROR, error=message)
        return
    request = state.requests.get(output.request_ids[i])
    if request is not None and request.row < 0 and request.epoch == output.epochs[i]:
        state.end(request, RequestStatus.FINISHED_ERROR, error=message)


def _stop_reason(state: SchedulerState, request: Request, token: int) -> int | None:
    """The stop id, None if the token is EOS and counts as such."""
    return None if token in state.config.eos_token_ids and not request.sampling.ignore_eos else token


def _take_back_rejected(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
    """Drafts that were not accepted have not been computed. One of the sampled tokens is never a draft."""
    for row, drafts in output.draft_tokens.items():
        i = _live_index(state, output, row)
        if i is not None:
            accepted = max(0, int(result.count[i]) - 1)
            state.batch.num_computed[row] -= len(drafts) - accepted
            state.stats.drafted_tokens += len(drafts)
            state.stats.accepted_tokens += accepted
            if not state.config.async_scheduling:
                state.batch.num_drafts[row] = 0


def _settle_placeholders(state: SchedulerState, output: SchedulerOutput, live: NDArray[np.bool_]) -> None:
    """The tokens this step stood for are known now."""
    rows = output.rows[live & output.samples]
    state.batch.num_placeholders[rows] -= 1
    for row, drafts in output.draft_tokens.items():
        if row in rows:
            state.batch.num_placeholders[row] -= len(drafts)


def _accept_drafts(state: SchedulerState, row: int, drafts: list[int]) -> None:
    """Drafts are for requests that decode; while a prompt is being computed there is nothing to guess."""
    batch = state.batch
    if batch.num_computed[row] == batch.num_tokens[row] - 1:
        batch.set_drafts(row, drafts[: state.config.num_speculative_tokens])


def _deliver_late(
    state: SchedulerState, outputs: StepOutputs, output: SchedulerOutput, result: ModelRunnerOutput, late: list[int]
) -> None:
    """Tokens sampled for requests that left their row meanwhile. A preempted one that still waits gets them: they
    follow what it has. Of an aborted one, or one that runs again and will sample them again, they are dropped."""
    for i in late:
        request = state.requests.get(output.request_ids[i])
        if request is None or request.row >= 0 or request.epoch != output.epochs[i]:
            continue
        tokens = result.token_ids[i, : min(int(result.count[i]), request.max_total_tokens - request.num_tokens)]
        first_stop = request.num_prompt_tokens + request.sampling.min_tokens
        stop = None
        for k, token in enumerate(tokens.tolist(), 1):
            if token in state.stop_ids(request) and request.num_tokens + k >= first_stop:
                tokens, stop = tokens[:k], token
                break
        request.token_ids = np.concatenate([request.token_ids, tokens])
        state.cache.forget(request.id)
        outputs.add(request.id, tokens)
        if stop is not None:
            state.end(request, RequestStatus.FINISHED_STOPPED, _stop_reason(state, request, stop))
        elif request.num_tokens >= request.max_total_tokens:
            state.end(request, RequestStatus.FINISHED_LENGTH)


def _attach_logprobs(
    state: SchedulerState, outputs: StepOutputs, output: SchedulerOutput, result: ModelRunnerOutput
) -> None:
    id_of = dict(zip(output.rows.tolist(), output.request_ids, strict=True))
    delivered = dict(zip(outputs.request_ids, outputs.count.tolist(), strict=True))
    for row, entries in result.logprobs.items():
        if delivered.get(id_of[row]):
            outputs.logprobs[id_of[row]] = entries[: delivered[id_of[row]]]
    for row, (first, entries) in result.prompt_logprobs.items():
        if id_of[row] in state.requests or id_of[row] in delivered:
            outputs.prompt_logprobs[id_of[row]] = (first, entries)
