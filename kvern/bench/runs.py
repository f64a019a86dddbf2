"""What all benchmarks of an engine do: check, warm up, measure, and say where the time went if asked."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from kvern.bench.load import Requests, kernels_used, warm_up
from kvern.bench.profile import StepProfile
from kvern.bench.report import ProgressLine, Row, repeat
from kvern.config import EngineConfig
from kvern.engine.client import InprocClient

TimeRun = Callable[[InprocClient, Requests, str, ProgressLine], Row]


def run_all(
    name: str,
    client: InprocClient,
    requests: Requests,
    time_run: TimeRun,
    config: EngineConfig,
    args: argparse.Namespace,
    about: Row,
    titles: Mapping[str, str],
    line: ProgressLine,
) -> None:
    """Measure `args.repeat` times and print it. about: of the load. Raises InvalidConfig."""
    requests.check(client.limits.max_model_len)
    warm_up(client, requests)
    profile = StepProfile(client) if args.profile else None
    engine = {"bench": name, "model": config.model, "kernels": kernels_used(config, client.model_config)}
    measure = lambda i: time_run(client, requests, f"run {i + 1}", line)  # noqa: E731
    repeat(measure, args.repeat, engine | about, titles, args.json, line)
    if profile is not None:
        profile.report(args.json)
