"""The operations a model is made of, and who computes them.

Layers, models and the runner hold an `Ops` and call nothing else; tensors are opaque handles (`Tensor`, `Plan`,
`KVCache`) that only the backend which made them can read. Token ids, positions and block tables are NumPy arrays
on this side. So a backend may bring its own memory, and none of the callers imports torch.

**Batch invariance.** Every op computes an output row from its input row (and the cache) in an order that does not
depend on how many rows there are, on where the row stands among them, or on the number of threads: the bits of a
token's result are the same alone or among many, in one chunk or several, with its context cached or computed.

Plan and run are separate: `plan` is called once a step, for each group of layers with block tables of its own, with
everything the step knows of its rows; the ops of these layers share what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Tensor = Any  # activations or weights, in the backend's own memory
Plan = Any  # one step's attention plan
KVCache = Any  # keys and values of one layer
RotaryFactors = Any  # cosines and sines of one step's positions

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention must know of a step with T tokens in n segments (one segment per scheduled row).

    Tokens of a segment are consecutive in the step; segment i has tokens q_start[i] .. q_start[i] + q_len[i].
    """

    positions: Int64  # [T] position of each token in its sequence
    slots: Int64  # [T] where its key and value go: block * block_size + offset
    q_start: Int64  # [n]
    q_len: Int64  # [n] tokens of the segment in this step, at least 1
    context_len: Int64  # [n] tokens of the sequence once this step is written: the last position + 1
    block_tables: (
        Int32  # [n, most blocks of any segment]; what lies past context_len, or no window reaches, is not read
    )
    block_size: int

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in a file, for backends that compute with weights in the bits they came in.

    type: ggml's number of the type (0 float32, 1 float16, 30 bfloat16, others in blocks). rows: uint8 [product of all
    dimensions but the last, bytes of a row], maybe a view of the mapped file. decode: the same as float32 of `shape`.
    """

    shape: tuple[int, ...]
    type: int
    rows: NDArray[np.uint8]
    decode: Callable[[], Float32]

    @classmethod
    def of(cls, array: Float32) -> StoredTensor:
        array = np.asarray(array, dtype=np.float32, order="C")
        rows = array.reshape(-1, array.shape[-1] if array.ndim else 1).view(np.uint8)
        return cls(array.shape, 0, rows, lambda: array)


class Ops(Protocol):
    """A backend. `T` below is the number of rows of a step, `dtype` that of weights, activations and cache."""

    dtype: DType
    # Of logits that are computed while it is set nothing but `argmax` is asked: the rest may be left out.
    largest_only: bool

    # Memory

    def reserve(self, num_tokens: int, num_rows: int) -> None:
        """No step will have more tokens, nor more rows of logits at a time. Before the first step."""
        ...

    def weight(self, parts: Sequence[StoredTensor | Float32]) -> Tensor:
        """A weight from parts [rows_i, ...], one below the other: several matrices that read the same input become one
        (fused QKV)."""
        ...

    def pack(self, weight: Tensor, *, precise: bool = False, head: bool = False) -> Tensor:
        """The matrix `weight` in the form that `linear` reads fastest. `weight` itself stays as it is. precise: a
        backend that may round what is multiplied with it should do without. head: it gives logits; a backend that
        stores weights in fewer bits keeps more of these. Safe to call from several threads at once."""
        ...

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> list[KVCache]:
        """A zeroed cache, one handle per layer. Block 0 is the null block: no op writes to it."""
        ...

    def populate(self, caches: Sequence[KVCache], num_used: Callable[[], int]) -> Iterator[bool]:
        """Have the system provide the memory of blocks before they are used: what is first written comes slowly, above
        all in virtual machines. num_used() blocks, from the first on, have been. Yields True after a little of it, of
        at most a few milliseconds; False while enough is provided. Steps may run in between."""
        ...

    def copy_blocks(
        self, source: Sequence[KVCache], destination: Sequence[KVCache], from_blocks: Int64, to_blocks: Int64
    ) -> None:
        """Copy blocks from_blocks[i] of each cache of `source` to blocks to_blocks[i] of the same one of `destination`,
        which may be `source`. All are read before any is written."""
        ...

    def zero_blocks(self, caches: Sequence[KVCache], blocks: Int64) -> None: ...

    def read_block(self, caches: Sequence[KVCache], block: int) -> NDArray[np.uint8]:
        """All bytes of a block, of all of `caches`, in a form that write_block takes back."""
        ...

    def write_block(self, caches: Sequence[KVCache], block: int, content: NDArray[np.uint8]) -> None: ...

    def to_numpy(self, x: Tensor) -> Float32:
        """A tensor as float32; may share its memory, which is valid until the next op."""
        ...

    # Row-wise

    def embedding(self, table: Tensor, token_ids: Int32) -> Tensor:
        """Rows token_ids [T] of table [vocab, hidden] -> [T, hidden]."""
        ...

    def take_rows(self, x: Tensor, rows: Int64) -> Tensor:
        """x[rows]."""
        ...

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Cut x [T, sum(sizes)] along its columns. The parts may share memory with x."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times the packed weight [out, in] transposed, plus bias [out] -> [T, out]."""
        ...

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b. May be in a's memory: a is not to be used afterwards."""
        ...

    def argmax(self, x: Tensor) -> tuple[Int32, Float32]:
        """Of each row: the index of the largest, the first of equals, and its value. NaN counts as largest."""
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x times a number, which is rounded to `dtype` first."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * (weight + offset) over groups of len(weight) columns (Zhang and Sennrich 2019):
        with x [T, hidden] over the hidden state, with x [T, heads * head_dim] over each head. With an offset, all of
        it is computed in float32; without, what is multiplied by the weight has been rounded to `dtype`."""
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """SwiGLU's gate (Shazeer 2020): silu(a) * b with a, b the halves of x [T, 2 * n] -> [T, n]."""
        ...

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        """GeGLU's gate, with GELU as Hendrycks and Gimpel (2016) approximate it by tanh."""
        ...

    # Attention

    def plan(self, metadata: AttentionMetadata, group: int = 0) -> Plan:
        """Prepare a step, for the layers that share these block tables; `group` numbers the plans of one step. The
        result is valid within the step."""
        ...

    def rotary_table(self, angles: NDArray[np.float64]) -> Tensor:
        """The table that `rotary_factors` reads, from angles [positions, head_dim / 2] in radians."""
        ...

    def rotary_factors(self, table: Tensor, plan: Plan) -> RotaryFactors: ...

    def rotary(self, x: Tensor, factors: RotaryFactors, scale: Float32 | None = None) -> Tensor:
        """Rotate each head of x [T, heads * head_dim] by its token's angles, dimension i with dimension
        i + head_dim / 2 (RoPE, Su et al. 2021, in the half-split form); then multiply these pairs by scale [heads,
        head_dim / 2], which the caller keeps. May be in x's memory: x is not to be used afterwards."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, plan: Plan) -> None:
        """Write the step's keys and values, both [T, kv_heads * head_dim], to their slots."""
        ...

    def paged_attention(
        self, q: Tensor, cache: KVCache, plan: Plan, *, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention of q [T, heads * head_dim] to the cached tokens of each one's sequence ->
        [T, heads * head_dim]. With `window`, a token sees itself and the window - 1 tokens before it.

        Reads only the cache: the step's own keys and values must be written before, so that segments may share
        blocks which this very step fills.
        """
        ...


def load_ops(kernels: str = "reference", *, dtype: DType = "float32", threads: int = 1, **options: Any) -> Ops:
    """The backend `kernels` ("reference", "native") computing in `dtype` on `threads` threads. options: of NativeOps,
    which computes in bfloat16 only."""
    if kernels == "native":
        from kvern.kernels.cpu.ops import NativeOps

        if dtype != NativeOps.dtype:
            raise ValueError(f"native kernels compute in {NativeOps.dtype}, not {dtype}")
        return NativeOps(threads, **options)
    if kernels != "reference":
        raise ValueError(f"kernels must be reference or native, got {kernels!r}")
    from kvern.kernels.reference import ReferenceOps

    return ReferenceOps(dtype, threads, **options)
