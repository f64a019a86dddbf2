"""Beam search by forks and drops.

A beam is an ordinary request of the scheduler: greedy, ended by its length only, with the logprobs of the likeliest
next tokens. The owners of a search, one per returned sequence, are known here and to the front, never to the scheduler.
After a step in which the last of its beams has got its logprobs, a search picks its continuations over all of them:

  1. beams without a continuation are aborted;
  2. a beam with several is forked, once for each beyond the first; blocks are shared, the last one copied on write;
  3. each gets the chosen token in place of the one it sampled (Scheduler.replace_last_token).

Beams of one search run in step, but one may be preempted, or find no row. Those that are ahead of it are then aborted
and come back, when the search goes on, as resumed requests that have their tokens already. So that searches do not do
this to each other, one begins only when there are rows for all of its beams beside those of the searches under way.

The choice is that of transformers' `generate(num_beams=...)` (its vectorized form, 2025): of the (1 + number of ending
tokens) * width best continuations, those among the first `width` that end are finished, and the first `width` that do
not end go on.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

import numpy as np

from kvern.request import Request, RequestStatus
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.scheduler.scheduler import Scheduler
from kvern.step import FinishedRequest, StepOutputs, TokenLogprobs


class Sequence(NamedTuple):
    """Output tokens, their logprobs, and the sum of these; `score` once it is finished."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    total: float
    score: float = 0.0
    status: RequestStatus = RequestStatus.FINISHED_LENGTH


class Beam:
    """A live beam. `request` may have ended in the scheduler before the search goes on: then its blocks are gone."""

    def __init__(self, request: Request, sequence: Sequence) -> None:
        self.request = request
        self.sequence = sequence
        self.candidates: TokenLogprobs | None = None  # for the token after the sequence, once they are known


class Choice(NamedTuple):
    """A continuation of a beam by one token."""

    beam: Beam
    sequence: Sequence
    ends: bool


class Search:
    """One search: what is finished, what goes on, when it is over. Knows nothing of the scheduler."""

    def __init__(self, sampling: SamplingParams, ending_ids: tuple[int, ...]) -> None:
        self.sampling = sampling
        self.width = sampling.width
        self.num_candidates = max(2, 1 + len(ending_ids)) * self.width
        self.owners: list[Request] = []  # owner i gets the i-th best sequence
        self.beams: list[Beam] = []
        self.first: Request | None = None  # the beam that computes the prompt
        self.finished: list[Sequence] = []  # at most `width`, the best first
        self.over = False
        self.error: str | None = None
        self._ending_ids = frozenset(ending_ids)
        assert sampling.max_tokens is not None  # filled in before admission
        self._max_tokens = sampling.max_tokens

    @property
    def ready(self) -> bool:
        return all(beam.candidates is not None for beam in self.beams)

    def choose(self) -> list[Choice]:
        """Take the next step; returns the continuations that go on, the best first, none if the search is over."""
        choices = self._best_continuations()
        length = len(choices[0].sequence.tokens)
        if not (self.sampling.early_stopping is True and len(self.finished) == self.width):
            ended = [self._finish(choice.sequence) for choice in choices[: self.width] if choice.ends]
            self.finished = sorted([*self.finished, *ended], key=lambda s: -s.score)[: self.width]
        goes_on = [choice for choice in choices if not choice.ends][: self.width]
        self.over = not goes_on or not self._can_improve(goes_on[0].sequence.total, length)
        return [] if self.over else goes_on

    def _best_continuations(self) -> list[Choice]:
        choices = []
        for beam in self.beams:
            assert beam.candidates is not None
            # The first entry is the sampled token, which stands among the likeliest too.
            ids, logprobs = beam.candidates.token_ids[1:], beam.candidates.logprobs[1:]
            for rank, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
                choices.append((beam.sequence.total + logprob, beam, token, logprob, rank))
        choices.sort(key=lambda choice: -choice[0])
        return [self._extend(*choice) for choice in choices[: self.num_candidates]]

    def _extend(self, total: float, beam: Beam, token: int, logprob: float, rank: int) -> Choice:
        assert beam.candidates is not None
        shown = slice(1, 1 + (self.sampling.logprobs or 0))
        ids, logprobs = beam.candidates.token_ids[shown], beam.candidates.logprobs[shown]
        entry = TokenLogprobs([token, *ids], [logprob, *logprobs], rank)
        sequence = Sequence([*beam.sequence.tokens, token], [*beam.sequence.logprobs, entry], total)
        return Choice(beam, sequence, token in self._ending_ids or len(sequence.tokens) == self._max_tokens)

    def _finish(self, sequence: Sequence) -> Sequence:
        stopped = sequence.tokens[-1] in self._ending_ids
        status = RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_LENGTH
        return sequence._replace(score=self._score(sequence.total, len(sequence.tokens)), status=status)

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self.sampling.length_penalty)

    def _can_improve(self, best_total: float, length: int) -> bool:
        if len(self.finished) < self.width:
            return True
        if self.sampling.early_stopping is True:
            return False
        if self.sampling.early_stopping == "never" and self.sampling.length_penalty > 0.0:
            length = self._max_tokens
        return self._score(best_total, length) > self.finished[-1].score


