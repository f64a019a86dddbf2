"""Repetitions of a measurement: shown while they go on, as a table or as JSON lines."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]
_BETWEEN_LINES = 0.1  # seconds: a line for each step would be part of what is measured


class ProgressLine:
    """One line on stderr, written over and over; nothing if stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._next = 0.0

    def say(self, text: str, *, always: bool = False) -> None:
        if self._shown and (always or time.perf_counter() >= self._next):
            self._next = time.perf_counter() + _BETWEEN_LINES
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self.say("", always=True)


def repeat(
    measure: Callable[[int], Row], times: int, about: Row, titles: Mapping[str, str], as_json: bool, line: ProgressLine
) -> None:
    """Measure so many times and print each figure, and their medians. `about`: what is the same in all rows; titles:
    of the table's columns, by key of what `measure` gives."""
    rows = []
    try:
        for i in range(times):
            line.say(f"run {i + 1} of {times}", always=True)
            rows.append(measure(i))
            line.clear()
            if as_json:
                _print_json(about | {"run": i + 1} | rows[-1])
    finally:
        line.clear()
    medians = {key: statistics.median(row[key] for row in rows if key in row) for key in rows[0]}
    if as_json:
        _print_json(about | {"run": "median"} | medians)
    else:
        _print_table(about, rows, medians, titles)


def _print_json(row: Row) -> None:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def _print_table(about: Row, rows: list[Row], medians: Row, titles: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=", ".join(f"{key} {value}" for key, value in about.items()), title_justify="left")
    table.add_column("run", justify="right")
    for key in medians:
        # rich would rather shorten a word than break a line.
        table.add_column(titles[key], justify="right", min_width=max(map(len, titles[key].split())))
    for name, row in [*((str(i + 1), row) for i, row in enumerate(rows)), ("median", medians)]:
        if name != "median" or len(rows) > 1:
            table.add_row(name, *(_number(row[key]) if key in row else "" for key in medians))
    Console().print(table)


def _number(value: float) -> str:
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
