"""A checkpoint as layers see it: each takes its tensors by name, and says what shape they must have."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvern.kernels.ops import Ops, StoredTensor, Tensor
from kvern.weights.checkpoint import Checkpoint
from kvern.weights.files import ModelError

Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


class Weights:
    """The tensors of `checkpoint` below `prefix`, turned into weights of `ops`. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, progress: Progress | None = None) -> None:
        self.ops = ops
        self._checkpoint = checkpoint
        self._names = frozenset(checkpoint.names())
        self._prefix = ""
        self._loaded = _Counter(len(self._names), progress)

    def below(self, prefix: str) -> Weights:
        """The same weights, with `prefix.` put before every name."""
        found = object.__new__(Weights)
        found.__dict__.update(self.__dict__)
        found._prefix = f"{self._prefix}{prefix}."
        return found

    def load(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        """The named tensors, one below the other. Raises ModelError if one is missing or of another shape."""
        parts = [self._stored(name, shape) for name, shape in shapes.items()]
        for _ in parts:
            self._loaded.count()
        return self.ops.weight(parts)

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A tensor's values, for what a layer derives from them before it loads it. Raises ModelError as `load`."""
        return self._stored(name, shape).decode().astype(np.float32, copy=False)

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        name = self._prefix + name
        if name not in self._names:
            raise ModelError(f"the checkpoint has no tensor {name!r}")
        found = tuple(self._checkpoint.shape(name))
        if found != shape:
            raise ModelError(f"tensor {name!r} has shape {found}, the configuration wants {shape}")
        return self._checkpoint.stored(name)


class _Counter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._progress = progress
        self._done = 0
        self._total = total

    def count(self) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += 1
                self._progress("loading weights", self._done, self._total)
