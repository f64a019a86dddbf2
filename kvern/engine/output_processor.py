"""From the engine's step reports to what the owners of requests read: text, tokens, logprobs, endings.

One `_Completion` lives here per AddRequest, from `add` to its last delta, and nothing of it afterwards. A
CompletionDelta is what is new since the one before; put together by `merge`, in any grouping, the deltas of a
completion are the whole completion. So a slow reader costs one delta, and the offline API merges all of them.

A stop string ends a completion here, ahead of the engine: its last delta goes out at once, text, ids and logprobs
cut at the token in which the stop string became complete; the engine is told to abort it, and what it still says of
it is ignored, as is everything about ids that are not known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvern.engine.detokenizer import Detokenizer
from kvern.engine.messages import AddRequest, RequestUpdate, StepReport, WireLogprobs
from kvern.outputs import CompletionOutput, Logprob, LogprobsAt, RequestMetrics, RequestOutput
from kvern.sampling_params import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from kvern.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CompletionDelta:
    """What is new of one completion. Text may lag behind the ids; with the finish_reason all of it is there.

    request_id: of the whole request, index: which of its n completions.
    prompt_logprobs: all of them at once, with the first token of completion 0 (or its end), [0] is None.
    metrics: of this completion, up to date also later.
    """

    request_id: str
    index: int
    metrics: RequestMetrics
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsAt] | None = None
    prompt_logprobs: list[LogprobsAt | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def merge(self, later: CompletionDelta) -> None:
        """Append the delta that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is None:
            self.logprobs = later.logprobs
        else:
            self.logprobs += later.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error


class ProcessedStep(NamedTuple):
    deltas: list[CompletionDelta]  # in the order of the report
    aborts: list[str]  # completions that a stop string or a failure ended here: the engine must abort them


class _Completion:
    """A live completion."""

    __slots__ = ("detokenizer", "index", "metrics", "prompt_logprobs", "request_id", "wants_logprobs")

    def __init__(self, request_id: str, index: int, add: AddRequest, tokenizer: Tokenizer) -> None:
        self.request_id = request_id
        self.index = index
        self.metrics = RequestMetrics(arrival_time=add.arrival_time)
        self.detokenizer = Detokenizer(tokenizer, add.prompt_token_ids, add.sampling)
        # A beam search has its logprobs anyway.
        self.wants_logprobs = add.sampling.logprobs is not None or add.sampling.use_beam_search
        # Comes in parts while the prompt is computed; not yet delivered.
        self.prompt_logprobs: list[LogprobsAt | None] | None = None
        if add.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]


