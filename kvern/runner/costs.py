"""What it costs to keep a preempted request's cache, and what to compute it again: measured, before the first request.

Both are the best of a few tries, since whatever else the machine does only adds. A prompt is measured at a length
at which the matrix products have reached their speed; shorter ones cost more per token, so this favours recomputing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvern.kernels.ops import AttentionMetadata
from kvern.runner.model_runner import ModelRunner

_PROMPT_TOKENS = 128
_BLOCKS = 16
_TRIES = 3


def measure_costs(runner: ModelRunner) -> tuple[float, float] | None:
    """Seconds to copy one block to the host or back, and to compute one token of a prompt; None without a host tier.
    Only while no request has been computed: it writes to the cache's first blocks."""
    config, mover = runner.config, runner.mover
    if not mover.host_slots:
        return None
    there = [(block, block) for block in range(1, 1 + min(_BLOCKS, config.host_blocks, config.num_blocks - 1))]

    def move() -> None:
        mover.copy(mover.slots, mover.host_slots, there)
        mover.copy(mover.host_slots, mover.slots, there)

    metadata = _prompt(runner, min(_PROMPT_TOKENS, config.max_num_batched_tokens, config.max_model_len))
    tokens = np.zeros(metadata.num_tokens, dtype=np.int32)
    compute = _best(lambda: runner.compute(tokens, [metadata] * len(config.kv_groups)))
    return _best(move) / (2 * len(there)), compute / metadata.num_tokens


def _best(action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _prompt(runner: ModelRunner, num_tokens: int) -> AttentionMetadata:
    """One prompt. Groups may write to the same blocks: what is computed matters to nobody."""
    size = runner.config.block_size
    num_tokens = min(num_tokens, (runner.config.num_blocks - 1) * size)
    positions = np.arange(num_tokens, dtype=np.int64)
    table = np.arange(1, 1 + -(-num_tokens // size), dtype=np.int32)[None]
    length = np.array([num_tokens], dtype=np.int64)
    return AttentionMetadata(positions, positions + size, np.zeros(1, dtype=np.int64), length, length, table, size)
