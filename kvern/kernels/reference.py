"""The ops in plain torch, on the CPU: the oracle other backends are tested with, and what runs where there is none.

How each op keeps its bits apart from the batch (see `ops`; `tests/unit/test_kernels_reference.py` measures all of it):

- Matrix products: with few rows the libraries (oneDNN, MKL) take another path than with many. From 8 rows on, in
  multiples of 8, a row's bits depend on nothing but the row, so rows are padded up; so are those of batched products.
- Elementwise ops: + - * / and sqrt are exactly rounded. `exp` computes the tail of a vector as a vector;
  torch's `silu`, `sigmoid` and `tanh` do not, so that the bits would depend on where the row lies in memory: the
  gate is built from exp and division. Fused forms (addcmul, baddbmm with beta) are avoided.
- Sums run over the last, contiguous dimension, one row at a time.
- Attention goes over the context in tiles of KEY_TILE keys, aligned to absolute positions, in ascending order, with
  a running maximum and sum (Milakov and Gimelshein 2018). A tile that is masked for a row changes none of its bits, so
  rows may be grouped in any way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

# OpenMP's threads spin at every barrier unless told to sleep. With anybody else on the same cores (a server, a client)
# the one that is waited for does not get to run: seen to make a step ten times slower. Read once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# With tile registers (AMX) oneDNN splits bf16 products differently for different numbers of rows, and so rounds them
# differently. What came before does not.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

from kvern.kernels.ops import AttentionMetadata, DType, Float32, Int32, Int64, StoredTensor

ROW_MULTIPLE = 8
KEY_TILE = 128
# Tokens in one query tile, by what a segment has in this step: decodes, short chunks, long ones.
QUERY_TILES = (1, 16, 128)
_MASKED = -1.0e30  # where the running maximum starts: finite, so that a row that has seen nothing yet stays defined

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LayerCache:
    """Keys and values of one layer, a view of the arena of all: [2, num_blocks, kv_heads, block_size, head_dim]."""

    __slots__ = ("arena", "block_size", "head_dim", "k", "num_kv_heads", "v")

    def __init__(self, arena: torch.Tensor) -> None:
        self.arena = arena
        _, _, self.num_kv_heads, self.block_size, self.head_dim = arena.shape
        self.k = arena[0].view(-1, self.head_dim)  # row (block * kv_heads + head) * block_size + offset
        self.v = arena[1].view(-1, self.head_dim)

    def rows(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of `k` and `v` for slots [..., n] -> [..., kv_heads, n]."""
        blocks, offsets = np.divmod(slots, self.block_size)
        heads = np.arange(self.num_kv_heads)[:, None]
        rows: NDArray[np.int64] = (blocks[..., None, :] * self.num_kv_heads + heads) * self.block_size
        rows += offsets[..., None, :]
        return rows


