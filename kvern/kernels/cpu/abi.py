"""The structs of kernels.h, for ctypes. Names, order and types must be those of the C side; `library` checks sizes."""

from __future__ import annotations

import ctypes
from ctypes import Structure, Union, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

MAX_PLANS = 16
PAGE = 16  # tokens whose keys and values lie together; head dimensions are multiples of it too
MOST_HEAD_DIM = 1024
MOST_SAMPLED = 500_000  # columns of a row of logits
FLOATS, INT8, INT16 = 0, 1, 2  # ActivationForm
KV_BF16, KV_INT8 = 0, 1  # KVType
TOKENS, LOGIT_ROWS = 0, 1  # Rows
NO_GATE, SILU, GELU_TANH = 0, 1, 2  # Gate
WEIGHT_F16, WEIGHT_BF16 = 1, 30  # WeightType, of those that are named here

# OpKind, in order. The name is also that of the arguments in Op's union.
OP_KINDS = (
    "embedding",
    "take_rows",
    "quantize",
    "linear",
    "add",
    "scale",
    "rms_norm",
    "gate",
    "rotary",
    "write_kv",
    "attention",
    "argmax",
    "sample",
)


class View(Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64))


class Activation(Structure):
    _fields_ = (
        ("form", c_int32),
        ("columns", c_int64),
        ("values", c_void_p),
        ("scale", c_void_p),
        ("sums", c_void_p),
    )


class PackedWeight(Structure):
    _fields_ = (("type", c_int32), ("in_", c_int64), ("out", c_int64), ("panels", c_void_p), ("num_bytes", c_int64))


class KVCache(Structure):
    _fields_ = (
        ("base", c_void_p),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("type", c_int32),
        ("reserved", c_int32),
    )


class Plan(Structure):
    _fields_ = (
        ("slots", c_void_p),
        ("q_start", c_void_p),
        ("q_len", c_void_p),
        ("context_len", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_segments", c_int32),
        ("block_size", c_int32),
    )


class Step(Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("plans", Plan * MAX_PLANS),
        ("largest_only", c_int32),
        ("reserved", c_int32),
        ("scratch", c_void_p),
        ("counters", c_void_p),
    )


class EmbeddingArgs(Structure):
    _fields_ = (
        ("table", c_void_p),
        ("row_bytes", c_int64),
        ("columns", c_int64),
        ("type", c_int32),
        ("reserved", c_int32),
        ("out", View),
    )


class TakeRowsArgs(Structure):
    _fields_ = (("x", View), ("out", View), ("columns", c_int64))


class QuantizeArgs(Structure):
    _fields_ = (("x", View), ("columns", c_int64), ("out", Activation))


class LinearArgs(Structure):
    _fields_ = (
        ("x", Activation),
        ("weight", PackedWeight),
        ("bias", c_void_p),
        ("residual", View),
        ("out", View),
        ("gate", c_int32),
        ("finds_largest", c_int32),
        ("quantized", Activation),
    )


class AddArgs(Structure):
    _fields_ = (("a", View), ("b", View), ("out", View), ("columns", c_int64))


class ScaleArgs(Structure):
    _fields_ = (("x", View), ("out", View), ("columns", c_int64), ("factor", c_float))


class RmsNormArgs(Structure):
    _fields_ = (
        ("x", View),
        ("out", View),
        ("weight", c_void_p),
        ("columns", c_int64),
        ("group", c_int64),
        ("eps", c_float),
        ("offset", c_float),
        ("quantized", Activation),
    )


class GateArgs(Structure):
    _fields_ = (("x", View), ("out", View), ("columns", c_int64), ("gate", c_int32))


class RotaryArgs(Structure):
    _fields_ = (
        ("x", View),
        ("out", View),
        ("table", c_void_p),
        ("scale", c_void_p),
        ("heads", c_int32),
        ("head_dim", c_int32),
    )


class WriteKVArgs(Structure):
    _fields_ = (("k", View), ("v", View), ("cache", KVCache), ("plan", c_int32))


class AttentionArgs(Structure):
    _fields_ = (
        ("q", View),
        ("out", View),
        ("cache", KVCache),
        ("plan", c_int32),
        ("heads", c_int32),
        ("scale", c_float),
        ("window", c_int32),
        ("quantized", Activation),
    )


class ArgmaxArgs(Structure):
    _fields_ = (
        ("x", View),
        ("columns", c_int64),
        ("index", c_void_p),
        ("value", c_void_p),
        ("finds_largest", c_int32),
    )


class SampleRow(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("stop_ids", c_void_p),
        ("seen_ids", c_void_p),
        ("seen_counts", c_void_p),
        ("num_bias", c_int64),
        ("num_stop", c_int64),
        ("num_seen", c_int64),
        ("seed", c_uint64),
        ("position", c_int64),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("temperature", c_float),
        ("min_p", c_float),
        ("repetition", c_float),
        ("frequency", c_float),
        ("presence", c_float),
        ("reserved", c_int32),
    )


class SampleArgs(Structure):
    _fields_ = (("rows", c_void_p), ("num_rows", c_int64), ("columns", c_int64), ("tokens", c_void_p))


class _Args(Union):
    _fields_ = (
        ("embedding", EmbeddingArgs),
        ("take_rows", TakeRowsArgs),
        ("quantize", QuantizeArgs),
        ("linear", LinearArgs),
        ("add", AddArgs),
        ("scale", ScaleArgs),
        ("rms_norm", RmsNormArgs),
        ("gate", GateArgs),
        ("rotary", RotaryArgs),
        ("write_kv", WriteKVArgs),
        ("attention", AttentionArgs),
        ("argmax", ArgmaxArgs),
        ("sample", SampleArgs),
        ("bytes", ctypes.c_uint8 * 256),
    )


class Op(Structure):
    _anonymous_ = ("args",)
    _fields_ = (("kind", c_int32), ("rows", c_int32), ("counter", c_int32), ("reserved", c_int32), ("args", _Args))


def make_op(kind: str, args: Any, rows: int = TOKENS) -> Op:
    op = Op(kind=OP_KINDS.index(kind), rows=rows)
    setattr(op, kind, args)
    return op
