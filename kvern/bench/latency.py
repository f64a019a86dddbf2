"""How long one reader waits: a few equally long requests that nobody else disturbs, in this process.

TTFT            from handing over to the end of the step that gave the first token; the median of the streams
TPOT            between two tokens of a stream, where a step gives several its length in equal parts
prefill         tokens of all prompts / the last stream's TTFT
output          tokens after each stream's first / the seconds from the earliest first token to the end
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from kvern.bench.load import Requests, random_requests, serve
from kvern.bench.report import ProgressLine, Row
from kvern.bench.runs import run_all
from kvern.config import EngineConfig
from kvern.engine.client import InprocClient

_TITLES = {
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "tpot_p99_ms": "TPOT p99, ms",
    "output_tokens_per_s": "output tokens/s",
    "prefill_tokens_per_s": "prefill tokens/s",
}


def time_run(client: InprocClient, requests: Requests, salt: str, line: ProgressLine) -> Row:
    gc.collect()
    latest: dict[str, float] = {}  # when each stream got its latest token
    firsts: list[float] = []
    gaps: list[float] = []
    start = now = time.perf_counter()
    for deltas in serve(client, requests, salt):
        now = time.perf_counter()
        for delta in deltas:
            before = latest.get(delta.request_id)
            count = len(delta.token_ids)
            if before is None:
                firsts.append(now)
            else:
                gaps += [(now - before) / count] * count
            latest[delta.request_id] = now
        line.say(f"{salt}: {len(gaps)} of {requests.output_tokens - len(requests)} tokens")
    return {
        "ttft_ms": (statistics.median(firsts) - start) * 1e3,
        "tpot_ms": statistics.median(gaps) * 1e3,
        "tpot_p99_ms": sorted(gaps)[int(0.99 * len(gaps))] * 1e3,
        "output_tokens_per_s": len(gaps) / (now - min(firsts)),
        "prefill_tokens_per_s": requests.input_tokens / (max(firsts) - start),
    }


def run(config: EngineConfig, args: argparse.Namespace) -> int:
    line = ProgressLine()
    line.say("loading the model", always=True)
    client = InprocClient(config)
    try:
        input_len, output_len = ((n, n) for n in (args.input_len, args.output_len))
        vocab_size = client.input_processor.vocab_size
        requests = random_requests(config.seed, args.batch, vocab_size, input_len, output_len)
        about = {"batch": args.batch, "input_len": args.input_len, "output_len": args.output_len}
        run_all("latency", client, requests, time_run, config, args, about, _TITLES, line)
    finally:
        line.clear()
        client.close()
    return 0
