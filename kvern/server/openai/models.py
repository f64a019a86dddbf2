"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from kvern.server.state import ServerState


def model_card(server: ServerState) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.started,
        "owned_by": "kvern",
        "root": server.model_name,
        "parent": None,
        "max_model_len": server.client.limits.max_model_len,
    }


def model_list(server: ServerState) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(server)]}
