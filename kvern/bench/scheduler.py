"""What scheduling costs by itself: no model, no server; the output of the model is made up outside the timed part.

A step is schedule() + update_from_output(). Rows are named by kind, n, prefix_cache, async, events, waiting:
  step    n requests run, with prompts of 128 tokens. events k: in every step k requests end and k new ones are added
          and admitted. waiting w: w more wait that cannot be admitted.
  blocks  200 prompts of 100 blocks: allocated (and published, with the prefix cache), freed, looked up when cached, and
          hashed; per second.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvern.cache.prefix_index import extend_hashes, root_hash
from kvern.config import SchedulerConfig
from kvern.request import Request
from kvern.sampling_params import SamplingParams
from kvern.scheduler.scheduler import Scheduler
from kvern.step import Int32, ModelRunnerOutput, SchedulerOutput

BLOCK, PROMPT, VOCAB = 16, 128, 49152
_NUM_PROMPTS, _PROMPT_BLOCKS = 200, 100
Row = dict[str, Any]


class _Load:
    """A scheduler with `n` running requests that never lacks anything."""

    def __init__(self, n: int, prefix_cache: bool, is_async: bool, events: int, steps: int, seed: int) -> None:
        config = SchedulerConfig(
            num_blocks=n * ((PROMPT + steps + 64) // BLOCK + 2) + 1000,
            block_size=BLOCK,
            max_num_seqs=n,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            enable_prefix_caching=prefix_cache,
            async_scheduling=is_async,
        )
        self.scheduler = Scheduler(config)
        self._random = np.random.default_rng(seed)
        self._serial = 0
        # With events, how many tokens each request makes, so that n stay running.
        self.life = n // events if events else 8000

    def add(self, max_tokens: int) -> None:
        prompt = self._random.integers(0, VOCAB, PROMPT, dtype=np.int32)
        sampling = SamplingParams(temperature=0.0, max_tokens=min(max_tokens, 8000), ignore_eos=True)
        self.scheduler.add_request(Request(f"r{self._serial}", prompt, sampling))
        self._serial += 1

    def step(self) -> tuple[float, float, SchedulerOutput]:
        """Seconds of schedule(), seconds of update_from_output(), and the plan."""
        start = time.perf_counter()
        output = self.scheduler.schedule(0.0)
        planned = time.perf_counter()
        tokens: Int32 = np.full((len(output.rows), 1), 7, dtype=np.int32)
        result = ModelRunnerOutput(tokens, output.samples.astype(np.int32))
        computed = time.perf_counter()
        self.scheduler.update_from_output(output, result, 0.0)
        return planned - start, time.perf_counter() - computed, output


def time_steps(
    n: int, prefix_cache: bool, is_async: bool, events: int = 0, waiting: int = 0, steps: int = 100, seed: int = 0
) -> Row:
    """One row of kind "step". Times in microseconds; step_us, schedule_us and update_us are means."""
    load = _Load(n, prefix_cache, is_async, events, steps, seed)
    scheduler = load.scheduler
    start = time.perf_counter()
    for i in range(n):
        load.add(64 + i // events if events else load.life)  # staggered ends
    add_us = (time.perf_counter() - start) / n * 1e6
    while scheduler.num_waiting:
        load.step()
    for _ in range(waiting):
        load.add(load.life)
    for _ in range(16):
        load.step()
    while events and scheduler.num_running == n:  # up to the first ends
        load.step()
    gc.collect()
    schedule, update, total = [], [], []
    for _ in range(steps):
        start = time.perf_counter()
        for _ in range(events):
            load.add(load.life)
        adding = time.perf_counter() - start
        planning, taking_in, output = load.step()
        if len(output.rows) != n:
            raise RuntimeError(f"{len(output.rows)} of {n} requests ran in a step")
        schedule.append(planning)
        update.append(taking_in)
        total.append(adding + planning + taking_in)
    return {
        "kind": "step", "n": n, "prefix_cache": prefix_cache, "async": is_async, "events": events, "waiting": waiting,
        "step_us": statistics.fmean(total) * 1e6, "median_us": statistics.median(total) * 1e6,
        "schedule_us": statistics.fmean(schedule) * 1e6, "update_us": statistics.fmean(update) * 1e6,
        "p99_us": sorted(total)[int(0.99 * steps)] * 1e6, "add_us": add_us,
    }  # fmt: skip


def time_blocks(prefix_cache: bool, seed: int = 0) -> Row:
    """The row of kind "blocks"."""
    config = SchedulerConfig(
        num_blocks=40000, block_size=BLOCK, max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=8192,
        enable_prefix_caching=prefix_cache,
    )  # fmt: skip
    cache = Scheduler(config).state.cache
    prompts = np.random.default_rng(seed).integers(0, VOCAB, (_NUM_PROMPTS, _PROMPT_BLOCKS * BLOCK), dtype=np.int32)
    held = [Request(f"a{i}", prompt, SamplingParams(max_tokens=10)) for i, prompt in enumerate(prompts)]
    again = [Request(f"b{i}", prompt, SamplingParams(max_tokens=10)) for i, prompt in enumerate(prompts)]
    row: Row = {"kind": "blocks", "prefix_cache": prefix_cache}
    count = _NUM_PROMPTS * _PROMPT_BLOCKS
    if prefix_cache:
        start = time.perf_counter()
        for request in held:
            _hash(request)
        row["hash_tokens_per_s"] = count * BLOCK / (time.perf_counter() - start)
        for request in again:
            _hash(request)
    miss = cache.lookup(Request("miss", [1], SamplingParams()))
    tables: list[Int32] = []
    start = time.perf_counter()
    for i, request in enumerate(held):
        taken, _ = cache.take(request, miss, 0, request.num_tokens)
        table = np.array(taken, dtype=np.int32)
        if prefix_cache:
            cache.publish(request, request.token_ids, table, 0, i)
        tables.append(table)
    row["alloc_per_s"] = count / (time.perf_counter() - start)
    cache.end_step()
    start = time.perf_counter()
    for request, table in zip(held, tables, strict=True):
        cache.free(request, table)
    row["free_per_s"] = count / (time.perf_counter() - start)
    if prefix_cache:
        start = time.perf_counter()
        found = sum(cache.lookup(request).num_blocks for request in again)
        row["lookup_per_s"] = count / (time.perf_counter() - start)
        if found < count - _NUM_PROMPTS:
            raise RuntimeError(f"{found} of {count} blocks were found again")
    return row


def _hash(request: Request) -> None:
    extend_hashes(request.block_hashes, root_hash(None), request.token_ids, request.num_tokens, BLOCK)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """All rows that the arguments ask for, once."""
    for prefix_cache in args.cache:
        for is_async in args.asyncs:
            for n in args.n:
                if args.events <= n:
                    steps = args.steps if n > 1 else args.steps * 10
                    yield time_steps(n, prefix_cache, is_async, args.events, args.waiting, steps)
        if args.blocks:
            yield time_blocks(prefix_cache)


def run(args: argparse.Namespace) -> int:
    found = []
    for row in rows(args):
        found.append(row)
        if args.json:
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    if not args.json:
        _print_tables(found)
    return 0


def _print_tables(found: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = Table(title="one step, microseconds", title_justify="left")
    for name in ("running", "prefix cache", "async", "median", "mean", "p99", "schedule", "update", "add a request"):
        steps.add_column(name, justify="right")
    for row in found:
        if row["kind"] == "step":
            times = [row[key] for key in ("median_us", "step_us", "p99_us", "schedule_us", "update_us", "add_us")]
            flags = ["on" if row[key] else "off" for key in ("prefix_cache", "async")]
            steps.add_row(str(row["n"]), *flags, *(f"{value:,.0f}" for value in times))
    rates = Table(title="blocks, million per second", title_justify="left")
    for name in ("prefix cache", "allocate", "free", "look up", "hash (tokens)"):
        rates.add_column(name, justify="right")
    for row in found:
        if row["kind"] == "blocks":
            keys = ("alloc_per_s", "free_per_s", "lookup_per_s", "hash_tokens_per_s")
            values = [f"{row[key] / 1e6:.2f}" if key in row else "" for key in keys]
            rates.add_row("on" if row["prefix_cache"] else "off", *values)
    console = Console()
    for table in (steps, rates):
        if table.row_count:
            console.print(table)
