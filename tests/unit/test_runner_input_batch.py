"""What a step computes, from the scheduler's differences."""

import numpy as np
import pytest

from kvern.config import SchedulerConfig
from kvern.runner.input_batch import InputBatch
from kvern.sampling_params import SamplingParams
from kvern.step import NewBlocks, NewRequest, SchedulerOutput


def int32(*values):
    return np.array(values, dtype=np.int32)


def output(rows, computed, new, **changes):
    return SchedulerOutput(
        0, int32(*rows), np.zeros(len(rows), np.int64), [str(r) for r in rows], int32(*computed), int32(*new),
        np.zeros(len(rows), bool), sum(new), **changes,
    )  # fmt: skip


def entering(row, tokens, blocks, computed=0):
    return NewRequest(str(row), row, int32(*tokens), len(tokens), SamplingParams(), [blocks], computed)


@pytest.fixture
def batch():
    return InputBatch(SchedulerConfig(num_blocks=20, block_size=4, max_num_seqs=5, max_model_len=18))


def test_a_mixed_step(batch):
    batch.apply(output([], [], [], new_requests=[entering(3, range(100, 110), [7, 8, 9]), entering(0, [50, 51], [4])]))
    batch.append(int32(0), int32(2), int32(52))
    step = output([0, 3], [2, 5], [1, 5])
    inputs = batch.prepare(step)
    assert inputs.token_ids.tolist() == [52, 105, 106, 107, 108, 109]
    (m,) = inputs.metadata
    assert m.positions.tolist() == [2, 5, 6, 7, 8, 9]
    assert m.slots.tolist() == [4 * 4 + 2, 8 * 4 + 1, 8 * 4 + 2, 8 * 4 + 3, 9 * 4, 9 * 4 + 1]
    assert m.q_start.tolist() == [0, 1]
    assert m.q_len.tolist() == [1, 5]
    assert m.context_len.tolist() == [3, 10]
    assert m.block_tables.shape == (2, 3)
    assert m.block_tables[1].tolist() == [7, 8, 9]
    assert m.num_tokens == 6
    assert inputs.last.tolist() == [0, 5]


def test_blocks_are_appended_after_new_requests_are_filled(batch):
    """A row that ended and is taken again in the same step gets the new occupant's table."""
    batch.apply(output([1], [0], [4], new_requests=[entering(1, range(4), [5])]))
    batch.apply(
        output(
            [],
            [],
            [],
            new_requests=[entering(1, range(8), [2, 3])],
            new_blocks=NewBlocks(int32(1), int32(2), int32(6)[None]),
        )
    )
    assert batch.block_tables[0, 1, :3].tolist() == [2, 3, 6]


def test_several_blocks_of_several_rows(batch):
    batch.apply(output([], [], [], new_requests=[entering(r, [1], [r + 1]) for r in range(3)]))
    batch.apply(output([], [], [], new_blocks=NewBlocks(int32(2, 0, 2), int32(1, 1, 2), int32(10, 11, 12)[None])))
    assert batch.block_tables[0, :3, :3].tolist() == [[1, 11, 0], [2, 0, 0], [3, 10, 12]]


def test_the_last_position_of_the_longest_request(batch):
    batch.apply(output([], [], [], new_requests=[entering(0, range(17), [1, 2, 3, 4, 5])]))
    inputs = batch.prepare(output([0], [16], [1]))
    assert inputs.metadata[0].slots.tolist() == [5 * 4]
    batch.append(int32(0), int32(17), int32(99))
    assert batch.token_ids[0].tolist() == [*range(17), 99]
