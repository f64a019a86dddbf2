"""What a model name was resolved to, and the one error of this room."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvern.config import InvalidConfig


class ModelError(InvalidConfig):
    """A model that cannot be found, fetched or read. The text says what is wrong and what to do."""


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies.

    kind: "gguf": `path` is one .gguf file; "hf": `path` is a folder in Hugging Face layout; "toy": `path` is None.
    name: what the model calls itself, the default name in the API.
    """

    kind: Literal["gguf", "hf", "toy"]
    path: Path | None
    name: str

    @property
    def location(self) -> Path:
        """`path` where there must be one. Raises ModelError for a toy model."""
        if self.path is None:
            raise ModelError(f"{self.name} has no files")
        return self.path
