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

from kvern.weights.dequantize import bfloat16_to_float32
from kvern.weights.files import ModelError

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


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

    def load(self, name: str) -> NDArray[np.float32]:
        """The tensor as a float32 array of its own."""
        kind, shape = self.tensors[name]
        if kind not in _DTYPES:
            raise ModelError(f"{self.path}: {name} is stored as {kind}; supported are {', '.join(_DTYPES)}")
        begin, end = self._offsets[name]
        dtype = _DTYPES[kind]
        flat = np.frombuffer(self._data, dtype, (end - begin) // dtype.itemsize, self._start + begin)
        if kind == "BF16":
            return bfloat16_to_float32(flat.reshape(shape))
        return flat.reshape(shape).astype(np.float32)
