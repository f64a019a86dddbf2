"""The HTTP server: routes (`build_app`), and a process's life from start to exit code (`serve`).

End of life. The first SIGTERM or SIGINT stops admission (503 with Retry-After, also from /health) while the port stays
open; what runs may go on for `shutdown_timeout` seconds and is then ended, each with an error its client can read;
the exit code is 0. A second signal ends what runs at once. If the engine dies, every open call gets an error, /health
says 503 for FAREWELL seconds, and the exit code is 1, so that a supervisor starts anew.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import socket
import sys
from types import FrameType
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response

from kvern import __version__
from kvern.config import EngineConfig, InvalidConfig, ServerConfig
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
_BACKLOG = 2048
_LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def build_app(client: AsyncClient, config: ServerConfig) -> FastAPI:
    """The application, on a started client. Its ServerState is `app.state.server`."""
    app = FastAPI(title="kvern", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    server = app.state.server = ServerState(client, config)
    install_error_handlers(app)
    app.add_middleware(Gate, api_key=config.api_key)
    # A page from anywhere may talk to a server that asks for a key; one that does not, serves local pages only.
    origins: dict[str, Any] = {"allow_origins": ["*"]} if config.api_key else {"allow_origin_regex": _LOCAL_ORIGIN}
    app.add_middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"], **origins)
    _add_openai_routes(app, server)
    _add_own_routes(app, server)
    return app


def _add_openai_routes(app: FastAPI, server: ServerState) -> None:
    async def completions(request: Request) -> Response:
        return await generate(server, request, CompletionShape)

    async def chat_completions(request: Request) -> Response:
        return await generate(server, request, ChatShape)

    async def models() -> Response:
        return json_response(model_list(server))

    async def model(name: str) -> Response:
        server.check_model(name)
        return json_response(model_card(server))

    async def tokenize_text(request: Request) -> Response:
        body = await read_json(request, TokenizeRequest, server.max_body_bytes)
        return json_response(await server.client.in_thread(tokenize, server, body))

    async def detokenize_ids(request: Request) -> Response:
        body = await read_json(request, DetokenizeRequest, server.max_body_bytes)
        return json_response(await server.client.in_thread(detokenize, server, body))

    for prefix in ("/v1", ""):  # clients disagree on whether a base URL ends with /v1
        app.add_api_route(f"{prefix}/completions", completions, methods=["POST"])
        app.add_api_route(f"{prefix}/chat/completions", chat_completions, methods=["POST"])
        app.add_api_route(f"{prefix}/models", models, methods=["GET"])
        app.add_api_route(f"{prefix}/models/{{name:path}}", model, methods=["GET"])
        app.add_api_route(f"{prefix}/tokenize", tokenize_text, methods=["POST"])
        app.add_api_route(f"{prefix}/detokenize", detokenize_ids, methods=["POST"])


def _add_own_routes(app: FastAPI, server: ServerState) -> None:
    async def root() -> Response:
        paths = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"]
        return json_response(
            {"name": "kvern", "version": __version__, "model": server.model_name}
            | {"paths": [*paths, "/health", "/version", "/metrics"]}
        )

    async def health() -> Response:
        server.check_open()
        return json_response({"status": "ok"})

    async def version() -> Response:
        return json_response({"version": __version__})

    async def metrics() -> Response:
        return Response(server.metrics.render(), media_type=CONTENT_TYPE)

    async def policy() -> Response:
        return await admin.get_policy(server)

    async def set_policy(request: Request) -> Response:
        return await admin.set_policy(server, request)

    async def requests() -> Response:
        return await admin.get_requests(server)

    async def pins() -> Response:
        return await admin.get_pins(server)

    async def pin(request: Request) -> Response:
        return await admin.pin(server, request)

    async def unpin(pin_id: str) -> Response:
        return await admin.unpin(server, pin_id)

    app.add_api_route("/admin/pins", pins, methods=["GET"])
    app.add_api_route("/admin/pins", pin, methods=["POST"])
    app.add_api_route("/admin/pins/{pin_id}", unpin, methods=["DELETE"])
    app.add_api_route("/admin/policy", policy, methods=["GET"])
    app.add_api_route("/admin/policy", set_policy, methods=["POST"])
    app.add_api_route("/admin/requests", requests, methods=["GET"])
    for path, endpoint in {"/": root, "/health": health, "/version": version, "/metrics": metrics}.items():
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"])


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Run until told to end; the exit code. Raises InvalidConfig, before anything is loaded where that can be said, and
    EngineDeadError if the engine does not start."""
    listener = _listen(config)
    try:
        return uvloop.run(_serve(engine_config, config, listener))
    finally:
        listener.close()


async def _serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> int:
    client = await AsyncClient.start(engine_config, lambda phase, seconds: logger.info("%s: %.2f s", phase, seconds))
    try:
        app = build_app(client, config)
        server = _Server(app, app.state.server)
        listener.listen(_BACKLOG)  # whoever reads the next line can connect
        _say_address(app.state.server, listener)
        await server.serve(sockets=[listener])
        return await server.ended()
    finally:
        await client.shutdown()


class _Server(uvicorn.Server):
    """uvicorn's server with the end of life described above."""

    def __init__(self, app: FastAPI, state: ServerState) -> None:
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
                backlog=_BACKLOG,
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


def _listen(config: ServerConfig) -> socket.socket:
    """Take the port, before the minutes a model may take to load. Raises InvalidConfig.

    Accepted sockets inherit these options: a client that vanishes without a word is noticed after a minute.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise InvalidConfig(f"host {config.host!r} cannot be listened on: {exc.strerror or exc}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
    try:
        listener.bind(address)
    except OSError as exc:
        listener.close()
        raise InvalidConfig(f"{config.host}:{config.port} cannot be listened on: {exc.strerror}") from None
    return listener


def _say_address(server: ServerState, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if server.config.api_key else ""
    body = {"model": server.model_name, "messages": [{"role": "user", "content": "Hello!"}]}
    print(f"kvern serves {server.model_name} at {url}")
    print(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
          f"  -d {shlex.quote(msgspec.json.encode(body).decode())}", flush=True)  # fmt: skip
