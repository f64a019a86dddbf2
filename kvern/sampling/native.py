"""Rows that need more than an argmax, all at once and on all threads, by the native kernel (sampling.cpp).

It does what `sampler` does in NumPy, in the same order and with the same random numbers; its sums are rounded
elsewhere, so a draw that falls on a border may give the neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.ops import NativeOps
from kvern.kernels.ops import Ops
from kvern.sampling.sampler import Float32, RowState, Sampler, SampleRows
from kvern.step import Int32

_RECORD = np.dtype(abi.SampleRow)


def make_sampler(ops: Ops, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Sampler:
    """The sampler that suits the ops."""
    if isinstance(ops, NativeOps) and vocab_size <= abi.MOST_SAMPLED:
        return Sampler(vocab_size, eos_token_ids, native_rows(ops))
    return Sampler(vocab_size, eos_token_ids)


def native_rows(ops: NativeOps) -> SampleRows:
    def sample_rows(logits: Float32, places: NDArray[np.intp], rows: Sequence[RowState], positions: Int32) -> Int32:
        for row in rows:
            if row.record is None:
                row.record = _record(row)
        table = (abi.SampleRow * len(rows))(*[row.record for row in rows])
        fields = np.frombuffer(memoryview(table).cast("B"), dtype=_RECORD)
        fields["logits"] = logits.ctypes.data + places * logits.strides[0]
        fields["position"] = positions
        fields["num_stop"][positions >= [row.min_tokens_end for row in rows]] = 0
        for entry, row in zip(table, rows, strict=True):
            if row.history is not None:
                ids = row.history.ids
                entry.num_seen = len(ids)
                entry.seen_ids, entry.seen_counts = ids.ctypes.data, row.history.output_counts.ctypes.data
        return ops.sample(table, logits.shape[1])

    return sample_rows


def _record(row: RowState) -> abi.SampleRow:
    """What of a row stays the same from step to step; the arrays it points to are the row's."""
    sampling = row.sampling
    return abi.SampleRow(
        bias_ids=row.bias_ids.ctypes.data,
        bias_values=row.bias_values.ctypes.data,
        stop_ids=row.stop_ids.ctypes.data,
        num_bias=len(row.bias_ids),
        num_stop=len(row.stop_ids),
        seed=(sampling.seed or 0) & 0xFFFFFFFFFFFFFFFF,
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        temperature=sampling.temperature,
        min_p=sampling.min_p,
        repetition=sampling.repetition_penalty,
        frequency=sampling.frequency_penalty,
        presence=sampling.presence_penalty,
    )
