"""`kvern.kernels.ops.Ops` on the native kernels.

Activations are float32 between operations; what enters a matrix product is rounded to bf16 (or stays float32, where the
processor has no dot product of bf16), or to int8 or int16 in blocks of 32 with a scale each. Weights stay in the bits
they came in; keys and values are bf16 or int8.

Every method makes one operation (kernels.h) and either runs it at once, on all threads, or, while `capture` records,
puts it on the tape. Both ways the same kernel runs with the same arguments, so eager and replayed bits are equal; where
the tape joins operations (see `tape`), the joined one computes the same roundings in the same order.

What changes from step to step lies in one `Step`, which `plan`, `embedding` and `take_rows` fill, and `set_inputs` for
a replay. Arrays that it points to are kept until the next step replaces them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.buffers import Arena, Buffer, BufferPool
from kvern.kernels.cpu.library import Memory, NativeEngine, op_array
from kvern.kernels.cpu.profile import Profile
from kvern.kernels.cpu.tape import Entry, Tape, finds_largest, join
from kvern.kernels.cpu.weights import PackedMatrix, StoredMatrix, pack, quantized, vector
from kvern.kernels.ops import AttentionMetadata, DType, Float32, Int32, Int64, StoredTensor

_COLUMNS = 32  # a product's input is padded to a multiple
_DEFAULT_ROWS = 4096
_POPULATED_BYTES = 1 << 30  # ahead of what is used, while the engine is idle: what the next burst of requests writes
_POPULATED_AT_ONCE = 2 << 20  # a huge page: a virtual machine's host may take 5 ms to find it
_NO_VIEW = abi.View(None, 0)


class NativeTensor:
    """Rows of float32, `columns` from `offset` on in rows of `stride`. rows: abi.TOKENS or abi.LOGIT_ROWS."""

    __slots__ = ("activations", "best", "buffer", "columns", "finds_largest", "offset", "rows", "stride")

    def __init__(self, buffer: Buffer, columns: int, rows: int, *, stride: int = 0, offset: int = 0) -> None:
        self.buffer = buffer
        self.columns = columns
        self.rows = rows
        self.stride = stride or columns
        self.offset = offset
        self.activations: dict[int, tuple[Buffer, abi.Activation]] = {}  # by form: this as a product's input
        # The operation that finds each row's largest, and where it writes: index [capacity], then value.
        self.best: tuple[ctypes.Array[abi.Op], Buffer, NDArray[np.int32]] | None = None
        self.finds_largest = False  # whether the product that gives it can do that

    @property
    def view(self) -> abi.View:
        return abi.View(self.buffer.address + 4 * self.offset, self.stride)

    def overwritten(self) -> NativeTensor:
        """What an operation in place makes of this tensor, which is not to be used afterwards; so rows stay in the
        processor's cache."""
        return NativeTensor(self.buffer, self.columns, self.rows, stride=self.stride, offset=self.offset)


class NativeCache:
    """Keys and values of one layer: see KVCache in kernels.h. start: its place in `memory`. bytes: uint8 [blocks, bytes
    of a block]."""

    def __init__(self, memory: Memory, start: int, num_blocks: int, struct: abi.KVCache, block_bytes: int) -> None:
        self.memory = memory
        self.start = start
        self.struct = struct
        self.bytes = memory.array()[start : start + num_blocks * block_bytes].reshape(num_blocks, block_bytes)


class NativePlan:
    """The number of a step's plan, and the arrays that it points to."""

    __slots__ = ("arrays", "group")

    def __init__(self, group: int, arrays: tuple[NDArray[Any], ...]) -> None:
        self.group = group
        self.arrays = arrays


