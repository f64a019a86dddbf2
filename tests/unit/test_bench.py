"""`kvern bench scheduler`: rows under the names that other engines' benchmarks use, and a table for people."""

from __future__ import annotations

import json

import pytest

from kvern.cli.main import main


@pytest.mark.slow
def test_json_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scheduler", "--json", "--n", "1,8", "--steps", "20", "--async", "off"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [(r["kind"], r.get("n"), r["prefix_cache"], r.get("async")) for r in rows]
    per_cache = [("step", 1), ("step", 8), ("blocks", None)]
    assert names == [(k, n, c, None if n is None else False) for c in (True, False) for k, n in per_cache]
    times = ("step_us", "median_us", "schedule_us", "update_us", "p99_us", "add_us")
    assert all(row[key] > 0 for row in rows if row["kind"] == "step" for key in times)
    assert all(row["alloc_per_s"] > 0 and row["free_per_s"] > 0 for row in rows if row["kind"] == "blocks")
    assert {"lookup_per_s", "hash_tokens_per_s"} <= rows[2].keys() and "lookup_per_s" not in rows[5]


def test_events_and_a_queue(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--n", "16", "--events", "4", "--waiting", "50", "--steps", "12", "--cache", "on", "--no-blocks"]
    assert main(["bench", "scheduler", "--json", *arguments]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["n"], r["events"], r["waiting"]) for r in rows] == [(16, 4, 50)] * 2


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scheduler", "--n", "2", "--steps", "5", "--cache", "off", "--async", "off"]) == 0
    printed = capsys.readouterr().out
    assert "microseconds" in printed and "million per second" in printed
