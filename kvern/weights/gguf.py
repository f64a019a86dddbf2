"""The GGUF container: metadata and tensor directory over one memory map.

Layout, little-endian (GGUF specification, versions 2 and 3):

    "GGUF" | version u32 | number of tensors u64 | number of metadata entries u64
    metadata entry:  key string | type u32 | value          string: length u64, then that many bytes
    tensor entry:    name string | rank u32 | dims u64[rank], innermost first | type u32 | offset u64
    padding to `general.alignment` (32 unless stated), then the tensors' data; offsets count from there

Why not the reader of the `gguf` package: it makes several Python objects per element of the vocabulary, 2.5 s for 49k
tokens. Here arrays of strings are only stepped over until someone asks for them.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvern.weights.files import ModelError

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True)
class TensorEntry:
    """shape: as in numpy, outermost first. type: number of the ggml type. offset: of its data in the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class StringArray:
    """An array of strings that still lies in the file; `tolist()` reads it."""

    def __init__(self, data: mmap.mmap, start: int, count: int) -> None:
        self._data, self._start, self._count = data, start, count

    def __len__(self) -> int:
        return self._count

    def tolist(self) -> list[str]:
        data, pos, found = self._data, self._start, []
        for _ in range(self._count):
            end = pos + 8 + _U64(data, pos)[0]
            # Some converters store tokens that are not valid UTF-8; they must not make the model unreadable.
            found.append(data[pos + 8 : end].decode("utf-8", "replace"))
            pos = end
        return found


class GGUFFile:
    """`metadata`: numbers, booleans and strings as Python values, arrays of numbers as numpy arrays, arrays of strings
    as StringArray. `tensors`: name -> TensorEntry. The map stays open as long as an array made from it lives.

    Raises ModelError if the file is not a GGUF file that this can read, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise ModelError(f"cannot read {path}: {exc}") from None
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            self._read_header()
        except (struct.error, ArithmeticError, ValueError) as exc:
            if isinstance(exc, ModelError):
                raise
            raise ModelError(f"{path} is damaged or cut off: its header cannot be read ({exc})") from None

    def _read_header(self) -> None:
        data = self.data
        if data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        version = _U32(data, 4)[0]
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        num_tensors, num_entries = _U64(data, 8)[0], _U64(data, 16)[0]
        pos = 24
        for _ in range(num_entries):
            key, pos = self._string(pos)
            self.metadata[key], pos = self._value(_U32(data, pos)[0], pos + 4)
        entries = []
        for _ in range(num_tensors):
            name, pos = self._string(pos)
            rank = _U32(data, pos)[0]
            dims = struct.unpack_from(f"<{rank}Q", data, pos + 4)
            pos += 4 + 8 * rank
            kind, offset = struct.unpack_from("<IQ", data, pos)
            pos += 12
            entries.append(TensorEntry(name, tuple(reversed(dims)), kind, offset))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-pos // alignment) * alignment
        self.tensors = {e.name: TensorEntry(e.name, e.shape, e.type, start + e.offset) for e in entries}

    def _string(self, pos: int) -> tuple[str, int]:
        end = pos + 8 + _U64(self.data, pos)[0]
        if end > len(self.data):
            raise ValueError("a string runs past the end")
        return self.data[pos + 8 : end].decode(), end

    def _value(self, kind: int, pos: int) -> tuple[Any, int]:
        data = self.data
        if kind == _STRING:
            return self._string(pos)
        if kind != _ARRAY:
            dtype = _scalar(kind)
            return _plain(np.frombuffer(data, dtype, 1, pos)[0]), pos + dtype.itemsize
        inner, count = struct.unpack_from("<IQ", data, pos)
        pos += 12
        if inner == _STRING:
            start = pos
            for _ in range(count):
                pos += 8 + _U64(data, pos)[0]
            return StringArray(data, start, count), pos
        dtype = _scalar(inner)
        return np.frombuffer(data, dtype, count, pos), pos + count * dtype.itemsize

    def strings(self, key: str) -> list[str]:
        """The array of strings under `key`; empty if there is none."""
        value = self.metadata.get(key)
        return value.tolist() if isinstance(value, StringArray) else []

    def raw(self, entry: TensorEntry, num_bytes: int) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [num_bytes], as a view of the map."""
        if entry.offset + num_bytes > len(self.data):
            raise ModelError(f"{self.path} is cut off: {entry.name} runs past its end")
        return np.frombuffer(self.data, np.uint8, num_bytes, entry.offset)


def _scalar(kind: int) -> np.dtype[Any]:
    if kind not in _SCALARS:
        raise ValueError(f"unknown metadata type {kind}")
    return _SCALARS[kind]


def _plain(value: Any) -> Any:
    # The shortest decimal that gives this float32: 1e-05 and not 9.999999747378752e-06, as config.json has it.
    return float(str(value)) if isinstance(value, np.float32) else value.item()
