"""From ggml's block formats to float32, in numpy.

Every format stores rows as blocks of 32 or 256 weights. The values are bit for bit those of the `gguf` package (a test
compares them); what is different is the work per weight: no intermediate array is larger than a chunk that stays in the
second-level cache. numpy releases the GIL inside, so several tensors can be read in several threads.

A decoder takes blocks, uint8 [n, bytes per block], and fills `out`, float32 [n, weights per block].
Formats without a decoder here are left to the `gguf` package, slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvern.weights.files import ModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# number of the ggml type -> (name, weights per block, bytes per block)
BLOCK_SIZES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_CHUNK = 1 << 15  # weights decoded at a time: 128 KiB of output


def block_size(kind: int) -> tuple[str, int, int]:
    """(name, weights per block, bytes per block) of a ggml type. Raises ModelError if nobody knows it."""
    if kind in BLOCK_SIZES:
        return BLOCK_SIZES[kind]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(f"tensor type {kind} is not known") from None
    return (known.name, *GGML_QUANT_SIZES[known])


def dequantize(rows: Bytes, kind: int) -> Floats:
    """uint8 [rows, bytes per row] of ggml type `kind` -> float32 [rows, weights per row]."""
    name, weights, size = block_size(kind)
    num_rows, row_bytes = rows.shape
    width = row_bytes // size * weights
    if name == "F32":
        return np.array(rows.view(np.float32).reshape(num_rows, width))
    if name == "F16":
        return rows.view(np.float16).reshape(num_rows, width).astype(np.float32)
    if name == "BF16":
        return bfloat16_to_float32(rows.view(np.uint16).reshape(num_rows, width))
    decode = _DECODERS.get(name)
    if decode is None:
        return _dequantize_by_package(rows, kind)
    blocks = rows.reshape(-1, size)
    out = np.empty((len(blocks), weights), np.float32)
    step = max(1, _CHUNK // weights)
    for start in range(0, len(blocks), step):
        decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(num_rows, width)


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> Floats:
    """bfloat16 given as its bits -> float32 of the same shape: the upper half of the word."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    floats: Floats = wide.view(np.float32)
    return floats


def _dequantize_by_package(rows: Bytes, kind: int) -> Floats:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as by_package

    known = GGMLQuantizationType(kind)
    try:
        return np.asarray(by_package(rows, known), np.float32)
    except NotImplementedError:
        raise ModelError(f"tensors of type {known.name} cannot be read") from None


def _halves(blocks: Bytes, start: int, stop: int) -> Floats:
    """float16 fields in bytes [start, stop) of each block -> float32 [n, fields]."""
    fields: Floats = blocks[:, start:stop].copy().view(np.float16).astype(np.float32)
    return fields


def _q4_0(blocks: Bytes, out: Floats) -> None:
    scale, quants = _halves(blocks, 0, 2), blocks[:, 2:]
    out[:, :16] = quants & 15
    out[:, 16:] = quants >> 4
    out -= 8
    out *= scale


def _q4_1(blocks: Bytes, out: Floats) -> None:
    scale, low, quants = _halves(blocks, 0, 2), _halves(blocks, 2, 4), blocks[:, 4:]
    out[:, :16] = quants & 15
    out[:, 16:] = quants >> 4
    out *= scale
    out += low


def _q5_0(blocks: Bytes, out: Floats) -> None:
    scale, quants = _halves(blocks, 0, 2), blocks[:, 6:]
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    fifth <<= 4
    out[:, :16] = (quants & 15) | fifth[:, :16]
    out[:, 16:] = (quants >> 4) | fifth[:, 16:]
    out -= 16
    out *= scale


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0, 2), out=out)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    # 8 groups of 32 weights, each with a 6-bit scale and a 6-bit minimum, packed in 12 bytes.
    n = len(blocks)
    super_scale, super_min = _halves(blocks, 0, 2), _halves(blocks, 2, 4)
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    scale = (super_scale * scales).reshape(n, 8, 1)
    minimum = (super_min * minimums).reshape(n, 8, 1)
    quants = blocks[:, 16:].reshape(n, 4, 32)
    groups = out.reshape(n, 4, 2, 32)
    groups[:, :, 0] = quants & 15
    groups[:, :, 1] = quants >> 4
    weights = out.reshape(n, 8, 32)
    weights *= scale
    weights -= minimum


def _q6_k(blocks: Bytes, out: Floats) -> None:
    # Two halves of 128 weights: low 4 bits in 64 bytes, high 2 bits in 32. 16 scales of 8 bits, one for 16 weights.
    n = len(blocks)
    low = blocks[:, :128].reshape(n, 2, 2, 32)
    high = blocks[:, 128:192].reshape(n, 2, 32)
    scales = blocks[:, 192:208].view(np.int8)
    scale = _halves(blocks, 208, 210) * scales
    quarters = out.reshape(n, 2, 4, 32)
    for quarter in range(4):
        nibble = low[:, :, quarter % 2] & 15 if quarter < 2 else low[:, :, quarter % 2] >> 4
        quarters[:, :, quarter] = nibble | (((high >> (2 * quarter)) & 3) << 4)
    out -= 32
    weights = out.reshape(n, 16, 16)
    weights *= scale.reshape(n, 16, 1)


_DECODERS: dict[str, Callable[[Any, Any], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
