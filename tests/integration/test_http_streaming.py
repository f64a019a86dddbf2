"""Streams over real sockets: their form, clients that go away in every phase, slow readers, many at once."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvern.testing.server import ServerProcess

BOTH = pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
HTTP = httpx.Client(timeout=60)
USAGE = {"include_usage": True}
LONG = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(max_num_seqs=8, num_blocks=2100, max_model_len=4096) as process:
        yield process


@pytest.fixture(autouse=True)
def all_is_given_back(server: ServerProcess) -> Iterator[None]:
    yield
    assert server.wait_idle()


def body_for(endpoint: str, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    if endpoint == "completions":
        return {"prompt": text} | fields
    return {"messages": [{"role": "user", "content": text}]} | fields


def events(server: ServerProcess, endpoint: str, **fields: Any) -> list[str]:
    """The events of a stream, after a check of its frame: each one `data: ` line and an empty line."""
    response = HTTP.post(f"{server.url}/v1/{endpoint}", json=body_for(endpoint, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    lines = response.text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[len("data: ") :] for line in lines]


def connect(server: ServerProcess, endpoint: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which the request has been sent and nothing been read."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST /v1/{endpoint} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + data)
    return sock


def wait_for(condition: Any, timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@BOTH
@pytest.mark.parametrize("n", [1, 3])
def test_form(server, endpoint, n):
    """B082, B086: one finish_reason per choice, at its end; the role first and once; [DONE] last and once; the text is
    that of the plain answer."""
    fields = {"n": n, "temperature": 1, "seed": 3, "max_tokens": 30}
    *chunks, done = events(server, endpoint, **fields)
    assert done == "[DONE]"
    texts, reasons, roles, ids = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)], set()
    for chunk in map(json.loads, chunks):
        assert not chunk.get("error") and "usage" not in chunk
        ids.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert not reasons[index], "nothing comes after a finish_reason"
        if endpoint == "completions":
            texts[index] += choice["text"]
        else:
            if "role" in choice["delta"]:
                assert texts[index] == "" and choice["delta"]["content"] == ""
                roles[index].append(choice["delta"]["role"])
            texts[index] += choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            reasons[index].append(choice["finish_reason"])
    assert len(ids) == 1
    assert all(len(found) == 1 for found in reasons)
    if endpoint != "completions":
        assert roles == [["assistant"]] * n
    plain = HTTP.post(f"{server.url}/v1/{endpoint}", json=body_for(endpoint, **fields)).json()["choices"]
    assert texts == [choice.get("text", choice.get("message", {}).get("content")) for choice in plain]
    assert [found[0] for found in reasons] == [choice["finish_reason"] for choice in plain]


@BOTH
def test_logprobs_of_chunks_make_the_whole(server, endpoint):
    asked = {"logprobs": 2} if endpoint == "completions" else {"logprobs": True, "top_logprobs": 2}
    fields = {"temperature": 1, "seed": 5, "max_tokens": 20, "ignore_eos": True, **asked}
    parts = [json.loads(e)["choices"][0]["logprobs"] for e in events(server, endpoint, **fields)[:-1]]
    plain = HTTP.post(f"{server.url}/v1/{endpoint}", json=body_for(endpoint, **fields)).json()
    whole = plain["choices"][0]["logprobs"]
    for key in whole:
        if whole[key] is not None:
            assert [value for part in parts if part for value in part[key]] == whole[key]
    assert len(whole["tokens" if endpoint == "completions" else "content"]) == 20


@BOTH
def test_every_stream_ends(server, endpoint):
    """B082, B087: with random lengths and stops, each stream ends once and in order."""

    def one(i: int) -> str:
        chunks = events(server, endpoint, seed=i, max_tokens=1 + i % 17, stop=[chr(65 + i % 26)])
        reasons = [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
        assert chunks[-1] == "[DONE]" and reasons[-1] in ("stop", "length") and set(reasons[:-1]) <= {None}
        return reasons[-1]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert set(pool.map(one, range(60))) == {"stop", "length"}


@BOTH
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode", "n", "queued"])
def test_k29_disconnect(server, endpoint, stream, phase):
    """K29, B109: in whatever phase the client goes, all it held is free at once (checked by the fixture too)."""
    running = lambda count: lambda: server.metrics()["kvern_num_requests_running"] >= count  # noqa: E731
    others = []
    if phase == "queued":  # all slots taken
        others = [connect(server, endpoint, body_for(endpoint, stream=True, **LONG)) for _ in range(8)]
        wait_for(running(8))
    text = "x" * 1000 if phase == "prefill" else "Hello"
    n = 4 if phase == "n" else 1
    before = server.metrics()["kvern_requests_aborted_total"]
    sock = connect(server, endpoint, body_for(endpoint, text, stream=stream, n=n, **LONG))
    if phase == "queued":
        wait_for(lambda: sum(v for k, v in server.metrics().items() if "requests_waiting" in k) > 0)
    elif phase != "prefill":
        wait_for(running(n))
        if stream:
            assert b"data: " in sock.recv(4096) + sock.recv(4096)
    for client in [sock, *others]:
        client.close()
    assert server.wait_idle()
    wait_for(lambda: server.metrics()["kvern_requests_aborted_total"] == before + n + len(others))


def test_b112_mass_disconnect(server):
    """B112: fifty clients vanish at different stages; ten fresh ones are served."""
    for delay in (0.0, 0.02, 0.2):
        socks = [connect(server, "chat/completions", body_for("chat/completions", stream=i % 2 == 0, **LONG))
                 for i in range(50)]  # fmt: skip
        time.sleep(delay)
        for sock in socks:
            sock.close()
        assert server.wait_idle()
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        got = list(pool.map(lambda i: events(server, "completions", seed=i, max_tokens=5)[-1], range(10)))
    assert got == ["[DONE]"] * 10


def test_b111_abort_and_resend(server):
    """B111: the same conversation, left and sent again at once, gives its own text each time."""
    body = body_for("chat/completions", "tell me", temperature=0, max_tokens=40)
    want = HTTP.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    for _ in range(20):
        connect(server, "chat/completions", body | {"stream": True, **LONG}).close()
        answer = HTTP.post(f"{server.url}/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == want


def test_many_at_once_answer_as_alone(server):
    """B044: 64 streams on 8 slots: each the text it has alone."""

    def one(i: int) -> str:
        chunks = events(server, "completions", text=f"number {i % 8}", temperature=0, max_tokens=30)
        return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1])

    alone = [one(i) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert list(pool.map(one, range(64))) == alone * 8


@pytest.mark.slow
def test_b044_preempted_streams_read_as_alone():
    """B044, B049: a cache for three of eight, and preemption at random besides, show in no text and in no count."""
    with ServerProcess(
        num_blocks=31, max_num_seqs=8, max_model_len=400, preempt_probability=0.2, check_invariants=True
    ) as tight:

        def one(i: int) -> tuple[str, int]:
            fields = {"text": f"{i % 4} " * 20, "temperature": 0, "max_tokens": 100, "stream_options": USAGE}
            *chunks, usage, _ = events(tight, "completions", **fields)
            text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
            return text, json.loads(usage)["usage"]["completion_tokens"]

        alone = [one(i) for i in range(4)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert list(pool.map(one, range(16))) == alone * 4
        metrics = tight.metrics()
        assert metrics["kvern_request_preemptions_sum"] == metrics["kvern_preemptions_total"] > 0
        assert tight.wait_idle()


@pytest.mark.slow
def test_k31_slow_reader(server):
    """K31: a client that reads almost nothing neither slows others nor is waited for: its request goes on."""
    slow = connect(server, "completions", body_for("completions", stream=True, logprobs=20, **LONG))
    slow.recv(1)
    start = time.monotonic()
    assert events(server, "completions", max_tokens=50)[-1] == "[DONE]"
    assert time.monotonic() - start < 5
    wait_for(lambda: server.metrics()["kvern_num_requests_running"] == 0, timeout=60)
    with slow:
        data = b""
        while b"data: [DONE]" not in data[-100:]:
            data += slow.recv(1 << 20)
    assert data.count(b"data: ") > 10


def test_metrics_count_each_once(server):
    """B124: ok + aborted + rejected add up, and only what ended well is in the histograms."""

    def now() -> dict[str, float]:
        metrics = server.metrics()
        names = ["kvern_requests_aborted_total", "kvern_request_success_total{finish_reason=\"length\"}",
                 "kvern_time_to_first_token_seconds_count", "kvern_e2e_request_latency_seconds_count",
                 "kvern_request_queue_time_seconds_count", "kvern_request_preemptions_count",
                 "kvern_requests_rejected_total{status=\"400\"}", "kvern_generation_tokens_total",
                 "kvern_prompt_tokens_total"]  # fmt: skip
        return {name.partition("{")[0][6:]: metrics.get(name, 0.0) for name in names}

    before = now()
    for i in range(3):
        events(server, "completions", seed=i, max_tokens=4, ignore_eos=True)
        assert HTTP.post(f"{server.url}/v1/completions", json={"prompt": "a", "n": 0}).status_code == 400
    HTTP.post(f"{server.url}/v1/completions", json={"prompt": ["a", "bb"], "n": 3, "max_tokens": 1, "ignore_eos": True})
    for _ in range(2):
        sock = connect(server, "completions", body_for("completions", stream=True, **LONG))
        sock.recv(4096)
        sock.close()
    assert server.wait_idle()
    wait_for(lambda: now()["requests_aborted_total"] == before["requests_aborted_total"] + 2)
    grown = {name: value - before[name] for name, value in now().items()}
    tokens = grown.pop("generation_tokens_total")
    assert grown == {
        "requests_aborted_total": 2, "request_success_total": 9, "time_to_first_token_seconds_count": 9,
        "e2e_request_latency_seconds_count": 9, "request_queue_time_seconds_count": 9,
        "request_preemptions_count": 9, "requests_rejected_total": 3, "prompt_tokens_total": 15 + 3 + 10,
    }  # fmt: skip
    assert 12 + 6 <= tokens < 12 + 6 + 2 * 3000
