"""From a checked request to its completions: what both generating endpoints share.

A `Generation` owns all completions of one call. `admit` makes it; whoever has it must leave its `async with`, when the
answer is out or its client is gone: that aborts what still runs, and counts each completion exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from kvern.engine.messages import EngineDeadError
from kvern.engine.output_processor import CompletionDelta, choose
from kvern.outputs import RequestMetrics
from kvern.sampling_params import SamplingParams
from kvern.server.errors import ApiError, unavailable
from kvern.server.openai.protocol import GenerationRequest, new_id, unix_time

if TYPE_CHECKING:
    from kvern.engine.client import AsyncClient, RequestStream
    from kvern.server.metrics import Metrics

# Prompts of one call admitted in a row, before others have their turn on the event loop.
_TURN = 32


class Generation:
    """The completions of one call: choice i is completion i % n of prompt i // n, n being how many are made of each."""

    def __init__(self, id: str, sampling: SamplingParams, metrics: Metrics) -> None:
        self.id = id
        self.created = unix_time()
        self.sampling = sampling
        self.n = sampling.num_candidates
        self.prompts: list[list[int]] = []
        self.completion_tokens: list[int] = []  # per choice, delivered so far
        self._times: list[RequestMetrics | None] = []  # per choice, from its first delta on
        self._streams: list[RequestStream] = []
        self._running: set[int] = set()  # choices that have not ended; only looked up, or walked to the end
        self._metrics = metrics

    @classmethod
    async def admit(
        cls,
        client: AsyncClient,
        metrics: Metrics,
        request: GenerationRequest,
        prompts: list[list[int]],
        sampling: SamplingParams,
        tenant: str | None,
    ) -> Generation:
        """Send every prompt to the engine, or none. Raises InvalidRequest and EngineDeadError."""
        generation = cls(new_id(request.id_prefix), sampling, metrics)
        try:
            for i, prompt in enumerate(prompts):
                stream = await client.generate(
                    prompt,
                    sampling,
                    request_id=generation.id if len(prompts) == 1 else f"{generation.id}-{i}",
                    priority=request.priority or 0,
                    tenant=tenant,
                    cache_salt=request.cache_salt,
                    ttft_target=request.ttft_target,
                    tpot_target=request.tpot_target,
                )
                generation._own(stream, prompt)
                if i % _TURN == _TURN - 1:
                    await asyncio.sleep(0)
        except BaseException:
            generation.close()
            raise
        return generation

    def _own(self, stream: RequestStream, prompt: list[int]) -> None:
        first = len(self._times)
        self._running.update(range(first, first + self.n))
        self._times += [None] * self.n
        self.completion_tokens += [0] * self.n
        self._streams.append(stream)
        self.prompts.append(prompt)
        self._metrics.prompt_tokens.inc(len(prompt))

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        for stream in self._streams:
            stream.close()
        self._count_the_rest("abort")

    def _count_the_rest(self, finish_reason: str) -> None:
        for choice in self._running:
            self._metrics.completion_ended(finish_reason, self.completion_tokens[choice], RequestMetrics())
        self._running.clear()

    async def deltas(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        """(choice, what is new of it) in the order it comes, until every choice has ended.

        Raises ApiError when a completion fails or the server ends it, EngineDeadError when the engine dies.
        """
        source = self._of(0) if len(self._streams) == 1 else self._of_all()
        try:
            async for choice, delta in source:
                self._count(choice, delta)
                if delta.finish_reason in ("abort", "error"):
                    raise _failure(delta)
                yield choice, delta
        except EngineDeadError:
            self._count_the_rest("error")
            raise
        finally:
            await source.aclose()

    def _count(self, choice: int, delta: CompletionDelta) -> None:
        self._times[choice] = delta.metrics
        self.completion_tokens[choice] += len(delta.token_ids)
        self._metrics.generation_tokens.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._running.discard(choice)
            self._metrics.completion_ended(delta.finish_reason, self.completion_tokens[choice], delta.metrics)

    async def _of(self, prompt: int) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        async for delta in self._streams[prompt]:
            yield prompt * self.n + delta.index, delta

    async def _of_all(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        """The deltas of several prompts, as they come. A slow reader leaves them in the engine's streams."""
        queue: asyncio.Queue[tuple[int, CompletionDelta] | BaseException | None] = asyncio.Queue(maxsize=1)

        async def pump(prompt: int) -> None:
            try:
                async for item in self._of(prompt):
                    await queue.put(item)
                await queue.put(None)
            except Exception as exc:
                await queue.put(exc)

        pumps = [asyncio.ensure_future(pump(prompt)) for prompt in range(len(self._streams))]
        try:
            ended = 0
            while ended < len(pumps):
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    ended += 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def collect(self) -> list[CompletionDelta]:
        """Every choice that is to be returned, whole, in order."""
        whole: dict[int, CompletionDelta] = {}
        async for choice, delta in self.deltas():
            if choice in whole:
                whole[choice].merge(delta)
            else:
                whole[choice] = delta
        made = [whole[choice] for choice in range(len(self._times))]
        firsts = range(0, len(made), self.n)
        return [chosen for first in firsts for chosen in choose(made[first : first + self.n], self.sampling)]

    def usage(self) -> dict[str, Any]:
        """Tokens so far: each prompt counted once, the output of every choice. cached_tokens are those of the prompts
        that the first completion of each found in the prefix cache."""
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        completion_tokens = sum(self.completion_tokens)
        cached = sum(times.num_cached_tokens for times in self._times[:: self.n] if times is not None)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


def _failure(delta: CompletionDelta) -> ApiError:
    """The error for a completion that its client did not end. Only a shutdown aborts what somebody still reads."""
    if delta.finish_reason == "abort":
        return unavailable(delta.error or "the server is shutting down", code="shutting_down")
    return ApiError(500, delta.error or "the generation failed", code="generation_failed")
