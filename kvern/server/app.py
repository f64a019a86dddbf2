"""The server process: from its start to its exit code.

The engine has a process of its own, which starts first: what it and this one have to import, they import side by side.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import shlex
import socket
import sys
from typing import TYPE_CHECKING

import msgspec
import uvloop

from kvern.config import EngineConfig, InvalidConfig, ServerConfig
from kvern.engine.client import AsyncClient

if TYPE_CHECKING:
    from kvern.server.state import ServerState

logger = logging.getLogger(__name__)

_BACKLOG = 2048


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Run until told to end; the exit code. Raises InvalidConfig, before anything is loaded where that can be said, and
    EngineDeadError if the engine does not start."""
    listener = _listen(config)
    try:
        return uvloop.run(_serve(engine_config, config, listener))
    finally:
        listener.close()


async def _serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> int:
    starting = asyncio.ensure_future(
        AsyncClient.start(engine_config, lambda phase, seconds: logger.info("%s: %.2f s", phase, seconds))
    )
    await asyncio.to_thread(importlib.import_module, "kvern.server.routes")
    from kvern.server.routes import HttpServer, build_app

    client = await starting
    try:
        app = build_app(client, config)
        server = HttpServer(app, app.state.server, _BACKLOG)
        listener.listen(_BACKLOG)  # whoever reads the next line can connect
        _say_address(app.state.server, listener)
        await server.serve(sockets=[listener])
        return await server.ended()
    finally:
        await client.shutdown()


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
