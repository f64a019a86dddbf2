"""kvern: an LLM inference and serving engine with a scheduler you can read, swap, replay and simulate.

Importing the package is cheap: nothing heavier than the standard library is loaded until a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from kvern.config import EngineConfig
    from kvern.llm import LLM
    from kvern.outputs import CompletionOutput, Logprob, RequestOutput
    from kvern.sampling_params import SamplingParams

_HOMES = {
    "LLM": "kvern.llm",
    "EngineConfig": "kvern.config",
    "SamplingParams": "kvern.sampling_params",
    "RequestOutput": "kvern.outputs",
    "CompletionOutput": "kvern.outputs",
    "Logprob": "kvern.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvern' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
