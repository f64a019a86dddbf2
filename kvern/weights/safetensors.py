"""The safetensors container: tensors as views of one memory map.

Layout: length of the header u64, then the header, JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}}, then
the data; offsets count from the end of the header. Not read with the `safetensors` package because its numpy side knows
no bfloat16.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvern.kernels.ops import StoredTensor
from kvern.weights.dequantize import bfloat16_to_float32
from kvern.weights.files import ModelError

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_GGML_TYPES = {"F32": 0, "F16": 1, "BF16": 30}


def _decode(values: NDArray[Any], kind: str) -> NDArray[np.float32]:
    return bfloat16_to_float32(values) if kind == "BF16" else values.astype(np.float32)


class SafetensorsFile:
    """`tensors`: name -> (dtype name, shape). Raises ModelError if the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(self._data[:8], "little")
            header: dict[str, Any] = json.loads(self._data[8 : 8 + length])
            header.pop("__metadata__", None)
            self._start = 8 + length
            self._offsets = {name: tuple(info["data_offsets"]) for name, info in header.items()}
            self.tensors = {name: (str(info["dtype"]), tuple(info["shape"])) for name, info in header.items()}
            end = max((stop for _, stop in self._offsets.values()), default=0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ModelError(f"cannot read {path}: {exc}") from None
        if self._start + end > len(self._data):
            raise ModelError(f"{path} is cut off: {self._start + end} bytes expected, {len(self._data)} found")

    def num_bytes(self, name: str) -> int:
        begin, end = self._offsets[name]
        return int(end - begin)

    def stored(self, name: str) -> StoredTensor:
        """The tensor, as a view of the map."""
        kind, shape = self.tensors[name]
        if kind not in _DTYPES:
            raise ModelError(f"{self.path}: {name} is stored as {kind}; supported are {', '.join(_DTYPES)}")
        begin, end = self._offsets[name]
        dtype = _DTYPES[kind]
        values = np.frombuffer(self._data, dtype, (end - begin) // dtype.itemsize, self._start + begin).reshape(shape)
        if kind == "F64":
            return StoredTensor.of(values.astype(np.float32))
        width = shape[-1] if shape else 1
        rows = np.atleast_1d(values).view(np.uint8).reshape(-1, width * dtype.itemsize)
        return StoredTensor(shape, _GGML_TYPES[kind], rows, lambda: _decode(values, kind))