class KeyStep:
    """The next key tile of the first `n` query tiles of a group.

    rows: [n * kv_heads * KEY_TILE] rows of the cache. mask: true where a query does not see a key,
    [n, 1, rows of a query tile, KEY_TILE], None where all see all.
    """

    __slots__ = ("mask", "n", "rows")

    def __init__(self, n: int, rows: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.n = n
        self.rows = rows
        self.mask = mask


class QueryGroup:
    """Query tiles of one height, those with the most key tiles first, so that the ones still running are a prefix.

    q_rows: [tiles * kv_heads * rows] rows of q seen as [T * heads, head_dim]. A tile's rows for one kv head are
    its tokens times the query heads that share this kv head, padded to ROW_MULTIPLE by repeating the last.
    """

    __slots__ = ("num_rows", "num_tiles", "q_rows", "steps")

    def __init__(self, num_tiles: int, num_rows: int, q_rows: torch.Tensor, steps: list[KeyStep]) -> None:
        self.num_tiles = num_tiles
        self.num_rows = num_rows
        self.q_rows = q_rows
        self.steps = steps


class AttentionLayout:
    """The groups of a step, and for each row of the output [T * heads] its row in what the groups give."""

    __slots__ = ("groups", "out_rows")

    def __init__(self, groups: list[QueryGroup], out_rows: torch.Tensor) -> None:
        self.groups = groups
        self.out_rows = out_rows


class StepPlan:
    """A step's metadata, and the layouts made of it, one for each kind of attention layer in the model."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata
        self.positions = torch.from_numpy(metadata.positions)
        self._layouts: dict[tuple[int, int, int | None], AttentionLayout] = {}
        self._write_rows: dict[int, torch.Tensor] = {}

    def write_rows(self, cache: LayerCache) -> torch.Tensor:
        """Cache rows of the step's tokens, [T * kv_heads]."""
        rows = self._write_rows.get(cache.num_kv_heads)
        if rows is None:
            rows = torch.from_numpy(np.ascontiguousarray(cache.rows(self.metadata.slots).T).reshape(-1))
            self._write_rows[cache.num_kv_heads] = rows
        return rows

    def layout(self, cache: LayerCache, num_heads: int, window: int | None) -> AttentionLayout:
        key = (num_heads, cache.num_kv_heads, window)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = _make_layout(self.metadata, cache, num_heads, window)
        return found


class ReferenceOps:
    """`kvern.kernels.ops.Ops` in torch. Sets torch's number of threads for this process."""

    def __init__(self, dtype: DType, threads: int) -> None:
        self.dtype: DType = dtype
        self.largest_only = False  # makes no difference here
        self._dtype = _DTYPES[dtype]
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._onednn = has_onednn and (dtype == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        torch.set_num_threads(threads)

    # Memory

    def reserve(self, num_tokens: int, num_rows: int) -> None:
        pass  # torch allocates as it goes

    def weight(self, parts: Sequence[StoredTensor | Float32]) -> torch.Tensor:
        rows = sum(p.shape[0] for p in parts)
        # Torch's own memory: aligned, which NumPy's need not be and the matrix library's speed depends on.
        out = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype)
        start = 0
        for part in parts:
            values = part.decode() if isinstance(part, StoredTensor) else part
            out[start : start + len(values)].copy_(torch.from_numpy(values))
            start += len(values)
        return out

    def pack(self, weight: torch.Tensor, *, precise: bool = False, head: bool = False) -> torch.Tensor:
        # At 8 rows oneDNN takes a third of the time that MKL takes, which torch uses for float32 on its own.
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROW_MULTIPLE) if self._onednn else weight

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> list[LayerCache]:
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        # NumPy's zeros come untouched from the system, which hands out the pages as they are first written: a large
        # cache costs neither time at start nor memory before it is used. torch.zeros would write all of it.
        memory = np.zeros(math.prod(shape) * self._dtype.itemsize, dtype=np.uint8)
        arena = torch.from_numpy(memory).view(self._dtype).view(shape)
        return [LayerCache(layer) for layer in arena]

    def populate(self, caches: Sequence[LayerCache], num_used: Callable[[], int]) -> Iterator[bool]:
        return iter(())

    def copy_blocks(
        self, source: Sequence[LayerCache], destination: Sequence[LayerCache], from_blocks: Int64, to_blocks: Int64
    ) -> None:
        there, here = torch.from_numpy(from_blocks), torch.from_numpy(to_blocks)
        for theirs, ours in zip(source, destination, strict=True):
            ours.arena[:, here] = theirs.arena[:, there]

    def zero_blocks(self, caches: Sequence[LayerCache], blocks: Int64) -> None:
        index = torch.from_numpy(blocks)
        for cache in caches:
            cache.arena[:, index] = 0

    def read_block(self, caches: Sequence[LayerCache], block: int) -> NDArray[np.uint8]:
        content: NDArray[np.uint8] = torch.stack([cache.arena[:, block] for cache in caches]).view(torch.uint8).numpy()
        return content.reshape(-1)

    def write_block(self, caches: Sequence[LayerCache], block: int, content: NDArray[np.uint8]) -> None:
        parts = torch.from_numpy(content.copy()).view(self._dtype)
        for cache, part in zip(caches, parts.view(len(caches), -1), strict=True):
            cache.arena[:, block] = part.view(cache.arena[:, block].shape)

    def to_numpy(self, x: torch.Tensor) -> Float32:
        out: Float32 = x.float().numpy()
        return out

    # Row-wise

    def embedding(self, table: torch.Tensor, token_ids: Int32) -> torch.Tensor:
        return table.index_select(0, torch.from_numpy(token_ids))

    def take_rows(self, x: torch.Tensor, rows: Int64) -> torch.Tensor:
        return x.index_select(0, torch.from_numpy(rows))

    def split(self, x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        return torch.split(x, list(sizes), dim=-1)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        n = len(x)
        padding = -n % ROW_MULTIPLE
        if padding:
            padded = x.new_zeros((n + padding, x.shape[1]))
            padded[:n] = x
            x = padded
        y: torch.Tensor
        if weight.is_mkldnn:
            y = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        else:
            y = x @ weight.t()
        if bias is not None:
            y += bias
        return y[:n]

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def argmax(self, x: torch.Tensor) -> tuple[Int32, Float32]:
        index = x.argmax(dim=1)
        values: Float32 = x.gather(1, index[:, None])[:, 0].float().numpy()
        return index.numpy().astype(np.int32), values

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * torch.tensor(factor, dtype=self._dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        groups = x.float().reshape(-1, len(weight))
        mean = (groups * groups).sum(-1, keepdim=True) / len(weight)
        normed = groups / torch.sqrt(mean + eps)
        if offset:
            return (normed * (weight.float() + offset)).to(self._dtype).view(x.shape)
        return (normed.to(self._dtype) * weight).view(x.shape)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, dim=-1)
        gate = torch.exp(-a)
        gate += 1
        return (a / gate * b).to(self._dtype)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, dim=-1)
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)).
        gate = torch.exp((a + a * a * a * 0.044715) * (-2 * math.sqrt(2 / math.pi)))
        gate += 1
        return (a / gate * b).to(self._dtype)

    # Attention

    def plan(self, metadata: AttentionMetadata, group: int = 0) -> StepPlan:
        return StepPlan(metadata)

    def rotary_table(self, angles: NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))

    def rotary_factors(self, table: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        return table.index_select(0, plan.positions)  # [T, 2, head_dim / 2]

    def rotary(self, x: torch.Tensor, factors: torch.Tensor, scale: Float32 | None = None) -> torch.Tensor:
        half = factors.shape[-1]
        heads = x.reshape(len(x), -1, 2, half).float()
        a, b = heads[:, :, 0], heads[:, :, 1]
        cos, sin = factors[:, None, 0], factors[:, None, 1]
        out = torch.empty_like(heads)
        torch.sub(a * cos, b * sin, out=out[:, :, 0])
        torch.add(b * cos, a * sin, out=out[:, :, 1])
        if scale is not None:
            out *= torch.from_numpy(scale)[:, None]  # [heads, 1, head_dim / 2]
        return out.to(self._dtype).view(x.shape)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: StepPlan) -> None:
        rows = plan.write_rows(cache)
        cache.k.index_copy_(0, rows, k.reshape(-1, cache.head_dim))
        cache.v.index_copy_(0, rows, v.reshape(-1, cache.head_dim))

    def paged_attention(
        self, q: torch.Tensor, cache: LayerCache, plan: StepPlan, *, scale: float, window: int | None = None
    ) -> torch.Tensor:
        layout = plan.layout(cache, q.shape[1] // cache.head_dim, window)
        heads = q.reshape(-1, cache.head_dim).float() * scale
        outs = [_attend(heads, cache, group) for group in layout.groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, layout.out_rows).to(self._dtype).view(q.shape)


def _attend(q: torch.Tensor, cache: LayerCache, group: QueryGroup) -> torch.Tensor:
    """Attention of one group's query tiles -> [tiles * kv_heads * rows, head_dim] in float32."""
    heads, dim = cache.num_kv_heads, cache.head_dim
    q = q.index_select(0, group.q_rows).view(-1, group.num_rows, dim)
    peak = torch.full((*q.shape[:2], 1), _MASKED)
    total = torch.zeros_like(peak)
    out = torch.zeros_like(q)
    for step in group.steps:
        n = step.n * heads
        k = cache.k.index_select(0, step.rows).view(n, KEY_TILE, dim).float()
        scores = torch.bmm(q[:n], k.transpose(1, 2))
        if step.mask is not None:
            scores.view(step.n, heads, group.num_rows, KEY_TILE).masked_fill_(step.mask, -torch.inf)
        new_peak = torch.maximum(peak[:n], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_peak).exp_()
        fade = torch.exp(peak[:n] - new_peak)
        v = cache.v.index_select(0, step.rows).view(n, KEY_TILE, dim).float()
        total[:n].mul_(fade).add_(weights.sum(-1, keepdim=True))
        out[:n].mul_(fade).add_(torch.bmm(weights, v))
        peak[:n] = new_peak
    return out.div_(total).view(-1, dim)


def _make_layout(m: AttentionMetadata, cache: LayerCache, num_heads: int, window: int | None) -> AttentionLayout:
    groups: list[QueryGroup] = []
    out_rows = np.empty((m.num_tokens, num_heads), dtype=np.int64)
    start = 0
    floor = 0
    for height in QUERY_TILES:
        last = height == QUERY_TILES[-1]
        segments = np.flatnonzero((m.q_len > floor) & (last | (m.q_len <= height)))
        floor = height
        if len(segments):
            group = _make_group(m, segments, height, cache, num_heads, window, out_rows, start)
            start += group.num_tiles * cache.num_kv_heads * group.num_rows
            groups.append(group)
    return AttentionLayout(groups, torch.from_numpy(out_rows.reshape(-1)))


def _make_group(
    m: AttentionMetadata,
    segments: Int64,
    height: int,
    cache: LayerCache,
    num_heads: int,
    window: int | None,
    out_rows: Int64,
    out_start: int,
) -> QueryGroup:
    """The group of these segments' query tiles; fills their tokens' part of `out_rows`."""
    # One element per query tile: its segment, its first token there, and the range of key tiles it sees.
    counts = -(-m.q_len[segments] // height)
    segment = np.repeat(segments, counts)
    index = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    length = m.q_len[segment]
    context_start = m.context_len[segment] - length  # position of the segment's first token in this step
    first = index * height
    last = np.minimum(first + height, length) - 1
    seen_from = context_start + first - (window - 1 if window is not None else m.context_len.max())
    key_first = np.maximum(seen_from, 0) // KEY_TILE
    key_count = (context_start + last) // KEY_TILE - key_first + 1
    order = np.argsort(-key_count, kind="stable")
    segment, first, last, length = segment[order], first[order], last[order], length[order]
    context_start, key_first, key_count = context_start[order], key_first[order], key_count[order]

    kv_heads = cache.num_kv_heads
    shared = num_heads // kv_heads
    num_rows = -(-height * shared // ROW_MULTIPLE) * ROW_MULTIPLE
    row = np.minimum(np.arange(num_rows), height * shared - 1)
    token = np.minimum(first[:, None] + row // shared, last[:, None])  # [tiles, rows], within the segment
    head = np.arange(kv_heads)[:, None] * shared + row % shared  # [kv_heads, rows]
    q_token = m.q_start[segment][:, None] + token
    q_rows = q_token[:, None, :] * num_heads + head
    # Padding repeats a real row, whose bits are the same wherever it stands.
    out_rows[q_token[:, None, :], head] = out_start + np.arange(q_rows.size).reshape(q_rows.shape)
    position = context_start[:, None] + token
    steps = list(_key_steps(m, cache, segment, position, key_first, key_count, window))
    return QueryGroup(len(segment), num_rows, torch.from_numpy(q_rows.reshape(-1)), steps)


def _key_steps(
    m: AttentionMetadata,
    cache: LayerCache,
    segment: Int64,
    position: Int64,
    key_first: Int64,
    key_count: Int64,
    window: int | None,
) -> Iterator[KeyStep]:
    for step in range(int(key_count[0])):
        n = int(np.searchsorted(-key_count, -step))  # tiles are sorted: those with more than `step` key tiles
        seg, pos = segment[:n, None], position[:n, :, None]
        key = (key_first[:n, None] + step) * KEY_TILE + np.arange(KEY_TILE)
        # Past the context, and left of all windows, lies what is others', maybe not even finite: read the null block.
        valid = key < m.context_len[seg]
        if window is not None:
            valid &= key > pos[:, 0] - window
        column = np.where(valid, key // m.block_size, 0)
        slots = np.where(valid, m.block_tables[seg, column].astype(np.int64) * m.block_size + key % m.block_size, 0)
        rows = torch.from_numpy(cache.rows(slots).reshape(-1))
        seen = key[:, None, :] <= pos
        if window is not None:
            seen &= key[:, None, :] > pos - window
        mask = None if seen.all() else torch.from_numpy(~seen[:, None])
        yield KeyStep(n, rows, mask)
