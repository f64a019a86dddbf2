"""Weights as the native kernels read them: in the bits they came in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.buffers import Arena
from kvern.kernels.cpu.library import NativeEngine
from kvern.kernels.ops import Float32, StoredTensor

_PANEL = 16
_BLOCK = 32
_F32 = 0
_FLOATS = (_F32, abi.WEIGHT_F16, abi.WEIGHT_BF16)


class Segment(NamedTuple):
    """Columns start .. start + weight.out of a product's output."""

    start: int
    weight: abi.PackedWeight


class PackedMatrix:
    """[out, in] as one packed weight per run of parts of one type: a file may quantise what is fused differently."""

    def __init__(self, segments: list[Segment], out: int, columns: int, precise: bool) -> None:
        self.segments = segments
        self.precise = precise  # never multiplied with int8
        self.out = out
        self.columns = columns


class StoredMatrix:
    """Parts [rows_i, columns], one below the other, as they lie in the file. The file stays mapped."""

    def __init__(self, parts: Sequence[StoredTensor]) -> None:
        self.parts = list(parts)
        self.columns = parts[0].shape[1]
        self.num_rows = sum(part.shape[0] for part in parts)


def pack(engine: NativeEngine, arena: Arena, matrix: StoredMatrix, precise: bool) -> PackedMatrix:
    segments: list[Segment] = []
    start = 0
    for kind, same in groupby(matrix.parts, key=lambda part: part.type):
        parts = list(same)
        out = sum(len(part.rows) for part in parts)
        size = engine.packed_bytes(kind, out, matrix.columns)
        if not size:
            # A type or a width without kernels: rounded to bf16 as any float would be.
            parts, kind = [StoredTensor.of(part.decode()) for part in parts], _F32
            size = engine.packed_bytes(kind, out, matrix.columns)
        address = arena.take(size)
        _pack_parts(engine, kind, [part.rows for part in parts], matrix.columns, address, size)
        # The kernels know bf16 panels by one name, whatever they were rounded from.
        packed_type = abi.WEIGHT_BF16 if kind in (_F32, abi.WEIGHT_F16) else kind
        columns = -(-matrix.columns // 32) * 32
        segments.append(Segment(start, abi.PackedWeight(packed_type, columns, out, address, size)))
        start += out
    return PackedMatrix(segments, matrix.num_rows, matrix.columns, precise)


def _pack_parts(
    engine: NativeEngine, kind: int, parts: list[NDArray[np.uint8]], columns: int, address: int, size: int
) -> None:
    if any(len(part) % _PANEL for part in parts[:-1]):
        parts = [np.concatenate(parts)]
    num_panels = sum(-(-len(part) // _PANEL) for part in parts)
    panel_bytes = size // num_panels
    for part in parts:
        panels = -(-len(part) // _PANEL)
        engine.pack(kind, part, columns, address, 0, panels)
        address += panels * panel_bytes


def quantized(matrix: StoredMatrix, bits: Literal["int8", "int4"]) -> StoredMatrix:
    """Float parts in blocks of 32 with a scale each, for int4 with a minimum as well (ggml's Q8_0 and Q4_1); what is
    quantised already stays."""
    if matrix.columns % _BLOCK:
        return matrix
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    kind = GGMLQuantizationType.Q8_0 if bits == "int8" else GGMLQuantizationType.Q4_1

    def convert(part: StoredTensor) -> StoredTensor:
        if part.type not in _FLOATS:
            return part
        rows = np.ascontiguousarray(quantize(part.decode(), kind))
        return StoredTensor(part.shape, int(kind), rows, part.decode)

    return StoredMatrix([convert(part) for part in matrix.parts])


def vector(parts: Sequence[StoredTensor]) -> Float32:
    """[sum of sizes] float32: norms and biases."""
    return np.concatenate([part.decode() for part in parts]).astype(np.float32, copy=False)
