"""Measure kvern: a whole engine, a server's start, or a part alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvern.cli.options import add_options, read_engine_config
from kvern.config import EngineConfig

_SUMMARIES = {
    "throughput": "tokens per second when all requests are there at once",
    "latency": "time to the first token and between tokens of a single stream",
    "startup": "seconds from the start of a server's process to its first token",
    "scheduler": "microseconds a step of the scheduler costs, without a model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    for name, summary in _SUMMARIES.items():
        part = parts.add_parser(name, help=summary, description=summary + ".")
        _ARGUMENTS[name](part)
        if name != "scheduler":
            part.add_argument("--json", action="store_true", help="one JSON line per run and one of medians")
            if name != "startup":
                part.add_argument("--profile", action="store_true", help="time every operation; costs a little time")
            add_options(part, "engine", EngineConfig)


def _throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """The seed is that of the engine options."""
    lengths: Any = {"type": _lengths, "metavar": "LOW:HIGH"}
    parser.add_argument("--num-prompts", type=_count, default=64, help="requests, of random tokens by --seed")
    parser.add_argument("--input-len", default="32:512", help="tokens of a prompt: uniform, or one number", **lengths)
    parser.add_argument("--output-len", default="16:256", help="tokens made of it: likewise", **lengths)
    parser.add_argument("--shared-prefix", type=_natural, default=0, help="as many tokens more begin all prompts")
    text = 'use these: {"prompts": [[ids], ...], "output_lens": [...]}, and none of the options above'
    parser.add_argument("--workload", metavar="FILE", help=text)
    _repeat_argument(parser, 3)


def _latency_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=_count, default=128, help="tokens of a prompt, random by --seed")
    parser.add_argument("--output-len", type=_at_least_2, default=256, help="tokens made of it")
    parser.add_argument("--batch", type=_count, default=1, help="requests at once")
    _repeat_argument(parser, 5)


def _startup_arguments(parser: argparse.ArgumentParser) -> None:
    _repeat_argument(parser, 3)


def _repeat_argument(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--repeat", type=_count, default=default, help="runs, of which the medians are told")


def _scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def switches(text: str) -> list[bool]:
        return [{"on": True, "off": False}[part] for part in text.split(",")]

    on_off: Any = {"type": switches, "default": "on,off", "metavar": "on,off"}
    parser.add_argument("--n", type=numbers, default="1,64,256,1024,4096", help="numbers of running requests")
    parser.add_argument("--cache", help="prefix cache", **on_off)
    parser.add_argument("--async", dest="asyncs", help="steps planned before results are known", **on_off)
    parser.add_argument("--events", type=int, default=0, help="requests that end and arrive in every step")
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait behind the running ones")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each row; ten times as many for n = 1")
    parser.add_argument("--no-blocks", dest="blocks", action="store_false", help="leave out the block rates")
    parser.add_argument("--json", action="store_true", help="one JSON line per row, in place of tables")


_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "throughput": _throughput_arguments,
    "latency": _latency_arguments,
    "startup": _startup_arguments,
    "scheduler": _scheduler_arguments,
}


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    return _count(text, 0)


def _at_least_2(text: str) -> int:
    """The time between tokens needs two."""
    return _count(text, 2)


def _lengths(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    lengths = _count(low), _count(high if colon else low)
    if lengths[0] > lengths[1]:
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH, got {text!r}")
    return lengths


def run(args: argparse.Namespace) -> int:
    if args.part == "scheduler":
        from kvern.bench import scheduler

        return scheduler.run(args)
    config = read_engine_config(args)
    if args.part == "throughput":
        from kvern.bench import throughput

        return throughput.run(config, args)
    if args.part == "latency":
        from kvern.bench import latency

        return latency.run(config, args)
    from kvern.bench import startup

    return startup.run(config, args)
