"""How a step's time grows with the batch and with the context: JSON lines, and a picture for docs/performance.md.

    python benchmarks/growth.py --svg docs/images/growth.svg

Decode only. batch: n streams with a context of 256 tokens each. context: one stream, and eight, after prompts of so
many tokens. Medians of single steps, engine and all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from kvern.config import EngineConfig, make_config
from kvern.engine.client import InprocClient
from kvern.sampling_params import SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 1024, 2048, 4096, 7600)
STEPS = 24
_WIDTH, _HEIGHT, _MARGIN = 420, 260, 46


def step_seconds(client: InprocClient, batch: int, context: int, name: str) -> float:
    """Median seconds of a step in which `batch` streams decode behind `context` tokens."""
    rng = np.random.default_rng(0)
    # The first stream must still run when the last one's prompt has been computed.
    max_tokens = STEPS + 8 + -(-batch * context // client.limits.max_num_batched_tokens)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(batch):
        prompt = rng.integers(0, client.input_processor.vocab_size, context).tolist()
        client.add(f"{name} {i}", client.input_processor.process(f"{name} {i}", prompt, sampling, cache_salt=name))
    stats, seconds = client.core.scheduler.stats, []
    while client.has_unfinished():
        tokens, computed, start = stats.generated_tokens, stats.scheduled_tokens, time.perf_counter()
        client.step()
        if stats.generated_tokens - tokens == stats.scheduled_tokens - computed == batch:  # no prompt among them
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(config: EngineConfig) -> list[dict[str, float]]:
    rows = []
    client = InprocClient(config)
    points = [(n, 256) for n in BATCHES] + [(n, c) for n in (1, 8) for c in CONTEXTS]
    for batch, context in points:
        seconds = step_seconds(client, batch, context, f"{batch} x {context}")
        rows.append({"batch": batch, "context": context, "ms": seconds * 1e3, "tokens_per_s": batch / seconds})
        print(json.dumps({key: round(value, 3) for key, value in rows[-1].items()}), flush=True)
    client.close()
    return rows


def picture(rows: list[dict[str, float]]) -> str:
    """Three panels of one line each, both axes logarithmic."""
    batches = [(r["batch"], r["tokens_per_s"]) for r in rows if r["context"] == 256]
    panels = [("streams", "tokens/s", batches)]
    for n in (1, 8):
        line = [(r["context"], r["ms"]) for r in rows if r["batch"] == n and r["context"] != 256]
        panels.append((f"context, {n} stream{'s' * (n > 1)}", "ms a step", line))
    body = "".join(_panel(i * _WIDTH, *panel) for i, panel in enumerate(panels))
    size = f'width="{_WIDTH * len(panels)}" height="{_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">{body}</svg>\n'


def _panel(left: int, x_title: str, y_title: str, line: list[tuple[float, float]]) -> str:
    xs, ys = (np.log2([point[axis] for point in line]) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - xs.min()) / max(np.ptp(xs), 1e-9)
        up = (y - np.floor(ys.min())) / max(np.ceil(ys.max()) - np.floor(ys.min()), 1e-9)
        return left + _MARGIN + across * (_WIDTH - 2 * _MARGIN), _HEIGHT - _MARGIN - up * (_HEIGHT - 2 * _MARGIN)

    parts = [f'<rect x="{left}" width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>']
    for (x, y), log_x, log_y in zip(line, xs, ys, strict=True):
        a, b = place(log_x, log_y)
        label = f"{y:,.0f}" if y >= 100 else f"{y:.3g}"
        parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="#06c"/>')
        parts.append(f'<text x="{a:.1f}" y="{b - 8:.1f}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{a:.1f}" y="{_HEIGHT - 28}" text-anchor="middle" fill="#666">{x:g}</text>')
    path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(xs, ys, strict=True))
    parts.append(f'<polyline points="{path}" fill="none" stroke="#06c"/>')
    parts.append(f'<text x="{left + _WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{x_title}</text>')
    parts.append(f'<text x="{left + 10}" y="18">{y_title}</text>')
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    options = {"model": args.model, "max_model_len": args.max_model_len, "max_num_seqs": max(BATCHES)}
    rows = measure(make_config(EngineConfig, options | {"kv_cache_memory": "6GiB"}))
    if args.svg is not None:
        args.svg.write_text(picture(rows))


if __name__ == "__main__":
    main()