class BeamSearches:
    """All searches of an engine: its front knows their owners, its scheduler their beams."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._searches: dict[str, Search] = {}  # by the id of each owner that has not been told its end
        self._incomplete: dict[str, Search] = {}  # not all of its owners have come; by the id of the first
        self._waiting: deque[Search] = deque()  # complete, and not begun for lack of rows
        self._num_rows = 0  # spoken for by the searches under way
        self._beams: dict[str, tuple[Search, Beam]] = {}  # live beams, by id; a held one is among them
        self._leaving: set[str] = set()  # beams that have ended, until the scheduler has told it
        self._ended: list[FinishedRequest] = []  # owners that ended outside of a step
        self._names = itertools.count()

    # ---- owners come and go

    def add(self, owner: Request) -> None:
        """An owner. With the last of its sampling.n owners a search begins. Raises InvalidRequest."""
        if owner.id in self:
            raise InvalidRequest(f"request id {owner.id!r} is in use", "request_id")
        if not owner.num_prompt_tokens:
            raise InvalidRequest("the prompt is empty, there is nothing to continue", "prompt")
        first = owner.fork_of or owner.id
        search = self._incomplete.pop(first, None) or Search(owner.sampling, self._ending_ids(owner.sampling))
        search.owners.append(owner)
        self._searches[owner.id] = search
        if len(search.owners) < owner.sampling.n:
            self._incomplete[first] = search
        else:
            self._waiting.append(search)
            self._begin_what_fits()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._searches

    def abort(self, request_id: str) -> bool:
        """End an owner; the search ends with its last one. False if there is no such owner."""
        search = self._searches.pop(request_id, None)
        if search is None:
            return False
        owner = next(owner for owner in search.owners if owner.id == request_id)
        self._ended.append(FinishedRequest(owner, RequestStatus.FINISHED_ABORTED, None, None))
        if not any(owner.id in self for owner in search.owners):
            self._end(search)
        return True

    def abort_all(self) -> None:
        for request_id in list(self._searches):
            self.abort(request_id)
        self._incomplete.clear()

    @property
    def active(self) -> bool:
        """Whether there are beams in the scheduler."""
        return bool(self._beams)

    @property
    def num_waiting(self) -> int:
        """Searches that wait for rows."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """Whether there is an end to be told. While a search goes on, the scheduler has work too."""
        return bool(self._ended)

    # ---- a step

    def take_in(self, outputs: StepOutputs) -> StepOutputs:
        """Advance the searches by what a step gave to their beams; returns what it gave to all others, and the ends of
        owners."""
        if self._beams or self._leaving:  # else it costs nothing
            touched = self._take_candidates(outputs)
            outputs = self._without_beams(outputs)
            for search in touched:
                if search.error is None and search.ready:
                    self._advance(search)
                elif search.error is None:
                    self._hold_back(search)
                if search.error is not None or search.over:
                    self._tell_end(search, outputs)
        outputs.finished += self._ended
        self._ended = []
        return outputs

    def _take_candidates(self, outputs: StepOutputs) -> list[Search]:
        touched: dict[int, Search] = {}
        for request_id in outputs.request_ids:
            if request_id in self._beams:
                search, beam = self._beams[request_id]
                beam.candidates = outputs.logprobs[request_id][0]
                touched[id(search)] = search
        for ended in outputs.finished:
            if ended.request.id in self._beams and ended.request.id not in self._leaving:
                search, beam = self._beams[ended.request.id]
                if beam.candidates is None:
                    search.error = ended.error or "a beam ended before the search did"
                touched[id(search)] = search
        return list(touched.values())

    def _without_beams(self, outputs: StepOutputs) -> StepOutputs:
        ours = self._beams.keys() | self._leaving
        self._leaving -= {ended.request.id for ended in outputs.finished}
        keep = [i for i, request_id in enumerate(outputs.request_ids) if request_id not in ours]
        return StepOutputs(
            [outputs.request_ids[i] for i in keep],
            outputs.token_ids[keep],
            outputs.count[keep],
            [ended for ended in outputs.finished if ended.request.id not in ours],
            {request_id: entries for request_id, entries in outputs.logprobs.items() if request_id not in ours},
            outputs.prompt_logprobs,
        )

    def _advance(self, search: Search) -> None:
        chosen = search.choose()
        parents = [choice.beam for choice in chosen]
        self._drop([beam for beam in search.beams if beam not in parents])
        search.beams = []
        for beam in dict.fromkeys(parents):
            first, *others = (choice.sequence for choice in chosen if choice.beam is beam)
            for sequence in others:
                search.beams.append(self._fork(search, beam, sequence))
            search.beams.append(self._go_on(search, beam, first))

    def _fork(self, search: Search, parent: Beam, sequence: Sequence) -> Beam:
        if parent.request.id not in self._scheduler.requests:
            return self._readmit(search, sequence)
        request = self._new_request(search)
        self._scheduler.fork(parent.request.id, request)
        self._scheduler.replace_last_token(request.id, sequence.tokens[-1])
        return self._own(search, Beam(request, sequence))

    def _go_on(self, search: Search, beam: Beam, sequence: Sequence) -> Beam:
        if beam.request.id not in self._scheduler.requests:
            self._drop([beam])
            return self._readmit(search, sequence)
        self._scheduler.replace_last_token(beam.request.id, sequence.tokens[-1])
        beam.sequence, beam.candidates = sequence, None
        return beam

    def _readmit(self, search: Search, sequence: Sequence) -> Beam:
        """A beam whose parent's blocks are gone: what the prefix cache does not hold of it is computed again."""
        request = self._new_request(search)
        request.token_ids = np.append(request.token_ids, np.array(sequence.tokens, dtype=np.int32))
        request.resumed = bool(sequence.tokens)
        self._scheduler.add_request(request)
        return self._own(search, Beam(request, sequence))

    def _hold_back(self, search: Search) -> None:
        """Some beams are ahead of others: they must not go on with the token they sampled."""
        for beam in search.beams:
            if beam.candidates is not None and self._scheduler.abort(beam.request.id):
                self._leaving.add(beam.request.id)

    def _tell_end(self, search: Search, outputs: StepOutputs) -> None:
        self._end(search)
        for place, owner in enumerate(search.owners):
            if self._searches.pop(owner.id, None) is None:
                continue
            if search.error is not None or place >= len(search.finished):
                error = search.error or f"there are only {len(search.finished)} different sequences"
                outputs.finished.append(FinishedRequest(owner, RequestStatus.FINISHED_ERROR, None, error))
                continue
            best = search.finished[place]
            if search.first is not None:
                owner.first_scheduled_time = search.first.first_scheduled_time
                owner.num_cached_tokens = search.first.num_cached_tokens
            outputs.add(owner.id, np.array(best.tokens, dtype=np.int32))
            outputs.logprobs[owner.id] = best.logprobs
            last = best.tokens[-1]
            stop_id = best.status is RequestStatus.FINISHED_STOPPED and last in search.sampling.stop_token_ids
            outputs.finished.append(FinishedRequest(owner, best.status, last if stop_id else None, None))

    # ---- beams

    def _begin_what_fits(self) -> None:
        while self._waiting and self._num_rows + self._waiting[0].width <= self._scheduler.config.max_num_seqs:
            search = self._waiting.popleft()
            self._num_rows += search.width
            beam = self._readmit(search, Sequence([], [], 0.0))
            search.beams, search.first = [beam], beam.request

    def _end(self, search: Search) -> None:
        """Nobody wants more of it. It may not have begun."""
        if search in self._waiting:
            self._waiting.remove(search)
        elif search.first is not None:
            self._drop(search.beams)
            search.beams = []
            self._num_rows -= search.width
            self._begin_what_fits()

    def _new_request(self, search: Search) -> Request:
        owner = search.owners[0]
        return Request(
            f"{owner.id}/beam-{next(self._names)}",
            owner.token_ids,
            _row_sampling(search),
            arrival_time=owner.arrival_time,
            priority=owner.priority,
            tenant=owner.tenant,
            cache_salt=owner.cache_salt,
            ttft_target=owner.ttft_target,
            tpot_target=owner.tpot_target,
        )

    def _own(self, search: Search, beam: Beam) -> Beam:
        self._beams[beam.request.id] = (search, beam)
        return beam

    def _drop(self, beams: list[Beam]) -> None:
        for beam in beams:
            del self._beams[beam.request.id]
            if self._scheduler.abort(beam.request.id):
                self._leaving.add(beam.request.id)

    def _ending_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        eos = () if sampling.ignore_eos else self._scheduler.config.eos_token_ids
        return tuple(dict.fromkeys(eos + sampling.stop_token_ids))


def _row_sampling(search: Search) -> SamplingParams:
    """What the sampler is told of a beam. It may report more logprobs than one may ask for without beam search."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=search.sampling.max_tokens,
        ignore_eos=True,
        logprobs=search.num_candidates,
        use_beam_search=True,
    )
