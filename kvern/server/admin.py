"""The admin endpoints: which policy is in use, another one, why requests wait, and which prefixes are pinned.

They show what other clients do and run code that is named in a request (module:Class), so they answer only where
whoever asks is trusted: with the API key, or, without one, on a server that listens on this machine alone. There a web
page must not be able to ask in its visitor's name: the body must say that it is JSON, which browsers do not let a
foreign page say.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvern.engine.input_processor import check_name
from kvern.sampling_params import InvalidRequest
from kvern.server.errors import ApiError
from kvern.server.state import ServerState
from kvern.server.transport import json_response, read_json


class PolicyRequest(msgspec.Struct):
    policy: str
    options: dict[str, Any] | None = None


class PinRequest(msgspec.Struct):
    prompt: str | list[int] | None = None
    ttl: float | None = None
    cache_salt: str | None = None


async def get_policy(server: ServerState) -> Response:
    return json_response(await _ask(server, "policy"))


async def set_policy(server: ServerState, http: Request) -> Response:
    _check_trusted(server)
    _check_is_json(http)
    request = await read_json(http, PolicyRequest, server.max_body_bytes)
    return json_response(await _ask(server, "set_policy", policy=request.policy, options=request.options or {}))


async def get_requests(server: ServerState) -> Response:
    return json_response({"requests": await _ask(server, "requests")})


async def get_pins(server: ServerState) -> Response:
    return json_response(await _ask(server, "pins"))


async def pin(server: ServerState, http: Request) -> Response:
    _check_trusted(server)
    _check_is_json(http)
    request = await read_json(http, PinRequest, server.max_body_bytes)
    if request.prompt is None or request.ttl is None:
        missing = "prompt" if request.prompt is None else "ttl"
        raise InvalidRequest(f"{missing} is required", missing)
    check_name(request.cache_salt, "cache_salt")
    tokens = await server.client.in_thread(server.client.input_processor.tokenize, request.prompt)
    salt = request.cache_salt
    return json_response(await _ask(server, "pin", prompt_token_ids=tokens, ttl=request.ttl, cache_salt=salt))


async def unpin(server: ServerState, pin_id: str) -> Response:
    if not await _ask(server, "unpin", pin_id=pin_id):
        raise ApiError(404, f"there is no pin {pin_id!r}, or its time is over", code="not_found")
    return json_response({"id": pin_id, "unpinned": True})


async def _ask(server: ServerState, what: str, **arguments: Any) -> Any:
    _check_trusted(server)
    try:
        return await server.client.call(what, **arguments)
    except InvalidRequest:
        raise
    except ValueError as exc:
        param = "options" if str(exc).startswith("policy_options") else "policy"
        raise ApiError(400, str(exc), param=param, code="invalid_policy") from None


def _check_is_json(http: Request) -> None:
    if "content-type" not in http.headers:
        raise ApiError(415, "Content-Type: application/json is needed here", code="unsupported_media_type")


def _check_trusted(server: ServerState) -> None:
    if not server.trusts_callers:
        raise ApiError(
            403,
            "admin endpoints answer only on a server with an API key or one that listens on this machine alone",
            code="admin_not_allowed",
        )
