"""Time a part of kvern alone."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    summary = "microseconds a step of the scheduler costs, without a model"
    _scheduler_arguments(parts.add_parser("scheduler", help=summary, description=summary + "."))


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


def run(args: argparse.Namespace) -> int:
    from kvern.bench import scheduler

    return scheduler.run(args)
