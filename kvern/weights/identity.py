"""Telling one set of weights from another without reading all of it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from kvern.weights.files import ModelFiles

_SAMPLES, _SAMPLE_BYTES = 256, 4096


def fingerprint(files: ModelFiles) -> str:
    """A hash of the weight files: their sizes, and samples spread evenly over them. Other weights, even of the same
    shapes, differ nearly everywhere, so a megabyte of samples tells them apart."""
    paths = [files.location] if files.kind == "gguf" else sorted(files.location.glob("*.safetensors"))
    digest = sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(_samples(path, size))
    return digest.hexdigest()


def _samples(path: Path, size: int) -> bytes:
    parts = []
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, (size - _SAMPLE_BYTES) * i // (_SAMPLES - 1)))
            parts.append(file.read(_SAMPLE_BYTES))
    return b"".join(parts)
