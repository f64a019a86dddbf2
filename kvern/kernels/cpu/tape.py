"""A recorded list of operations, and what can be joined in it.

Some neighbours in a decoder are one pass over memory instead of two: a product and the gate of its halves, a product
and the residual it is added to, and whatever makes a product's input and its conversion. The first one's kernel does
the second operation where it would have stored its result. It is safe where nobody else reads that result, and where
the memory that is now written earlier does not hold the first one's own input; buffers carry serial numbers, so both
can be seen in the list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.buffers import Span
from kvern.kernels.cpu.library import op_array

_LINEAR = abi.OP_KINDS.index("linear")
_GATE = abi.OP_KINDS.index("gate")
_ADD = abi.OP_KINDS.index("add")
_QUANTIZE = abi.OP_KINDS.index("quantize")
_RMS_NORM = abi.OP_KINDS.index("rms_norm")
_ATTENTION = abi.OP_KINDS.index("attention")
_APART = (abi.OP_KINDS.index("write_kv"), _ATTENTION)  # what a tape in pieces leaves outside
_BLOCK = 32  # columns that are converted together
_PANEL_PAIR = 32  # rows of a gated weight's halves come in whole panels of 16


class Entry(NamedTuple):
    """An operation with the buffers that it reads and writes (None: it writes to the cache); where they lie, not the
    buffers themselves, whose memory is to be used again by the operations that follow."""

    op: abi.Op
    reads: tuple[Span, ...]
    writes: Span | None


def finds_largest(entries: list[Entry], address: int) -> bool:
    """Have the product that gives the rows at `address`, if it is one, find each row's largest: False if it is not."""
    op = entries[-1].op
    writers = sum(entry.writes is not None and entry.writes == entries[-1].writes for entry in entries)
    plain = op.kind == _LINEAR and op.linear.gate == abi.NO_GATE and writers == 1
    if not plain or op.linear.out.data != address or op.rows != abi.LOGIT_ROWS:
        return False
    op.linear.finds_largest = 1
    return True


class Tape:
    """ops in order; pieces: the same in runs that are computed by one call each. output: what the recorded function
    returned. The memory of all buffers stays that of their pool; the output's is not handed out again."""

    def __init__(self, entries: list[Entry], output: Any, *, pieces: bool = False) -> None:
        self.output = output
        self.kinds = [abi.OP_KINDS[entry.op.kind] for entry in entries]
        self.pieces = [op_array(entry.op for entry in piece) for piece in _split(entries, pieces)]


def _split(entries: list[Entry], pieces: bool) -> Iterator[list[Entry]]:
    piece: list[Entry] = []
    for entry in entries:
        if pieces and entry.op.kind in _APART:
            if piece:
                yield piece
            yield [entry]
            piece = []
        else:
            piece.append(entry)
    if piece:
        yield piece


def join(entries: list[Entry], output_serial: int) -> list[Entry]:
    uses = Counter(span.serial for entry in entries for span in entry.reads)
    uses[output_serial] += 1
    writers = Counter(entry.writes.serial for entry in entries if entry.writes is not None)
    joined: list[Entry] = []
    for entry in entries:
        before = joined[-1] if joined else None
        if before is not None and before.writes is not None and entry.writes is not None:
            alone = uses[before.writes.serial] == 1 and writers[before.writes.serial] == 1
            apart = not any(entry.writes.overlaps(span) for span in before.reads)
            both = _join_pair(before, entry) if alone and apart else None
            if both is not None:
                joined[-1] = both
                continue
        joined.append(entry)
    return joined


def _join_pair(first: Entry, second: Entry) -> Entry | None:
    """Both as one; None if they are not of kinds that can be."""
    if first.writes not in second.reads:
        return None
    if second.op.kind == _QUANTIZE:
        return _convert(first, second)
    if first.op.kind == _LINEAR:
        return _extend_product(first, second)
    return None


def _convert(maker: Entry, entry: Entry) -> Entry | None:
    """What makes a product's input converts it as well."""
    op = abi.Op.from_buffer_copy(maker.op)
    if op.kind == _RMS_NORM:
        op.rms_norm.quantized = entry.op.quantize.out
    elif op.kind == _ATTENTION and op.attention.cache.head_dim % _BLOCK == 0:
        op.attention.quantized = entry.op.quantize.out
    elif op.kind == _LINEAR and op.linear.gate != abi.NO_GATE:
        op.linear.quantized = entry.op.quantize.out
    else:
        return None
    return Entry(op, maker.reads, entry.writes)


def _extend_product(linear: Entry, entry: Entry) -> Entry | None:
    op = abi.Op.from_buffer_copy(linear.op)
    args = op.linear
    if args.gate != abi.NO_GATE or args.residual.data is not None or linear.writes is None:
        return None
    if entry.op.kind == _GATE:
        if args.weight.out % _PANEL_PAIR or args.weight.out != 2 * entry.op.gate.columns:
            return None
        args.gate = entry.op.gate.gate
        args.out = entry.op.gate.out
        return Entry(op, linear.reads, entry.writes)
    if entry.op.kind == _ADD:
        add = entry.op.add
        other = add.b if add.a.data == args.out.data else add.a
        if other.data == args.out.data or args.weight.out != add.columns:
            return None
        args.residual = other
        args.out = add.out
        return Entry(op, (*linear.reads, *(span for span in entry.reads if span != linear.writes)), entry.writes)
    return None
