"""What all endpoints share."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from kvern.config import ServerConfig, parse_bytes
from kvern.sampling_params import InvalidRequest
from kvern.server.errors import ApiError, unavailable
from kvern.server.metrics import Metrics
from kvern.server.openai.protocol import MAX_NAME_LENGTH, unix_time

if TYPE_CHECKING:
    from kvern.engine.client import AsyncClient

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServerState:
    """One server: its engine, its limits, its counters, and whether it still takes requests."""

    def __init__(self, client: AsyncClient, config: ServerConfig) -> None:
        self.client = client
        self.config = config
        self.metrics = Metrics(lambda: client.stats)
        self.model_name = client.model_name
        self.max_body_bytes = parse_bytes(config.max_body_size, "max_body_size")
        self.started = unix_time()
        key = config.api_key
        self._key_tenant = None if key is None else "key-" + sha256(key.encode()).hexdigest()[:16]
        self.draining = False  # set once, when the server is told to end

    @property
    def trusts_callers(self) -> bool:
        """Whether whoever gets an answer has the API key or is on this machine."""
        return self.config.api_key is not None or self.config.host in LOOPBACK

    def check_open(self) -> None:
        """Raises ApiError 503 while the server shuts down or the engine makes no progress."""
        if self.draining:
            raise unavailable("the server is shutting down", code="shutting_down")
        health = self.client.health()
        if not health.ok:
            raise unavailable(f"the engine is not healthy: {health.reason}", code="engine_unhealthy")

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404. A request that names no model gets the one there is."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist here; there is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def tenant_of(self, user: str | None, header: str | None) -> str | None:
        """Who a request is for, for policies that care: its `user`, else its X-Tenant header, else whoever has the API
        key, by a digest of it. Raises InvalidRequest."""
        if len(header or "") > MAX_NAME_LENGTH:
            raise InvalidRequest(f"X-Tenant must have at most {MAX_NAME_LENGTH} characters", "X-Tenant")
        return user or header or self._key_tenant

    def check_template(self, template: str | None) -> None:
        """A template is a program without bounds of time and memory: it is run only for those who are trusted, on
        this machine or with the API key. Raises InvalidRequest."""
        if template is not None and not self.trusts_callers:
            raise InvalidRequest(
                "chat_template is taken only by a server with an API key or one that listens on this machine alone",
                "chat_template",
                "unsupported_parameter",
            )
