"""What lies between a socket and an endpoint: paths, the API key, bodies, server-sent events, clients that go away.

Order for every request: CORS, path, API key, router. An endpoint reads the body with `read_json` and answers with a
plain response or an `EventStream`; what takes time runs under `until_disconnect`, so that it ends with its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvern.server.errors import ApiError, as_api_error
from kvern.server.openai.protocol import parse

_R = TypeVar("_R")
_T = TypeVar("_T")

# What needs no key: probes, and nothing about anybody's requests.
OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics"})
DONE = b"data: [DONE]\n\n"
# Seconds after which a stream that has nothing to say shows that it lives; proxies give up after 60.
SILENCE = 15.0

logger = logging.getLogger(__name__)


class Gate:
    """ASGI middleware: gives each endpoint one spelling of its path, echoes X-Request-Id, asks for the API key."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app = app
        self.api_key = api_key.encode() if api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
        scope = {**scope, "path": path, "raw_path": path.encode()}
        headers = dict(scope["headers"])

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", headers[b"x-request-id"])]
            await send(message)

        sender = send_with_id if b"x-request-id" in headers else send
        if self._admits(path, headers.get(b"authorization", b"")):
            await self.app(scope, receive, sender)
        else:
            error = ApiError(
                401,
                "this server needs an API key: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, sender)

    def _admits(self, path: str, authorization: bytes) -> bool:
        if self.api_key is None or path in OPEN_PATHS:
            return True
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.api_key)


async def read_json(request: Request, kind: type[_R], max_bytes: int) -> _R:
    """The body as a `kind`. Raises ApiError 413 and 415, and InvalidRequest for what is not such a request.

    The size is checked while the body comes in: no more than max_bytes are ever held.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"the body must be application/json, got {content_type!r}", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not supported", code="unsupported_media_type")
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > max_bytes:
            raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > max_bytes:
                raise too_large
            body += chunk
    except ClientDisconnect:
        raise ApiError(400, "the body ended too early", code="incomplete_body") from None
    return parse(bytes(body), kind)


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, _T], *, while_silent: Callable[[], Awaitable[None]] | None = None
) -> _T | None:
    """The result of `work`, or None if the client went away first; `work` is then cancelled and has ended.

    while_silent is called every SILENCE seconds in between.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        while not task.done() and not watcher.done():
            await asyncio.wait({task, watcher}, timeout=SILENCE, return_when=asyncio.FIRST_COMPLETED)
            if while_silent is not None and not task.done() and not watcher.done():
                await while_silent()
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def event_of(value: Any) -> bytes:
    """`value` as one server-sent event. JSON has no bare line ends, so it is always one line."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(Response):
    """Sends the events of a generator as they come, then `data: [DONE]`.

    Nothing is sent before the first event is there, so that what fails until then is a plain HTTP error; what fails
    later is one error event, and nothing follows it. A reader who sees nothing for SILENCE seconds gets a comment line,
    which clients skip. However it ends, the generator is closed and `on_end` is called.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._started = False
        self._lock = asyncio.Lock()  # an event and a comment may want to be sent at the same time
        self._last = 0.0  # when something was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(send), while_silent=lambda: self._comment(send))
        finally:
            await self._events.aclose()
            self._on_end()

    async def _run(self, send: Send) -> None:
        try:
            async for event in self._events:
                await self._send(send, event)
            last = DONE
        except Exception as exc:
            if not self._started:
                raise
            error = as_api_error(exc)
            if error.status == 500:
                logger.exception("a stream failed")
            last = event_of(error.body())
        await self._send(send, last, more=False)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._last = time.monotonic()

    async def _comment(self, send: Send) -> None:
        if not self._lock.locked() and time.monotonic() - self._last >= SILENCE:
            await self._send(send, b": still here\n\n")
