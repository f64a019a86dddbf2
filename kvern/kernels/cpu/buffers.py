"""Memory of a step's activations, used again and again.

A buffer belongs to the tensors that refer to it, and goes back to the pool when the last of them is gone: Python's
reference counts are the liveness analysis. While a tape is recorded this holds too, so the buffers that the tape's
operations name are shared among them as tightly as in an eager run. The memory itself lives as long as the pool.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import NamedTuple

from kvern.kernels.cpu.library import Memory

_ALIGNMENT = 4096  # a page: rows of neighbouring buffers do not meet in one cache set or line
_CHUNK = 64 << 20


class Span(NamedTuple):
    """Where a buffer lies. serial: another for each time the memory is handed out, so that different contents of the
    same bytes can be told apart."""

    serial: int
    address: int
    num_bytes: int

    def overlaps(self, other: Span) -> bool:
        return self.address < other.address + other.num_bytes and other.address < self.address + self.num_bytes


class Buffer:
    """Memory on loan from the pool."""

    __slots__ = ("address", "pool", "span")

    def __init__(self, pool: BufferPool, span: Span) -> None:
        self.pool = pool
        self.span = span
        self.address = span.address

    def __del__(self) -> None:
        self.pool.give_back(self.span)


class BufferPool:
    def __init__(self) -> None:
        self._memory: list[Memory] = []
        self._free: dict[int, list[int]] = {}  # size -> addresses, the one used last at the end: it is in the caches
        self._serials = count()

    def take(self, num_bytes: int) -> Buffer:
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        addresses = self._free.get(size)
        if addresses:
            address = addresses.pop()
        else:
            self._memory.append(Memory(size))
            address = self._memory[-1].address
        return Buffer(self, Span(next(self._serials), address, size))

    def give_back(self, span: Span) -> None:
        self._free.setdefault(span.num_bytes, []).append(span.address)


class Arena:
    """Memory that is never given back in parts: packed weights. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: list[Memory] = []
        self._used = 0

    def take(self, num_bytes: int) -> int:
        """The address of so many zeroed bytes."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if not self._memory or self._used + size > self._memory[-1].num_bytes:
                self._memory.append(Memory(max(size, _CHUNK)))
                self._used = 0
            address = self._memory[-1].address + self._used
            self._used += size
            return address
