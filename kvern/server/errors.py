"""Everything that goes wrong, as one JSON form: {"error": {"message", "type", "param", "code"}}.

`type` follows the status, so that typed clients raise the class their users expect; `code` is for programs.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvern.engine.messages import EngineDeadError
from kvern.sampling_params import InvalidRequest

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "service_unavailable_error",
}
# What the router says in one word, in a form that helps.
_MESSAGES = {404: "there is nothing at {method} {path}", 405: "{path} does not take {method}"}


class ApiError(Exception):
    """An answer with a status of 400 or above. `param` names the field of the request that is wrong, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, "application/json")


def unavailable(message: str, *, code: str = "service_unavailable", retry_after: int = 5) -> ApiError:
    """503: the server cannot take a request now; `retry_after` in seconds."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def as_api_error(exc: BaseException) -> ApiError:
    """The answer to `exc`. What is not known to be the client's fault is a 500 that tells only its class."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, InvalidRequest):
        return ApiError(400, str(exc), param=exc.param, code=exc.code)
    if isinstance(exc, EngineDeadError):
        return unavailable(f"the engine cannot serve: {exc}", code="engine_dead")
    return ApiError(
        500, f"internal error ({type(exc).__name__}); the server's log has the details", code="internal_error"
    )


def install_error_handlers(app: Starlette) -> None:
    """Make every error of `app` answer in the one form, also those of the router and of bugs."""

    async def on_error(request: Request, exc: Exception) -> Response:
        return as_api_error(exc).response()

    async def on_http_error(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        text = _MESSAGES.get(exc.status_code, exc.detail).format(method=request.method, path=request.url.path)
        code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code)
        headers = dict(exc.headers) if exc.headers else None
        return ApiError(exc.status_code, text, code=code, headers=headers).response()

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(InvalidRequest, on_error)
    app.add_exception_handler(EngineDeadError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_error)  # Starlette also logs the traceback