class NativeOps:
    """activations: what enters the product with a quantised weight; auto: bf16 with tile registers, which make it the
    faster one for all but a few rows, else int8. kv_dtype: of the cache. quantize: store float
    weights in fewer bits. Raises KernelsMissing."""

    dtype: DType = "bfloat16"

    def __init__(
        self,
        threads: int,
        *,
        activations: Literal["auto", "bf16", "int8"] = "bf16",
        kv_dtype: Literal["bfloat16", "int8"] = "bfloat16",
        quantize: Literal["none", "int8", "int4"] = "none",
        isa: str = "",
        cpus: Sequence[int] | None = None,
    ) -> None:
        self.engine = NativeEngine(threads, isa, cpus)
        if activations == "auto":
            activations = "bf16" if self.engine.isa == "amx" else "int8"
        self.activations = activations
        self.kv_dtype = kv_dtype
        self.quantize = quantize
        self._pool = BufferPool()
        self._arena = Arena()
        self._capacity = {abi.TOKENS: _DEFAULT_ROWS, abi.LOGIT_ROWS: _DEFAULT_ROWS}
        self._step = abi.Step()
        self._alive: dict[object, object] = {}  # what the step points to
        self._recording: list[Entry] | None = None
        self.profile: Profile | None = None

    def reserve(self, num_tokens: int, num_rows: int) -> None:
        """The most tokens of a step, and the most rows of logits. Before the first step."""
        self._capacity = {abi.TOKENS: num_tokens, abi.LOGIT_ROWS: num_rows}

    def start_profile(self) -> Profile:
        """Have all replays from now on timed, operation by operation."""
        self.profile = Profile(self.engine)
        return self.profile

    # Tapes

    def capture(self, function: Callable[[], NativeTensor], *, pieces: bool = False) -> Tape:
        """What `function` would compute, recorded. pieces: attention as calls of its own."""
        self._recording = []
        try:
            output = function()
            entries = self._recording
        finally:
            self._recording = None
        entries = join(entries, output.buffer.span.serial)
        output.finds_largest = finds_largest(entries, output.view.data)
        return Tape(entries, output, pieces=pieces)

    def replay(self, tape: Tape) -> NativeTensor:
        """Compute a tape for the step as it is set now. Its output is the same tensor each time."""
        output: NativeTensor = tape.output
        if self.profile is None:
            for piece in tape.pieces:
                self.engine.run(piece, len(piece), self._step)
            return output
        times = [np.zeros(len(piece), dtype=np.int64) for piece in tape.pieces]
        for piece, spent in zip(tape.pieces, times, strict=True):
            self.engine.run(piece, len(piece), self._step, spent.ctypes.data)
        self.profile.add(tape, np.concatenate(times), self._step)
        return output

    def set_inputs(self, *, token_ids: Int32 | None = None, rows: Int64 | None = None) -> None:
        """What `embedding` and `take_rows` read in the next replay."""
        if token_ids is not None:
            token_ids = self._keep("token_ids", token_ids, np.int32)
            self._step.num_tokens = len(token_ids)
            self._step.token_ids = token_ids.ctypes.data
            self._check(abi.TOKENS, len(token_ids))
        if rows is not None:
            rows = self._keep("rows", rows, np.int64)
            self._step.num_rows = len(rows)
            self._step.rows = rows.ctypes.data
            self._check(abi.LOGIT_ROWS, len(rows))

    @property
    def largest_only(self) -> bool:
        return bool(self._step.largest_only)

    @largest_only.setter
    def largest_only(self, wanted: bool) -> None:
        self._step.largest_only = wanted

    def _keep(self, name: object, array: NDArray[Any], dtype: Any) -> NDArray[Any]:
        array = np.ascontiguousarray(array, dtype=dtype)
        self._alive[name] = array
        return array

    def _check(self, rows: int, count: int) -> None:
        if count > self._capacity[rows]:
            raise ValueError(f"a step of {count} rows, and memory is reserved for {self._capacity[rows]}")

    def _emit(self, kind: str, args: Any, rows: int, reads: Sequence[Buffer], writes: Buffer | None) -> None:
        spans = tuple(buffer.span for buffer in reads)
        entry = Entry(abi.make_op(kind, args, rows), spans, writes.span if writes is not None else None)
        if self._recording is None:
            self.engine.run(op_array([entry.op]), 1, self._step)
        else:
            self._recording.append(entry)

    def _new(self, columns: int, rows: int) -> NativeTensor:
        return NativeTensor(self._pool.take(self._capacity[rows] * columns * 4), columns, rows)

    # Memory

    def weight(self, parts: Sequence[StoredTensor | Float32]) -> StoredMatrix | Float32:
        stored = [part if isinstance(part, StoredTensor) else StoredTensor.of(part) for part in parts]
        return vector(stored) if len(stored[0].shape) == 1 else StoredMatrix(stored)

    def pack(self, weight: StoredMatrix, *, precise: bool = False, head: bool = False) -> PackedMatrix:
        if self.quantize != "none":
            weight = quantized(weight, "int8" if head else self.quantize)
        return pack(self.engine, self._arena, weight, precise)

    def kv_bytes(self, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of a page of one layer's cache."""
        return num_kv_heads * (64 * head_dim if self.kv_dtype == "bfloat16" else 32 * head_dim + 128)

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> list[NativeCache]:
        """Raises ValueError for a block size or a head dimension that the kernels do not know."""
        if block_size % abi.PAGE or head_dim % abi.PAGE or head_dim > abi.MOST_HEAD_DIM:
            raise ValueError(
                f"native kernels need a block_size and a head dimension up to {abi.MOST_HEAD_DIM} that are "
                f"multiples of {abi.PAGE}, not {block_size} and {head_dim}"
            )
        block_bytes = block_size // abi.PAGE * self.kv_bytes(num_kv_heads, head_dim)
        memory = Memory(num_layers * num_blocks * block_bytes)
        kind = abi.KV_BF16 if self.kv_dtype == "bfloat16" else abi.KV_INT8

        def cache(start: int) -> NativeCache:
            struct = abi.KVCache(memory.address + start, num_kv_heads, head_dim, kind)
            return NativeCache(memory, start, num_blocks, struct, block_bytes)

        return [cache(layer * num_blocks * block_bytes) for layer in range(num_layers)]

    def populate(self, caches: Sequence[NativeCache], num_used: Callable[[], int]) -> Iterator[bool]:
        ahead, block_bytes = _POPULATED_BYTES // len(caches), caches[0].bytes.shape[1]  # of each layer
        for start in range(0, caches[0].bytes.size, _POPULATED_AT_ONCE):
            while start >= num_used() * block_bytes + ahead:
                yield False
            for cache in caches:
                cache.memory.populate(cache.start + start, _POPULATED_AT_ONCE)
                yield True

    def copy_blocks(
        self, source: Sequence[NativeCache], destination: Sequence[NativeCache], from_blocks: Int64, to_blocks: Int64
    ) -> None:
        for theirs, ours in zip(source, destination, strict=True):
            ours.bytes[to_blocks] = theirs.bytes[from_blocks]

    def zero_blocks(self, caches: Sequence[NativeCache], blocks: Int64) -> None:
        for cache in caches:
            cache.bytes[blocks] = 0

    def read_block(self, caches: Sequence[NativeCache], block: int) -> NDArray[np.uint8]:
        return np.concatenate([cache.bytes[block] for cache in caches])

    def write_block(self, caches: Sequence[NativeCache], block: int, content: NDArray[np.uint8]) -> None:
        for cache, part in zip(caches, content.reshape(len(caches), -1), strict=True):
            cache.bytes[block] = part

    def to_numpy(self, x: NativeTensor) -> Float32:
        count = self._step.num_tokens if x.rows == abi.TOKENS else self._step.num_rows
        memory = (ctypes.c_float * (count * x.stride)).from_address(x.buffer.address)
        rows: Float32 = np.frombuffer(memory, dtype=np.float32).reshape(count, x.stride)
        return rows[:, x.offset : x.offset + x.columns]

    # Row-wise

    def embedding(self, table: StoredMatrix, token_ids: Int32) -> NativeTensor:
        self.set_inputs(token_ids=token_ids)
        (part,) = table.parts
        out = self._new(table.columns, abi.TOKENS)
        args = abi.EmbeddingArgs(part.rows.ctypes.data, part.rows.strides[0], table.columns, part.type, 0, out.view)
        self._emit("embedding", args, abi.TOKENS, (), out.buffer)
        return out

    def take_rows(self, x: NativeTensor, rows: Int64) -> NativeTensor:
        self.set_inputs(rows=rows)
        out = self._new(x.columns, abi.LOGIT_ROWS)
        self._emit("take_rows", abi.TakeRowsArgs(x.view, out.view, x.columns), abi.LOGIT_ROWS, (x.buffer,), out.buffer)
        return out

    def split(self, x: NativeTensor, sizes: Sequence[int]) -> Sequence[NativeTensor]:
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        return [
            NativeTensor(x.buffer, size, x.rows, stride=x.stride, offset=x.offset + start)
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _activation(self, x: NativeTensor, form: int) -> tuple[Buffer, abi.Activation]:
        """x as the input of a product, computed once for all products that read it."""
        found = x.activations.get(form)
        if found is None:
            # An odd number of blocks, so that the rows of a tile do not compete for the same sets of the cache.
            columns = (-(-x.columns // _COLUMNS) | 1) * _COLUMNS
            capacity = self._capacity[x.rows]
            value_bytes = {abi.FLOATS: 4, abi.INT8: 1, abi.INT16: 2}[form]  # FLOATS: 2 are enough for bf16
            row_bytes = columns * value_bytes + columns // 32 * 4 + columns // 16 * 4
            buffer = self._pool.take(capacity * row_bytes)
            scale = buffer.address + capacity * columns * value_bytes
            out = abi.Activation(form, columns, buffer.address, scale, scale + capacity * (columns // 32) * 4)
            self._emit("quantize", abi.QuantizeArgs(x.view, x.columns, out), x.rows, (x.buffer,), buffer)
            found = x.activations[form] = (buffer, out)
        return found

    def linear(self, x: NativeTensor, weight: PackedMatrix, bias: Float32 | None = None) -> NativeTensor:
        out = self._new(weight.out, x.rows)
        for start, packed in weight.segments:
            buffer, activation = self._activation(x, self._form(weight, packed))
            view = abi.View(out.view.data + 4 * start, out.stride)
            shift = None if bias is None else bias.ctypes.data + 4 * start
            args = abi.LinearArgs(activation, packed, shift, _NO_VIEW, view, abi.NO_GATE, 0)
            self._emit("linear", args, x.rows, (buffer,), out.buffer)
        return out

    def _form(self, weight: PackedMatrix, packed: abi.PackedWeight) -> int:
        if packed.type == abi.WEIGHT_BF16 or self.activations == "bf16":
            return abi.FLOATS
        if not weight.precise:
            return abi.INT8
        # Two products of bytes are faster than bringing the weight to floats, but not where tiles multiply bf16.
        return abi.FLOATS if self.engine.isa == "amx" else abi.INT16

    def add(self, a: NativeTensor, b: NativeTensor) -> NativeTensor:
        out = a.overwritten()
        args = abi.AddArgs(a.view, b.view, out.view, a.columns)
        self._emit("add", args, a.rows, (a.buffer, b.buffer), out.buffer)
        return out

    def scale(self, x: NativeTensor, factor: float) -> NativeTensor:
        out = self._new(x.columns, x.rows)
        self._emit("scale", abi.ScaleArgs(x.view, out.view, x.columns, factor), x.rows, (x.buffer,), out.buffer)
        return out

    def rms_norm(self, x: NativeTensor, weight: Float32, eps: float, offset: float = 0.0) -> NativeTensor:
        out = self._new(x.columns, x.rows)
        args = abi.RmsNormArgs(x.view, out.view, weight.ctypes.data, x.columns, len(weight), eps, offset)
        self._emit("rms_norm", args, x.rows, (x.buffer,), out.buffer)
        return out

    def silu_and_mul(self, x: NativeTensor) -> NativeTensor:
        return self._gate(x, abi.SILU)

    def gelu_tanh_and_mul(self, x: NativeTensor) -> NativeTensor:
        return self._gate(x, abi.GELU_TANH)

    def _gate(self, x: NativeTensor, gate: int) -> NativeTensor:
        out = self._new(x.columns // 2, x.rows)
        self._emit("gate", abi.GateArgs(x.view, out.view, out.columns, gate), x.rows, (x.buffer,), out.buffer)
        return out

    def argmax(self, x: NativeTensor) -> tuple[Int32, Float32]:
        """Never recorded. Of a tape's output, the same tensor in every step, it is prepared once."""
        capacity = self._capacity[x.rows]
        if x.best is None:
            buffer = self._pool.take(capacity * 8)
            values = buffer.address + capacity * 4
            args = abi.ArgmaxArgs(x.view, x.columns, buffer.address, values, x.finds_largest)
            found = np.ctypeslib.as_array((ctypes.c_int32 * (2 * capacity)).from_address(buffer.address))
            x.best = op_array([abi.make_op("argmax", args, x.rows)]), buffer, found
        op, _, found = x.best
        self.engine.run(op, 1, self._step)
        count = self._step.num_tokens if x.rows == abi.TOKENS else self._step.num_rows
        return found[:count].copy(), found[capacity : capacity + count].view(np.float32).copy()

    def sample(self, rows: ctypes.Array[abi.SampleRow], columns: int) -> Int32:
        """A token for each of rows, of logits [columns], columns up to abi.MOST_SAMPLED; -1 where all are masked.
        Never recorded."""
        tokens = np.zeros(len(rows), dtype=np.int32)
        args = abi.SampleArgs(ctypes.addressof(rows), len(rows), columns, tokens.ctypes.data)
        self.engine.run(op_array([abi.make_op("sample", args)]), 1, self._step)
        return tokens

    # Attention

    def plan(self, metadata: AttentionMetadata, group: int = 0) -> NativePlan:
        arrays = (
            self._keep("positions", metadata.positions, np.int64),
            *(
                self._keep((group, name), getattr(metadata, name), dtype)
                for name, dtype in (
                    ("slots", np.int64),
                    ("q_start", np.int64),
                    ("q_len", np.int64),
                    ("context_len", np.int64),
                    ("block_tables", np.int32),
                )
            ),
        )
        positions, slots, q_start, q_len, context_len, tables = arrays
        self._step.num_tokens = len(positions)
        self._step.positions = positions.ctypes.data
        plan = self._step.plans[group]
        plan.slots, plan.q_start, plan.q_len = slots.ctypes.data, q_start.ctypes.data, q_len.ctypes.data
        plan.context_len, plan.block_tables = context_len.ctypes.data, tables.ctypes.data
        plan.table_stride, plan.num_segments, plan.block_size = tables.shape[1], len(q_len), metadata.block_size
        return NativePlan(group, arrays)

    def rotary_table(self, angles: NDArray[np.float64]) -> Float32:
        return np.ascontiguousarray(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))

    def rotary_factors(self, table: Float32, plan: NativePlan) -> Float32:
        return table

    def rotary(self, x: NativeTensor, factors: Float32, scale: Float32 | None = None) -> NativeTensor:
        head_dim = 2 * factors.shape[2]
        out = x.overwritten()
        by = None if scale is None else scale.ctypes.data
        args = abi.RotaryArgs(x.view, out.view, factors.ctypes.data, by, x.columns // head_dim, head_dim)
        self._emit("rotary", args, x.rows, (x.buffer,), out.buffer)
        return out

    def write_kv(self, k: NativeTensor, v: NativeTensor, cache: NativeCache, plan: NativePlan) -> None:
        args = abi.WriteKVArgs(k.view, v.view, cache.struct, plan.group)
        self._emit("write_kv", args, k.rows, (k.buffer, v.buffer), None)

    def paged_attention(
        self, q: NativeTensor, cache: NativeCache, plan: NativePlan, *, scale: float, window: int | None = None
    ) -> NativeTensor:
        out = self._new(q.columns, q.rows)
        heads = q.columns // cache.struct.head_dim
        args = abi.AttentionArgs(q.view, out.view, cache.struct, plan.group, heads, scale, window or 0)
        self._emit("attention", args, q.rows, (q.buffer,), out.buffer)
        return out
