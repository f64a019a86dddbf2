"""The two fronts of the engine: InprocClient (LLM, same process, step by step) and AsyncClient (server, own process).

AsyncClient owns the engine's process and three things per request, in this order of life:
  1. before admission: validation and tokenization; nothing is known of the request yet, cancelling costs nothing;
  2. from the moment Add is sent: an entry per child in `_children`, forgotten only when the engine itself says that
     the child ended (every Add is answered by exactly one finish), so an abort always finds what it should end;
  3. the RequestStream the caller iterates. Closing it, or cancelling its reader, sends the abort first.
There is no await between the first Add sent and the stream returned, and none between seeing a cancellation and
sending the abort: no point at which a cancelled task leaves a request running that nobody reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvern.config import EngineConfig, ModelConfig, SchedulerConfig
from kvern.engine.messages import EngineStats
from kvern.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvern.engine.input_processor import InputProcessor
    from kvern.engine.output_processor import CompletionDelta
    from kvern.tokenizer import Tokenizer

Prompt = str | list[int]


class EngineDeadError(RuntimeError):
    """The engine cannot serve: it failed, its process died, it stalls, or it is shutting down."""


class Health(NamedTuple):
    ok: bool
    reason: str  # "" when ok


class RequestStream:
    """The deltas of one prompt's n completions, in the order they came. An async iterator of CompletionDelta.

    It ends after every child's finish. Closing it earlier (`aclose`, leaving `async with`, cancelling the task that
    waits for the next delta) aborts all children in the engine. Raises EngineDeadError from `__anext__` when the
    engine dies or stalls; a failure of this request alone is a delta with finish_reason "error".
    """

    request_id: str
    prompt_token_ids: list[int]
    arrival_time: float

    def __aiter__(self) -> AsyncIterator[CompletionDelta]: ...
    async def __anext__(self) -> CompletionDelta: ...
    async def aclose(self) -> None: ...
    async def __aenter__(self) -> RequestStream: ...
    async def __aexit__(self, *exc: object) -> None: ...


class AsyncClient:
    """The server's front: starts and owns an engine in its own process. All methods on one event loop."""

    model_config: ModelConfig
    limits: SchedulerConfig  # final: max_model_len, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, ...
    tokenizer: Tokenizer
    input_processor: InputProcessor
    stats: EngineStats  # after the latest step
    engine_config: EngineConfig

    @classmethod
    async def start(
        cls,
        engine_config: EngineConfig,
        on_progress: Callable[[str, float], None] | None = None,
        *,
        stall_timeout: float = 60.0,
    ) -> AsyncClient:
        """Start the engine process and wait until it is ready.

        on_progress(phase, seconds since start) is called as loading goes on. Raises InvalidConfig, or EngineDeadError
        with the engine's own words when it cannot load.
        """
        raise NotImplementedError

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Validate, tokenize (long prompts in a thread) and admit one prompt: `stream = await client.generate(...)`.

        Raises InvalidRequest before anything is admitted, also when `request_id` is live; EngineDeadError when the
        engine is not healthy or is shutting down. When it returns, the request is on its way to the engine: the
        caller must exhaust the stream or close it (`async with stream:`).
        """
        raise NotImplementedError

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests (as given to `generate`) and all their children; unknown ones are fine. Their streams
        end with finish_reason "abort"."""

    async def call(self, name: str, timeout: float = 10.0, **arguments: Any) -> Any:
        """Ask the engine: "stats" -> EngineStats as a dict, "requests" -> one dict per live request, "ping"."""

    def health(self) -> Health:
        """Whether the engine makes progress: false when dead, shutting down, or silent for `stall_timeout` seconds
        although something was asked of it."""
        raise NotImplementedError

    async def wait_dead(self) -> str:
        """Return the reason once the engine has died without being asked to; never returns before."""
        raise NotImplementedError

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Admit nothing more, give running requests `drain_seconds`, abort the rest (their streams end with
        finish_reason "abort"), end the process. Idempotent."""
