"""Another policy while requests run, and why requests wait: in the engine, and over HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import httpx
import pytest

from kvern import LLM, SamplingParams
from kvern.clock import VirtualClock
from kvern.config import InvalidConfig, SchedulerConfig
from kvern.engine.core import EngineCore
from kvern.engine.messages import AddRequest
from kvern.sampling_params import InvalidRequest
from kvern.scheduler.policies import Policy
from kvern.scheduler.scheduler import Scheduler
from kvern.testing import SchedulerHarness
from kvern.testing.server import ServerProcess
from kvern.testing.toy import HistoryHashExecutor, reference_tokens


class Broken(Policy):
    """Raises in `rank`, in two ways."""

    name = "broken"
    dynamic = True

    def rank(self, request: Any, now: float) -> Any:
        if now < 2.0:
            raise ZeroDivisionError("no rank")
        return float("nan")


class Unmakeable(Policy):
    name = "unmakeable"

    def __init__(self) -> None:
        raise KeyError("nothing")


def make_core(**limits: Any) -> EngineCore:
    config = SchedulerConfig(**{"num_blocks": 64, "block_size": 4, "max_model_len": 256, **limits})
    return EngineCore(HistoryHashExecutor(config), Scheduler(config), VirtualClock(), check_invariants=True)


def add(core: EngineCore, name: str, length: int = 8, max_tokens: int = 6, **options: Any) -> list[int]:
    """Returns what will be delivered."""
    prompt = [3 + (len(name) * 7 + ord(name[0]) + i) % 200 for i in range(length)]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.add(AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0, **options))
    return reference_tokens(prompt, max_tokens)


def drain(core: EngineCore) -> tuple[list[str], dict[str, list[int]]]:
    """The order of first tokens, and all tokens."""
    order: list[str] = []
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        report = core.step()
        for name, new in zip(report.request_ids, report.token_ids, strict=True):
            if name not in tokens:
                order.append(name)
            tokens.setdefault(name, []).extend(new)
    return order, tokens


def test_another_policy_touches_no_running_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    core = make_core(max_num_seqs=1)
    expected = {"first": add(core, "first", priority=0)}
    core.step()
    expected |= {name: add(core, name, priority=p) for name, p in (("late", 3), ("urgent", 1))}
    said = core.admin.set_policy("fair", {"weights": {"x": 2.0}})
    assert (said["policy"], said["options"], said["changes"]) == ("fair", {"weights": {"x": 2.0}}, 1)
    core.admin.set_policy("shortest")
    assert core.scheduler.num_running == 1
    core.admin.set_policy("priority")
    order, tokens = drain(core)
    assert order == ["first", "urgent", "late"]
    assert tokens == {name: ids if name != "first" else ids[1:] for name, ids in expected.items()}
    assert core.stats().policy_changes == 3
    assert "policy: fair {'weights': {'x': 2.0}}, was fcfs {}" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nonsense", {}, "policy must be one of fcfs"),
        ("no.module:Class", {}, "cannot load no.module:Class"),
        ("json:JSONDecoder", {}, "not a subclass"),
        ("fair", {"weight": {}}, "policy_options of fair"),
        ("fair", {"weights": {"a": 0}}, "weights must be above 0"),
        (f"{__name__}:Unmakeable", {}, "KeyError"),
    ],
)
def test_an_impossible_policy_changes_nothing(name: str, options: dict[str, Any], says: str) -> None:
    core = make_core()
    with pytest.raises(InvalidConfig, match=says):
        core.admin.set_policy(name, options)
    assert core.admin.policy()["policy"] == "fcfs"
    assert core.stats().policy_changes == 0


def test_failures_of_a_policy_are_logged_once_per_kind_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(policy=f"{__name__}:Broken", max_num_seqs=1)
    assert isinstance(core.clock, VirtualClock)
    expected = {name: add(core, name, 4, 3) for name in ("a", "b", "c", "d")}
    with caplog.at_level(logging.ERROR):
        for _ in range(8):
            core.step()
            core.clock.advance(0.5)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "rank: ZeroDivisionError: no rank" in told[0]
    assert "rank: TypeError" in told[1]
    said = core.admin.policy()
    assert set(said["failures"]) == {"rank: ZeroDivisionError", "rank: TypeError"}
    assert sum(said["failures"].values()) == said["errors"] == core.stats().policy_errors > 2
    core.admin.set_policy("fcfs")
    drain(core)
    assert core.stats().policy_errors >= said["errors"], "a total does not go back"
    assert set(expected) == {"a", "b", "c", "d"}


def test_why_a_request_waits_in_numbers() -> None:
    h = SchedulerHarness(num_blocks=9, block_size=4, max_num_seqs=4, max_bypass=2, policy="fcfs")
    h.add(20, max_tokens=8, request_id="runs")
    h.step()  # holds 5 blocks, and takes a sixth in the next step
    h.add(24, request_id="large")  # needs 6 of the 3 that are free
    h.add(4, max_tokens=1, request_id="small")
    h.step()
    why = h.request("large").explanation
    assert why is not None
    assert (why.reason.value, why.rank, why.blocks_short, why.overtaken_by) == ("no_free_blocks", 0, 4, 1)
    assert str(why) == "no_free_blocks, next in line, short of 4 blocks, overtaken by 1"
    assert h.request("runs").explanation is None
    h.run()
    assert h.request("large").explanation is None


def test_where_a_tenant_stands() -> None:
    h = SchedulerHarness(num_blocks=64, block_size=4, max_num_seqs=1, policy="fair", policy_options={"output_cost": 1})
    h.add(8, max_tokens=3, tenant="a", request_id="a0")
    h.add(8, max_tokens=3, tenant="a", request_id="a1")
    h.add(8, max_tokens=3, tenant="b", request_id="b0")
    h.step()
    why = {name: h.request(name).explanation for name in ("a1", "b0")}
    assert why["a1"] is not None and why["b0"] is not None
    assert why["a1"].policy == {"counter": 8.0, "lowest_counter": 0.0, "ahead_by": 8.0}
    assert why["b0"].policy == {"counter": 0.0, "lowest_counter": 0.0, "ahead_by": 0.0}
    while not h.request("b0").output_token_ids:
        h.step()
    assert not h.request("a1").output_token_ids


def test_a_fork_waits_for_its_sibling() -> None:
    h = SchedulerHarness(num_blocks=64, block_size=4, max_num_batched_tokens=8)
    prompt = list(range(3, 23))
    h.add(prompt, request_id="first")
    h.add(prompt, request_id="second", fork_of="first")
    h.step()
    why = h.request("second").explanation
    assert why is not None and (why.waits_for, why.reason.value) == ("first", "token_budget")


def test_at_level_debug_the_log_says_why_requests_wait(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(max_num_seqs=1)
    with caplog.at_level(logging.DEBUG, "kvern.engine.admin"):
        add(core, "a", max_tokens=4)
        add(core, "b", max_tokens=1)
        add(core, "c", max_tokens=1)
        drain(core)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "request b waits: max_num_seqs, next in line",
        "request c waits: max_num_seqs, 1 before it",
    ], "once, as long as the reason is the same"


def test_llm_set_policy() -> None:
    with LLM("toy:history-hash", max_model_len=200, num_blocks=50, max_num_seqs=1) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        llm.set_policy("fair", weights={"a": 3.0})
        with pytest.raises(InvalidConfig, match="shed_all"):
            llm.set_policy("deadline", shed_all=True)
        outputs = llm.generate(["one", "two", "three"], sampling, tenant=["a", "a", "b"])
        times = [output.metrics.first_scheduled_time or 0.0 for output in outputs]
        assert times[0] < times[2] < times[1], "the other tenant's request goes before a's second"


def test_llm_pins_a_prefix(caplog: pytest.LogCaptureFixture) -> None:
    prefix = "You are a helpful assistant. "
    with LLM("toy:history-hash", max_model_len=400, num_blocks=26, block_size=16, max_num_seqs=1) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        pin = llm.pin_prefix(prefix, ttl=1000.0)
        llm.generate(prefix + "Hello", sampling)
        llm.generate("x" * 300, sampling)
        cached = llm.generate(prefix + "Goodbye", sampling)[0].metrics.num_cached_tokens
        assert cached == len(prefix) // 16 * 16
        core = llm._client.core
        assert core.stats().num_pinned_blocks == 1 and core.admin.pins()["pins"][0]["id"] == pin
        with caplog.at_level(logging.WARNING, "kvern.engine.admin"):
            llm.generate("x" * 396, sampling)
        assert core.admin.pins()["given_up"] == 1 and "was given up" in caplog.text
        assert not llm.unpin_prefix(pin)
        assert llm.unpin_prefix(llm.pin_prefix([5] * 16, ttl=0.5))
        with pytest.raises(InvalidRequest, match="max_pinned_blocks is 6"):
            llm.pin_prefix("x" * 300, ttl=1.0)
        with pytest.raises(InvalidRequest, match="ttl"):
            llm.pin_prefix(prefix, ttl=-1.0)


# ---- over HTTP


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(max_num_seqs=1, num_blocks=1024, max_model_len=8000, api_key="sesame") as process:
        yield process


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, headers={"Authorization": "Bearer sesame"}) as client:
        yield client


def test_the_policy_over_http(http: httpx.Client, server: ServerProcess) -> None:
    assert http.get("/admin/policy").json()["policy"] == "fcfs"
    answer = http.post("/admin/policy", json={"policy": "fair", "options": {"weights": {"a": 2}}})
    assert (answer.status_code, answer.json()["policy"], answer.json()["changes"]) == (200, "fair", 1)
    assert http.get("/admin/policy").json() == answer.json()
    for body, param in (
        ({"policy": "nope"}, "policy"),
        ({"policy": "fair", "options": {"weights": {"a": -1}}}, "options"),
        ({"policy": "fair", "options": []}, "options"),
        ({"policy": 3}, "policy"),
    ):
        refused = http.post("/admin/policy", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert http.post("/admin/policy", content=b'{"policy": "fcfs"}').status_code == 415
    assert http.get("/admin/policy").json()["policy"] == "fair"
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert server.metrics()["kvern_policy_changes_total"] == 1
    assert httpx.get(server.url + "/admin/policy").status_code == 401
    assert httpx.get(server.url + "/admin/requests", headers={"Authorization": "Bearer no"}).status_code == 401


def test_pins_over_http(http: httpx.Client, server: ServerProcess) -> None:
    prefix = [5 + i for i in range(40)]
    pinned = http.post("/admin/pins", json={"prompt": prefix, "ttl": 500})
    assert pinned.status_code == 200
    pin = pinned.json()
    assert (pin["num_tokens"], pin["num_blocks"], pin["num_cached_blocks"]) == (32, 2, 0)
    assert 499 < pin["expires_in"] <= 500
    http.post("/v1/completions", json={"prompt": [*prefix, 9], "max_tokens": 2})
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    said = http.get("/admin/pins").json()
    assert [(p["id"], p["num_cached_blocks"]) for p in said["pins"]] == [(pin["id"], 2)]
    assert (said["num_pinned_blocks"], said["max_pinned_blocks"], said["given_up"]) == (2, 255, 0)
    assert server.metrics()["kvern_pinned_blocks"] == 2
    for body, param, says in (
        ({"prompt": prefix, "ttl": 0}, "ttl", "above 0"),
        ({"prompt": prefix, "ttl": "long"}, "ttl", ""),
        ({"prompt": prefix}, "ttl", ""),
        ({"ttl": 5}, "prompt", ""),
        ({"prompt": [5] * 7000, "ttl": 5}, "prompt", "max_pinned_blocks is 255"),
        ({"prompt": [5], "ttl": 5}, "prompt", "full blocks"),
        ({"prompt": [-1] * 20, "ttl": 5}, "prompt", "token ids"),
        ({"prompt": "", "ttl": 5}, "prompt", "at least one token"),
        ({"prompt": prefix, "ttl": 5, "cache_salt": 3}, "cache_salt", ""),
        ({"prompt": prefix, "ttl": 5, "cache_salt": "s" * 2000}, "cache_salt", "1024"),
    ):
        refused = http.post("/admin/pins", json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param) and says in error["message"], refused.text
    assert http.post("/admin/pins", content=b"{}").status_code == 415
    assert http.delete("/admin/pins/" + pin["id"]).json() == {"id": pin["id"], "unpinned": True}
    gone = http.delete("/admin/pins/" + pin["id"])
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
    assert http.get("/admin/pins").json()["pins"] == []


def test_tenants_and_targets_reach_the_scheduler(http: httpx.Client) -> None:
    assert http.post("/admin/policy", json={"policy": "deadline"}).status_code == 200
    body = {"prompt": "Hello", "max_tokens": 7000, "ignore_eos": True, "temperature": 0, "stream": True}
    calls: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"user": "u", "ttft_target": 5.0}, {"X-Tenant": "h"}),
        ({"ttft_target": 3000.0, "tpot_target": 0.5}, {"X-Tenant": "h"}),
        ({}, {}),
    ]
    with http.stream("POST", "/v1/completions", json=body | calls[0][0], headers=calls[0][1]) as first:
        lines = first.iter_lines()
        next(lines)
        with ThreadPoolExecutor(2) as pool:
            short = body | {"max_tokens": 1, "stream": False}
            others = [
                pool.submit(http.post, "/v1/completions", json=short | more, headers=headers)
                for more, headers in calls[1:]
            ]
            found: list[dict[str, Any]] = []
            deadline = time.monotonic() + 5
            looked_at = 0  # until a step has tried to admit them, it is only their turn that has not come
            while looked_at < 2 and time.monotonic() < deadline:
                found = http.get("/admin/requests").json()["requests"]
                looked_at = sum(request["blocked_by"] == "max_num_seqs" for request in found)
            first.close()
            assert [other.result().status_code for other in others] == [200, 200]
    by_tenant = {request["tenant"]: request for request in found}
    assert set(by_tenant) == {"u", "h", "key-" + sha256(b"sesame").hexdigest()[:16]}
    assert by_tenant["u"]["status"] == "running" and by_tenant["u"]["explanation"] is None
    late = by_tenant["h"]
    assert (late["blocked_by"], late["explanation"]["rank"]) == ("max_num_seqs", 1)
    assert 2000 < late["explanation"]["policy"]["slack"] < 3000
    refused = http.post("/v1/completions", json={"prompt": "x", "ttft_target": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ttft_target")
    assert http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Tenant": "t" * 2000}).status_code == 400


def test_without_a_key_only_on_a_loopback_address() -> None:
    with ServerProcess(host="0.0.0.0", num_blocks=64, max_model_len=100) as process:
        url = process.url.replace("localhost", "127.0.0.1")
        for method, path in (
            ("GET", "/admin/policy"),
            ("POST", "/admin/policy"),
            ("GET", "/admin/requests"),
            ("GET", "/admin/pins"),
            ("DELETE", "/admin/pins/pin-0"),
        ):
            refused = httpx.request(method, url + path, json={"policy": "fair"} if method == "POST" else None)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_not_allowed")
