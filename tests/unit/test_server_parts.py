"""The server's parts on their own: streams, disconnects, logprobs, metrics, errors, failures of the engine."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvern.config import EngineConfig, SchedulerConfig, ServerConfig
from kvern.engine.client import Health
from kvern.engine.input_processor import InputProcessor
from kvern.engine.messages import EngineDeadError, EngineStats
from kvern.engine.output_processor import CompletionDelta
from kvern.outputs import Logprob, RequestMetrics
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.server import transport
from kvern.server.errors import ApiError, as_api_error
from kvern.server.metrics import Metrics
from kvern.server.openai.logprobs import LOWEST, CompletionLogprobs, TokenNames, chat_logprobs
from kvern.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from kvern.server.routes import build_app
from kvern.server.transport import EventStream, until_disconnect
from kvern.testing.toy import TOY_MODEL
from kvern.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


# Streams and disconnects ---------------------------------------------------------------------------------------------


class Socket:
    """The two ends of an ASGI connection: collects what is sent, and tells of a disconnect after `leaves_after`."""

    def __init__(self, leaves_after: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._leaves_after = leaves_after
        self._gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if self._leaves_after is not None and len(self.sent) > self._leaves_after:
            self._gone.set()
        await asyncio.sleep(0)

    async def receive(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def run_stream(events: AsyncGenerator[bytes, None], socket: Socket) -> int:
    """Send the stream; how often `on_end` was called."""
    ends: list[None] = []

    async def run() -> None:
        await EventStream(events, lambda: ends.append(None))({"type": "http"}, socket.receive, socket.send)

    asyncio.run(asyncio.wait_for(run(), 5))
    return len(ends)


def test_stream_ends_with_done():
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    socket = Socket()
    assert run_stream(events(), socket) == 1
    assert socket.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert [message.get("more_body") for message in socket.sent] == [None, True, True, False]
    names = [name for name, _ in socket.sent[0]["headers"]]
    assert b"content-type" in names and b"content-length" not in names


@pytest.mark.parametrize("error", [ApiError(500, "broke"), EngineDeadError("broke"), ValueError("secret")])
def test_error_in_a_stream_is_one_event_and_the_end(error):
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise error

    socket = Socket()
    assert run_stream(events(), socket) == 1
    first, last, rest = socket.body.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"") and b"[DONE]" not in socket.body
    body = json.loads(last.removeprefix(b"data: "))["error"]
    assert ("broke" in body["message"]) == (not isinstance(error, ValueError)) and "secret" not in body["message"]
    assert socket.sent[-1]["more_body"] is False


def test_error_before_the_first_event_is_no_stream():
    async def events() -> AsyncGenerator[bytes, None]:
        raise ApiError(500, "broke")
        yield b""

    socket = Socket()
    with pytest.raises(ApiError):
        run_stream(events(), socket)
    assert socket.sent == []


@pytest.mark.parametrize("leaves_after", [0, 1, 3])
def test_disconnect_closes_the_generator(leaves_after):
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            closed.append(True)

    socket = Socket(leaves_after)
    assert run_stream(events(), socket) == 1
    assert closed == [True] and b"[DONE]" not in socket.body


def test_silence_is_broken_by_comments(monkeypatch):
    monkeypatch.setattr(transport, "SILENCE", 0.02)

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.1)
        yield b"data: 1\n\n"

    socket = Socket()
    assert run_stream(events(), socket) == 1
    *comments, first, done, rest = socket.body.split(b"\n\n")
    assert comments and all(line.startswith(b":") for line in comments)
    assert (first, done, rest) == (b"data: 1", b"data: [DONE]", b"")


def test_until_disconnect():
    async def run() -> None:
        stays, leaves = Socket(), Socket(leaves_after=0)
        assert await until_disconnect(stays.receive, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ValueError, match="broke"):
            await until_disconnect(stays.receive, _fail())
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await leaves.send({})
                await asyncio.sleep(60)
            finally:
                ended.set()

        assert await until_disconnect(leaves.receive, work()) is None
        assert ended.is_set()

    async def _fail() -> None:
        raise ValueError("broke")

    asyncio.run(run())


# Logprobs ------------------------------------------------------------------------------------------------------------


def test_completion_logprobs_over_pieces():
    """Offsets count characters, also where a character is several tokens, in whatever pieces the tokens come."""
    tokens = [ByteTokenizer.BOS, *ids("a€b")]
    positions = [None, *({token: Logprob(-1.0, 1)} for token in tokens[1:])]
    whole = CompletionLogprobs(TOKENIZER, TokenNames(TOKENIZER, False), 1).add(tokens, positions, (ByteTokenizer.BOS,))
    assert whole["tokens"] == ["<bos>", "a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert whole["text_offset"] == [0, 0, 1, 1, 1, 2]
    assert whole["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0, -1.0]
    pieces = CompletionLogprobs(TOKENIZER, TokenNames(TOKENIZER, False), 1)
    offsets = [
        pieces.add([t], [p], (ByteTokenizer.BOS,))["text_offset"][0] for t, p in zip(tokens, positions, strict=True)
    ]
    assert offsets == whole["text_offset"]


def test_top_logprobs():
    """The `top` likeliest; in the legacy shape the token itself too, under its own value."""
    token, first, second = ids("z")[0], ids("a")[0], ids("b")[0]
    position = {token: Logprob(-9.0, 7), first: Logprob(-0.5, 1), second: Logprob(-math.inf, 2)}
    names = TokenNames(TOKENIZER, False)
    legacy = CompletionLogprobs(TOKENIZER, names, 2).add([token], [position])
    assert legacy["top_logprobs"] == [{"z": -9.0, "a": -0.5, "b": LOWEST}]
    (entry,) = chat_logprobs(names, [token], [position], 2)["content"]
    assert [e["token"] for e in entry["top_logprobs"]] == ["a", "b"]
    assert entry["logprob"] == -9.0 and entry["top_logprobs"][1]["logprob"] == LOWEST
    chosen_ties = {token: Logprob(-0.5, 1), first: Logprob(-0.5, 2)}
    assert len(chat_logprobs(names, [token], [chosen_ties], 1)["content"][0]["top_logprobs"]) == 1
    assert TokenNames(TOKENIZER, True).name(token) == f"token_id:{token}"


# Metrics and errors --------------------------------------------------------------------------------------------------


def rendered(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_of_a_completion():
    metrics = Metrics(EngineStats)
    times = RequestMetrics(
        arrival_time=10.0, first_scheduled_time=11.0, first_token_time=12.0, last_token_time=15.0, finished_time=15.5
    )
    times.num_preemptions = 2
    metrics.completion_ended("stop", 4, times)
    metrics.completion_ended("length", 1, RequestMetrics(arrival_time=0.0, first_token_time=1.0, last_token_time=1.0))
    metrics.completion_ended("abort", 7, RequestMetrics())
    metrics.completion_ended("error", 7, RequestMetrics())
    found = rendered(metrics)
    assert found["kvern_request_queue_time_seconds_sum"] == 1.0
    assert found["kvern_time_to_first_token_seconds_sum"] == 2.0 + 1.0
    assert found["kvern_time_per_output_token_seconds_sum"] == 1.0
    assert found["kvern_time_per_output_token_seconds_count"] == 1
    assert found["kvern_e2e_request_latency_seconds_sum"] == 5.5 + 1.0
    assert found["kvern_request_preemptions_sum"] == 2
    assert found["kvern_time_to_first_token_seconds_count"] == found["kvern_e2e_request_latency_seconds_count"] == 2
    assert found['kvern_request_success_total{finish_reason="stop"}'] == 1
    assert found["kvern_requests_aborted_total"] == found["kvern_requests_failed_total"] == 1


def test_metrics_of_the_engine():
    stats = EngineStats(
        num_running=3,
        num_waiting=5,
        waiting_by_reason={"no_free_blocks": 4, "policy": 1},
        num_blocks=8,
        num_free_blocks=6,
        steps=9,
    )
    found = rendered(Metrics(lambda: stats))
    assert found["kvern_num_requests_running"] == 3
    assert found['kvern_num_requests_waiting{reason="no_free_blocks"}'] == 4
    assert sum(v for k, v in found.items() if k.startswith("kvern_num_requests_waiting")) == 5
    assert found["kvern_kv_cache_usage_ratio"] == 0.25
    assert found["kvern_steps_total"] == 9
    assert not any("_created" in name for name in found)


def test_errors():
    assert as_api_error(InvalidRequest("bad", "n", "c")).body() == {
        "error": {"message": "bad", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    dead = as_api_error(EngineDeadError("gone"))
    assert dead.status == 503 and dead.headers == {"Retry-After": "5"}
    bug = as_api_error(KeyError("secret"))
    assert bug.status == 500 and "secret" not in bug.message and bug.body()["error"]["type"] == "server_error"


# Failures of the engine, as an endpoint sees them ---------------------------------------------------------------------


class FakeStream:
    """Gives the deltas of a script; an exception in it is raised."""

    def __init__(self, script: list[Any]) -> None:
        self._script = list(script)
        self.closed = 0

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> CompletionDelta:
        await asyncio.sleep(0)
        if not self._script:
            raise StopAsyncIteration
        item = self._script.pop(0)
        if isinstance(item, Exception):
            raise item
        delta: CompletionDelta = item
        return delta

    def close(self) -> None:
        self.closed += 1


class FakeClient:
    """As much of AsyncClient as the server uses; each call of `generate` takes the next of `scripts`."""

    def __init__(self, *scripts: Any) -> None:
        self.scripts = list(scripts)
        self.streams: list[FakeStream] = []
        self.engine_config = EngineConfig()
        self.model_name = "fake"
        self.stats = EngineStats()
        self.tokenizer = TOKENIZER
        self.limits = SchedulerConfig(num_blocks=100)
        self.input_processor = InputProcessor(TOKENIZER, TOY_MODEL, self.limits)
        self.ok = Health(True, "")

    def health(self) -> Health:
        return self.ok

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def generate(self, prompt: Any, sampling: SamplingParams, **_: Any) -> FakeStream:
        script = self.scripts.pop(0)
        if isinstance(script, Exception):
            raise script
        self.streams.append(FakeStream(script))
        return self.streams[-1]


def delta(text: str, finish_reason: str | None = None, error: str | None = None, index: int = 0) -> CompletionDelta:
    return CompletionDelta(
        "r", index, RequestMetrics(), text=text, token_ids=ids(text), finish_reason=finish_reason, error=error
    )


def call(client: FakeClient, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    app = build_app(client, ServerConfig())  # type: ignore[arg-type]

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            response = await http.post(path, json={"prompt": "a"} | fields)
            response.extensions["metrics"] = (await http.get("/metrics")).text
            return response

    return asyncio.run(post())


def counted(response: httpx.Response, name: str) -> float:
    text: str = response.extensions["metrics"]
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure, status, code, counter",
    [
        (delta("", "error", "the logits are not numbers"), 500, "generation_failed", "kvern_requests_failed_total"),
        (delta("", "abort"), 503, "shutting_down", "kvern_requests_aborted_total"),
        (EngineDeadError("gone"), 503, "engine_dead", "kvern_requests_failed_total"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_generation_that_fails(stream, failure, status, code, counter, begun):
    """A plain HTTP error while nothing has been sent, else one error event; counted once either way."""
    client = FakeClient([*([delta("x")] if begun else []), failure])
    response = call(client, stream=stream)
    if begun and stream:
        assert response.status_code == 200 and "[DONE]" not in response.text
        error = json.loads(response.text.split("\n\n")[1].removeprefix("data: "))["error"]
    else:
        assert response.status_code == status
        error = response.json()["error"]
    assert error["code"] == code
    assert counted(response, counter) == 1
    assert counted(response, "kvern_requests_aborted_total") + counted(response, "kvern_requests_failed_total") == 1
    assert client.streams[0].closed


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_of_several_ends_the_call(stream):
    client = FakeClient([delta("x"), delta("y", "stop")], [delta("", "error", "broke")], [delta("z")] * 3)
    response = call(client, prompt=["a", "b", "c"], stream=stream)
    assert "broke" in response.text and "[DONE]" not in response.text
    assert all(opened.closed for opened in client.streams)
    ended = [counted(response, f"kvern_request{name}_total") for name in ("_success", "s_aborted", "s_failed")]
    assert sum(ended) == 3 and ended[2] == 1


def test_a_prompt_that_is_not_admitted_takes_the_others_back():
    client = FakeClient([delta("x", "stop")], EngineDeadError("gone"))
    response = call(client, prompt=["a", "b"])
    assert response.status_code == 503 and client.streams[0].closed
    assert counted(response, "kvern_requests_rejected_total") == 1
    assert counted(response, "kvern_requests_aborted_total") == 1


def test_engine_that_is_not_healthy():
    client = FakeClient()
    client.ok = Health(False, "it has made no step for 61 s")
    response = call(client)
    assert response.status_code == 503 and "no step" in response.json()["error"]["message"]
    assert response.headers["retry-after"]


def test_bug_in_a_handler_is_a_500_in_the_one_form():
    client = FakeClient(RuntimeError("secret"))
    response = call(client)
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"


def test_deltas_that_say_nothing_make_no_chunk():
    """Text that is held back: no empty chunks on the wire, but the last one is there even if empty."""
    client = FakeClient([delta(""), delta("x"), delta(""), delta("", "stop")])
    chunks = call(client, stream=True).text.split("\n\n")
    assert [json.loads(c[6:])["choices"][0]["text"] for c in chunks[:-2]] == ["x", ""]
    client = FakeClient([delta(""), delta("x"), delta(""), delta("", "stop")])
    messages = [{"role": "user", "content": "a"}]
    chunks = call(client, "/v1/chat/completions", messages=messages, stream=True).text.split("\n\n")
    deltas = [json.loads(c[6:])["choices"][0]["delta"] for c in chunks[:-2]]
    assert deltas == [{"role": "assistant", "content": "", "refusal": None}, {"content": "x"}, {}]


# The documents -------------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_every_field_is_documented(request_type):
    text = (DOCS / "http-api.md").read_text()
    assert [name for name in request_type.__struct_fields__ if f"`{name}`" not in text] == []


def test_every_metric_is_documented_and_there():
    """docs/metrics.md names exactly the metrics there are."""
    metrics = Metrics(EngineStats)
    metrics.rejected.labels("400")
    names = {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in rendered(metrics)}
    documented = set(re.findall(r"^\| `(kvern_\w+)", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    assert documented == names