class OutputProcessor:
    """The fronts' half of every live request. One thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._completions: dict[str, _Completion] = {}  # by the engine's id
        self._requests: dict[str, list[str]] = {}  # request id -> engine's ids of its live completions

    def __len__(self) -> int:
        """How many completions are live."""
        return len(self._completions)

    def add(self, request_id: str, children: Sequence[AddRequest]) -> None:
        """Know the completions of a request, in order of index, before they are sent to the engine.

        Raises InvalidRequest, and knows none of them, if one of the ids is live.
        """
        ids = [child.request_id for child in children]
        if request_id in self._requests or any(child_id in self._completions for child_id in ids):
            raise InvalidRequest(f"a request with the id {request_id!r} is running", "request_id")
        made = [_Completion(request_id, index, child, self._tokenizer) for index, child in enumerate(children)]
        self._completions.update(zip(ids, made, strict=True))
        self._requests[request_id] = ids

    def process(self, report: StepReport) -> ProcessedStep:
        """What a step means. Where a completion cannot be processed, it fails alone."""
        step = ProcessedStep([], [])
        told = dict(zip(report.request_ids, report.token_ids, strict=True))
        for request_id in report.updates:
            told.setdefault(request_id, [])
        for child_id, token_ids in told.items():
            completion = self._completions.get(child_id)
            if completion is None:
                continue
            update = report.updates.get(child_id) or _NOTHING
            try:
                delta = self._advance(completion, token_ids, update, report.time)
            except Exception as exc:
                logger.exception("request %s: its output cannot be processed", child_id)
                delta = self._end(completion, "error", report.time, f"its output cannot be processed: {exc}")
            if delta is None:
                continue
            step.deltas.append(delta)
            if delta.finish_reason is not None:
                self._forget(child_id, completion)
                if update.finish_reason is None:
                    step.aborts.append(child_id)
        return step

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """The engine's ids of the live completions of these requests (or of these completions), for the engine to
        abort. They end here when the engine says so, with finish_reason "abort". Unknown ids are fine."""
        children: list[str] = []
        for request_id in request_ids:
            children += self._requests.get(request_id) or ([request_id] if request_id in self._completions else [])
        return children

    def fail_all(self, message: str, now: float) -> list[CompletionDelta]:
        """End every live completion with this error: the engine cannot go on."""
        deltas = [self._end(completion, "error", now, message) for completion in self._completions.values()]
        self._completions.clear()
        self._requests.clear()
        return deltas

    def _advance(
        self, completion: _Completion, token_ids: list[int], update: RequestUpdate, time: float
    ) -> CompletionDelta | None:
        """The delta these tokens and this update make, None if they make none."""
        _note_times(completion.metrics, update, bool(token_ids), time)
        if update.prompt_logprobs is not None:
            self._collect_prompt_logprobs(completion, update.prompt_logprobs, update.prompt_logprobs_start)
        delta = CompletionDelta(completion.request_id, completion.index, completion.metrics)
        delta.finish_reason, delta.stop_reason, delta.error = update.finish_reason, update.stop_reason, update.error
        self._detokenize(completion.detokenizer, token_ids, delta)
        if completion.wants_logprobs and update.logprobs is not None:
            given = update.logprobs[: len(delta.token_ids)]
            delta.logprobs = [self._logprobs_at(entry) for entry in given]
        if not delta.token_ids and delta.finish_reason is None:
            return None
        delta.prompt_logprobs, completion.prompt_logprobs = completion.prompt_logprobs, None
        if delta.finish_reason is not None:
            completion.metrics.finished_time = time
        return delta

    def _detokenize(self, detokenizer: Detokenizer, token_ids: list[int], delta: CompletionDelta) -> None:
        """Fill in text and ids, up to the first stop string."""
        pieces: list[str] = []
        stop_token_at = len(token_ids) - 1 if delta.finish_reason == "stop" else -1
        for place, token in enumerate(token_ids):
            delta.token_ids.append(token)
            pieces.append(detokenizer.push_last(token) if place == stop_token_at else detokenizer.push(token))
            if detokenizer.stop_string is not None:
                break
        if delta.finish_reason is not None and detokenizer.stop_string is None:
            pieces.append(detokenizer.finish())
        if detokenizer.stop_string is not None:
            delta.finish_reason, delta.stop_reason, delta.error = "stop", detokenizer.stop_string, None
        delta.text = "".join(pieces)

    def _collect_prompt_logprobs(self, completion: _Completion, entries: list[WireLogprobs], start: int) -> None:
        """Append the entries of positions not there yet: a preempted prompt is computed, and told, again."""
        have = completion.prompt_logprobs
        if have is not None:
            have += [self._logprobs_at(entry) for entry in entries[max(len(have) - start, 0) :]]

    def _logprobs_at(self, entry: WireLogprobs) -> LogprobsAt:
        token_ids, logprobs, rank = entry
        text = self._tokenizer.token_text
        at = {token_ids[0]: Logprob(logprobs[0], rank, text(token_ids[0]))}
        for place in range(1, len(token_ids)):
            token = token_ids[place]
            at[token] = Logprob(logprobs[place], place, text(token))
        return at

    def _end(self, completion: _Completion, reason: str, time: float, error: str) -> CompletionDelta:
        completion.metrics.finished_time = time
        return CompletionDelta(
            completion.request_id, completion.index, completion.metrics, finish_reason=reason, error=error
        )

    def _forget(self, child_id: str, completion: _Completion) -> None:
        del self._completions[child_id]
        siblings = self._requests[completion.request_id]
        siblings.remove(child_id)
        if not siblings:
            del self._requests[completion.request_id]


_NOTHING = RequestUpdate()


def _note_times(metrics: RequestMetrics, update: RequestUpdate, has_tokens: bool, time: float) -> None:
    if update.first_scheduled_time is not None:
        metrics.first_scheduled_time = update.first_scheduled_time
        metrics.num_cached_tokens = update.num_cached_tokens
        metrics.num_preemptions = update.num_preemptions
    if has_tokens:
        if metrics.first_token_time is None:
            metrics.first_token_time = time
        metrics.last_token_time = time


class OutputCollector:
    """Merges the deltas of one request into the RequestOutput of the offline API."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._sampling = sampling
        self._deltas: list[CompletionDelta | None] = [None] * sampling.num_candidates

    def put(self, delta: CompletionDelta) -> None:
        known = self._deltas[delta.index]
        if known is None:
            self._deltas[delta.index] = delta
        else:
            known.merge(delta)

    @property
    def finished(self) -> bool:
        return all(delta is not None and delta.finish_reason is not None for delta in self._deltas)

    def output(self) -> RequestOutput:
        """All that has come so far."""
        deltas = [delta for delta in self._deltas if delta is not None]
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[_completion_output(delta, self._sampling) for delta in choose(deltas, self._sampling)],
            finished=self.finished,
            prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
            metrics=_merged_metrics([delta.metrics for delta in deltas]),
            error=next((delta.error for delta in deltas if delta.error is not None), None),
        )


def choose(made: list[CompletionDelta], sampling: SamplingParams) -> list[CompletionDelta]:
    """Of the whole completions made for one prompt, in order of index, those to be returned: all, or the sampling.n
    best by their sum of logprobs, numbered anew, the best first. Completions that failed come last."""
    if sampling.num_candidates == sampling.n or len(made) < sampling.num_candidates:
        return made
    prompt_logprobs = made[0].prompt_logprobs
    made[0].prompt_logprobs = None
    best = sorted(made, key=lambda delta: (delta.finish_reason not in ("stop", "length"), -_sum_of_logprobs(delta)))
    best = best[: sampling.n]
    best[0].prompt_logprobs = prompt_logprobs
    for index, delta in enumerate(best):
        delta.index = index
    return best


def _sum_of_logprobs(delta: CompletionDelta) -> float:
    return sum(at[token].logprob for token, at in zip(delta.token_ids, delta.logprobs or [], strict=False))


def _completion_output(delta: CompletionDelta, sampling: SamplingParams) -> CompletionOutput:
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs if sampling.logprobs is not None else None,
        cumulative_logprob=None if delta.logprobs is None else _sum_of_logprobs(delta),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )


def _merged_metrics(parts: list[RequestMetrics]) -> RequestMetrics:
    """Of a request with several completions: from the first event of its kind to the last one; cached tokens of the
    first completion, since the others find what it computed; preemptions of all."""
    if not parts:
        return RequestMetrics()

    def known(name: str) -> list[float]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    return RequestMetrics(
        arrival_time=parts[0].arrival_time,
        first_scheduled_time=min(known("first_scheduled_time"), default=None),
        first_token_time=min(known("first_token_time"), default=None),
        last_token_time=max(known("last_token_time"), default=None),
        finished_time=max(known("finished_time"), default=None),
        num_cached_tokens=parts[0].num_cached_tokens,
        num_preemptions=sum(part.num_preemptions for part in parts),
    )
