"""How much an engine gets done when it has all there is to do: every request is handed over at once, in this process.

Rates are over the seconds from handing over the first request to the end of the last.
"""

from __future__ import annotations

import argparse
import gc
import time

from kvern.bench.load import Requests, random_requests, read_requests, serve
from kvern.bench.report import ProgressLine, Row
from kvern.bench.runs import run_all
from kvern.config import EngineConfig
from kvern.engine.client import InprocClient

_TITLES = {
    "seconds": "seconds",
    "requests_per_s": "requests/s",
    "input_tokens_per_s": "input tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "total tokens/s",
    "peak_running": "peak running",
}


def time_run(client: InprocClient, requests: Requests, salt: str, line: ProgressLine) -> Row:
    gc.collect()
    done = tokens = peak = 0
    start = time.perf_counter()
    for deltas in serve(client, requests, salt):
        ended = sum(delta.finish_reason is not None for delta in deltas)
        peak = max(peak, client.core.scheduler.num_running + ended)  # who ended in a step ran in it
        done += ended
        tokens += sum(len(delta.token_ids) for delta in deltas)
        rate = tokens / (time.perf_counter() - start)
        line.say(f"{salt}: {done} of {len(requests)} requests, {rate:,.0f} output tokens/s")
    seconds = time.perf_counter() - start
    if tokens != requests.output_tokens:
        raise RuntimeError(f"{tokens} of {requests.output_tokens} tokens were made")
    return {
        "seconds": seconds,
        "requests_per_s": len(requests) / seconds,
        "input_tokens_per_s": requests.input_tokens / seconds,
        "output_tokens_per_s": tokens / seconds,
        "total_tokens_per_s": (requests.input_tokens + tokens) / seconds,
        "peak_running": peak,
    }


def run(config: EngineConfig, args: argparse.Namespace) -> int:
    requests = None if args.workload is None else read_requests(args.workload)
    line = ProgressLine()
    line.say("loading the model", always=True)
    client = InprocClient(config)
    try:
        if requests is None:
            vocab_size = client.input_processor.vocab_size
            requests = random_requests(
                config.seed, args.num_prompts, vocab_size, args.input_len, args.output_len, args.shared_prefix
            )
        about = {
            "num_prompts": len(requests),
            "input_tokens": requests.input_tokens,
            "output_tokens": requests.output_tokens,
        }
        run_all("throughput", client, requests, time_run, config, args, about, _TITLES, line)
    finally:
        line.clear()
        client.close()
    return 0
