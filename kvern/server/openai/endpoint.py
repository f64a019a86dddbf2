"""The way of a generating call, the same for completions and chat: read, check, admit, answer.

In this order: nothing is admitted before everything about the request is known to be good, and nothing is sent before
there is something of the answer, so that what goes wrong early is a plain HTTP error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvern import __version__
from kvern.engine.output_processor import CompletionDelta
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.server.errors import as_api_error
from kvern.server.openai.generation import Generation
from kvern.server.openai.logprobs import TokenNames
from kvern.server.openai.protocol import GenerationRequest
from kvern.server.state import ServerState
from kvern.server.transport import EventStream, event_of, json_response, read_json, until_disconnect

R = TypeVar("R", bound=GenerationRequest)

SYSTEM_FINGERPRINT = f"kvern-{__version__}"
# Completions of one call: prompts times n. More is a mistake, or belongs in several calls.
MAX_CHOICES = 4096
# Length from which prompts are tokenized in a thread, so that others need not wait.
_LONG = 8192


class Shape(ABC, Generic[R]):
    """What distinguishes the endpoints: what the prompts are, and how a completion is written down.

    One object per call; it may remember what it has written of each choice.
    """

    request_type: type[R]
    object: str
    chunk_object: str

    def __init__(self, server: ServerState, request: R, sampling: SamplingParams) -> None:
        self.server = server
        self.request = request
        self.sampling = sampling
        self.names = TokenNames(server.client.tokenizer, bool(request.return_tokens_as_token_ids))

    def num_prompts(self) -> int:
        return 1

    @abstractmethod
    def length(self) -> int:
        """Characters, and tokens given as ids, that `tokenize` must look at."""

    @abstractmethod
    def tokenize(self) -> list[list[int]]:
        """The prompts' token ids. May run in a thread. Raises InvalidRequest."""

    @abstractmethod
    def choice(self, index: int, delta: CompletionDelta) -> dict[str, Any]:
        """A whole choice. Called once for each, in order."""

    @abstractmethod
    def chunks(self, index: int, delta: CompletionDelta) -> list[dict[str, Any]]:
        """What is new of a choice, as the `choices` entries of no, one or several chunks."""


async def generate(server: ServerState, http: Request, shape_type: type[Shape[Any]]) -> Response:
    """Answer a call. Raises what `as_api_error` knows; then nothing was sent and nothing runs."""
    try:
        request = await read_json(http, shape_type.request_type, server.max_body_bytes)
        server.check_open()
        request.check()
        server.check_model(request.model)
        shape = shape_type(server, request, request.sampling_params())
        prompts = await _tokenize(shape, http)
        if prompts is None:
            return _nobody()
        tenant = server.tenant_of(request.user, http.headers.get("x-tenant"))
        generation = await Generation.admit(server.client, server.metrics, request, prompts, shape.sampling, tenant)
    except Exception as exc:
        server.metrics.rejected.labels(str(as_api_error(exc).status)).inc()
        raise
    if request.stream:
        return EventStream(_events(shape, generation), generation.close)
    async with generation:
        completions = await until_disconnect(http.receive, generation.collect())
    if completions is None:
        return _nobody()
    choices = [shape.choice(index, whole) for index, whole in enumerate(completions)]
    answer = _envelope(shape, generation, shape.object)
    return json_response(answer | {"choices": choices, "usage": generation.usage()})


async def _tokenize(shape: Shape[Any], http: Request) -> list[list[int]] | None:
    """The prompts' token ids; None if the client went away meanwhile. Raises InvalidRequest."""
    client, sampling = shape.server.client, shape.sampling
    if shape.num_prompts() * sampling.num_candidates > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n (or best_of) must be at most {MAX_CHOICES}", "n")
    sampling.check_vocabulary(client.input_processor.vocab_size)
    if shape.length() <= _LONG:
        return shape.tokenize()
    return await until_disconnect(http.receive, client.in_thread(shape.tokenize))


async def _events(shape: Shape[Any], generation: Generation) -> AsyncGenerator[bytes, None]:
    request = shape.request
    chunk = _envelope(shape, generation, shape.chunk_object) | {"choices": []}
    if request.include_usage:
        chunk["usage"] = None
    deltas = generation.deltas()
    try:
        async for index, delta in deltas:
            for choice in shape.chunks(index, delta):
                chunk["choices"] = [choice]
                if request.continuous_usage:
                    chunk["usage"] = generation.usage()
                yield event_of(chunk)
    finally:
        await deltas.aclose()
    if request.include_usage:
        yield event_of(chunk | {"choices": [], "usage": generation.usage()})


def _envelope(shape: Shape[Any], generation: Generation, kind: str) -> dict[str, Any]:
    """What every answer and every chunk of it has."""
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": shape.server.model_name,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "service_tier": None,
    }


def _nobody() -> Response:
    """For a client that has gone: never seen by anybody, 499 in a log."""
    return Response(status_code=499)
