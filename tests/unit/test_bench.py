"""`kvern bench`: rows for programs, of the scheduler's under the names that other engines' benchmarks use, and tables
for people. What is measured is not looked at, only that it is measured of what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvern.bench.load import Requests, random_requests, serve
from kvern.cli.main import main
from kvern.config import EngineConfig
from kvern.engine.client import InprocClient

TOY = ["--model", "toy:history-hash", "--max-model-len", "500"]


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands set up the log of their process; this one is pytest's."""
    monkeypatch.setattr("kvern.log.logging.basicConfig", lambda **_: None)


def json_rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-prompts", "9", "--input-len", "5:40", "--output-len", "3:12", "--max-num-seqs", "4"]
    assert main(["bench", "throughput", *TOY, *arguments, "--repeat", "2", "--json"]) == 0
    rows = json_rows(capsys)
    assert [row["run"] for row in rows] == [1, 2, "median"]
    for row in rows:
        assert (row["bench"], row["model"], row["num_prompts"]) == ("throughput", "toy:history-hash", 9)
        assert 9 * 5 <= row["input_tokens"] <= 9 * 40 and 9 * 3 <= row["output_tokens"] <= 9 * 12
        assert row["peak_running"] == 4
        rates = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
        assert all(row[key] > 0 for key in ("seconds", *rates))


def test_throughput_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "workload.json"
    file.write_text('{"prompts": [[5, 6, 7], [8]], "output_lens": [4, 1]}')
    assert main(["bench", "throughput", *TOY, "--workload", str(file), "--repeat", "1", "--json"]) == 0
    row = json_rows(capsys)[0]
    assert (row["num_prompts"], row["input_tokens"], row["output_tokens"]) == (2, 4, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompts": [[1]]}', "missing required field `output_lens`"),
        ('{"prompts": [["a"]], "output_lens": [1]}', "Expected `int`"),
        ('{"prompts": [[1], [2]], "output_lens": [1]}', "for each of them an output_lens"),
        ('{"prompts": [[1]], "output_lens": [0]}', "at least 1"),
        ('{"prompts": [], "output_lens": []}', "must hold prompts"),
        ('{"prompts": [[1]], "output_lens": [500]}', "max_model_len of 500"),
        ('{"prompts": [[9999]], "output_lens": [1]}', "token ids must be integers from 0 to"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_be_used(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "workload.json"
    if content is not None:
        file.write_text(content)
    assert main(["bench", "throughput", *TOY, "--workload", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_random_requests_are_those_of_the_seed() -> None:
    def requests(seed: int, shared_prefix: int = 0) -> Requests:
        return random_requests(seed, 200, 1000, (3, 6), (2, 2), shared_prefix)

    assert requests(0) == requests(0) != requests(1)
    assert {len(prompt) for prompt in requests(0).prompts} == {3, 4, 5, 6}
    assert requests(0).output_lens == [2] * 200
    prefixed = requests(0, 7).prompts
    assert {len(prompt) for prompt in prefixed} == {10, 11, 12, 13}
    assert len({tuple(prompt[:7]) for prompt in prefixed}) == 1


def test_no_run_profits_from_the_one_before() -> None:
    client = InprocClient(EngineConfig(model="toy:history-hash", max_model_len=500))
    for shared_prefix in (0, 64):
        requests = random_requests(0, 3, 200, (100, 100), (4, 4), shared_prefix)
        hits = []
        for salt in ("one", "two"):
            before = client.core.stats().prefix_hit_tokens
            assert sum(len(delta.token_ids) for deltas in serve(client, requests, f"{salt} {shared_prefix}")
                       for delta in deltas) == requests.output_tokens  # fmt: skip
            hits.append(client.core.stats().prefix_hit_tokens - before)
        assert hits[0] == hits[1] and (hits[0] > 0) == (shared_prefix > 0)
    client.close()


def test_latency(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input-len", "30", "--output-len", "8", "--batch", "2", "--repeat", "3"]
    assert main(["bench", "latency", *TOY, *arguments, "--json"]) == 0
    rows = json_rows(capsys)
    assert [row["run"] for row in rows] == [1, 2, 3, "median"]
    keys = ("ttft_ms", "tpot_ms", "tpot_p99_ms", "output_tokens_per_s", "prefill_tokens_per_s")
    assert all(row[key] > 0 for row in rows for key in keys)
    assert all(row["tpot_ms"] <= row["tpot_p99_ms"] for row in rows)


@pytest.mark.parametrize(("repeat", "lines"), [("1", 1), ("2", 3)])
def test_a_table_has_the_runs_and_their_median(repeat: str, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", *TOY, "--output-len", "2", "--repeat", repeat]) == 0
    out, err = capsys.readouterr()
    assert "bench latency, model toy:history-hash" in out and "TPOT p99, ms" in out
    assert sum(line.startswith("│") for line in out.splitlines()) == lines and ("median" in out) == (lines > 1)
    assert err == ""  # no terminal, no progress


@pytest.mark.slow
def test_startup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", *TOY, "--no-enable-prefix-caching", "--repeat", "1", "--json"]) == 0
    row = json_rows(capsys)[0]
    assert 0 < row["ready_s"] <= row["first_token_s"]
    assert {"find_model_s", "load_tokenizer_s", "load_model_s"} <= row.keys()


@pytest.mark.slow
def test_startup_of_a_server_that_does_not_come_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", *TOY, "--num-blocks", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvern bench: error: max_model_len 500 tokens need") and err.count("\n") == 1


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
