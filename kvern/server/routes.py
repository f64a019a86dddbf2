"""The HTTP server: its routes (`build_app`), and how it ends (`HttpServer`).

The first SIGTERM or SIGINT stops admission (503 with Retry-After, also from /health) while the port stays open; what
runs may go on for `shutdown_timeout` seconds and is then ended, each with an error its client can read; the exit code
is 0. A second signal ends what runs at once. If the engine dies, every open call gets an error, /health says 503 for
FAREWELL seconds, and the exit code is 1, so that a supervisor starts anew.
"""

from __future__ import annotations

import asyncio
import logging
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvern import __version__
from kvern.config import ServerConfig
from kvern.engine.client import AsyncClient
from kvern.server import admin
from kvern.server.errors import install_error_handlers
from kvern.server.metrics import CONTENT_TYPE
from kvern.server.openai.chat import ChatShape
from kvern.server.openai.completions import CompletionShape
from kvern.server.openai.endpoint import generate
from kvern.server.openai.models import model_card, model_list
from kvern.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from kvern.server.openai.tokenize import detokenize, tokenize
from kvern.server.state import ServerState
from kvern.server.transport import Gate, json_response, read_json

logger = logging.getLogger(__name__)

# Seconds a dead engine's server still answers, so that probes and clients learn of it.
FAREWELL = 2.0
# Seconds for the last bytes to leave: a client that does not read does not keep the server.
_LAST_WORDS = 3
_LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def build_app(client: AsyncClient, config: ServerConfig) -> Starlette:
    """The application, on a started client. Its ServerState is `app.state.server`."""
    server = ServerState(client, config)
    app = Starlette(routes=[*_openai_routes(server), *_own_routes(server)])
    app.state.server = server
    install_error_handlers(app)
    app.add_middleware(Gate, api_key=config.api_key)
    # A page from anywhere may talk to a server that asks for a key; one that does not, serves local pages only.
    origins: dict[str, Any] = {"allow_origins": ["*"]} if config.api_key else {"allow_origin_regex": _LOCAL_ORIGIN}
    app.add_middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"], **origins)
    return app


def _openai_routes(server: ServerState) -> list[Route]:
    async def completions(request: Request) -> Response:
        return await generate(server, request, CompletionShape)

    async def chat_completions(request: Request) -> Response:
        return await generate(server, request, ChatShape)

    async def models(request: Request) -> Response:
        return json_response(model_list(server))

    async def model(request: Request) -> Response:
        server.check_model(request.path_params["name"])
        return json_response(model_card(server))

    async def tokenize_text(request: Request) -> Response:
        body = await read_json(request, TokenizeRequest, server.max_body_bytes)
        return json_response(await server.client.in_thread(tokenize, server, body))

    async def detokenize_ids(request: Request) -> Response:
        body = await read_json(request, DetokenizeRequest, server.max_body_bytes)
        return json_response(await server.client.in_thread(detokenize, server, body))

    return [
        Route(prefix + path, endpoint, methods=[method])
        for prefix in ("/v1", "")  # clients disagree on whether a base URL ends with /v1
        for method, path, endpoint in (
            ("POST", "/completions", completions),
            ("POST", "/chat/completions", chat_completions),
            ("GET", "/models", models),
            ("GET", "/models/{name:path}", model),
            ("POST", "/tokenize", tokenize_text),
            ("POST", "/detokenize", detokenize_ids),
        )
    ]


def _own_routes(server: ServerState) -> list[Route]:
    async def root(request: Request) -> Response:
        paths = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"]
        return json_response(
            {"name": "kvern", "version": __version__, "model": server.model_name}
            | {"paths": [*paths, "/health", "/version", "/metrics"]}
        )

    async def health(request: Request) -> Response:
        server.check_open()
        return json_response({"status": "ok"})

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(request: Request) -> Response:
        return Response(server.metrics.render(), media_type=CONTENT_TYPE)

    async def policy(request: Request) -> Response:
        return await admin.get_policy(server)

    async def set_policy(request: Request) -> Response:
        return await admin.set_policy(server, request)

    async def requests(request: Request) -> Response:
        return await admin.get_requests(server)

    async def pins(request: Request) -> Response:
        return await admin.get_pins(server)

    async def pin(request: Request) -> Response:
        return await admin.pin(server, request)

    async def unpin(request: Request) -> Response:
        return await admin.unpin(server, request.path_params["pin_id"])

    return [
        Route("/", root, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/admin/pins", pins, methods=["GET"]),
        Route("/admin/pins", pin, methods=["POST"]),
        Route("/admin/pins/{pin_id}", unpin, methods=["DELETE"]),
        Route("/admin/policy", policy, methods=["GET"]),
        Route("/admin/policy", set_policy, methods=["POST"]),
        Route("/admin/requests", requests, methods=["GET"]),
    ]


class HttpServer(uvicorn.Server):
    """uvicorn's server with the end of life described above."""

    def __init__(self, app: Starlette, state: ServerState, backlog: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                backlog=backlog,
                timeout_graceful_shutdown=_LAST_WORDS,
            )
        )
        self.exit_code = 0
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._ending: list[asyncio.Task[None]] = []
        self._watch = asyncio.ensure_future(self._watch_engine())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        patience = 0.0 if self._state.draining else self._state.config.shutdown_timeout
        running = self._state.client.num_unfinished
        logger.info("ending: nothing more is admitted, %d running completions have %g s", running, patience)
        self._state.draining = True
        self._ending.append(asyncio.ensure_future(self._drain(patience)))

    async def _drain(self, patience: float) -> None:
        await self._state.client.shutdown(patience)
        self.should_exit = True

    async def _watch_engine(self) -> None:
        await self._state.client.wait_gone()
        if not self._state.draining:
            self.exit_code = 1
            await asyncio.sleep(FAREWELL)
            self.should_exit = True

    async def ended(self) -> int:
        """The exit code, when all that ends is over."""
        self._watch.cancel()
        await asyncio.gather(self._watch, *self._ending, return_exceptions=True)
        return self.exit_code
