"""Bodies that real clients send, well formed and not, fired at a server on the toy model. Test names carry the rows of
the kit (k01 ...). After each one a plain good request must still be answered."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvern.testing.server import ServerProcess

BOTH = pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
COMPLETIONS, CHAT = "completions", "chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(max_num_seqs=8, num_blocks=1024, max_model_len=2048, check_invariants=True) as process:
        yield process


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(autouse=True)
def the_server_lives_on(http: httpx.Client) -> Iterator[None]:
    yield
    assert post(http, COMPLETIONS).status_code == 200


def body_for(endpoint: str, **fields: Any) -> dict[str, Any]:
    if endpoint == COMPLETIONS:
        return {"prompt": "Hello", "max_tokens": 4, "temperature": 0} | fields
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0} | fields


def post(http: httpx.Client, endpoint: str, **fields: Any) -> httpx.Response:
    return post_raw(http, endpoint, json.dumps(body_for(endpoint, **fields)).encode())


def post_raw(http: httpx.Client, endpoint: str, data: Any, **headers: str) -> httpx.Response:
    return http.post(f"/v1/{endpoint}", content=data, headers={"Content-Type": "application/json"} | headers)


def chat(http: httpx.Client, messages: Any, **fields: Any) -> httpx.Response:
    return post(http, CHAT, messages=messages, **fields)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """K38: the error object, whole and in the one form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    error: dict[str, Any] = body["error"]
    return error


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]


def streamed(http: httpx.Client, endpoint: str, **fields: Any) -> str:
    """The joined text of choice 0 of a stream."""
    response = post(http, endpoint, stream=True, **fields)
    assert response.status_code == 200, response.text
    return "".join(text for text, _ in pieces(response))


def pieces(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for line in response.text.split("\n\n"):
        if line and line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                if choice["index"] == 0:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                    found.append((text, choice))
    return found


@BOTH
def test_k01_every_optional_field_null(http, endpoint):
    fields = dict.fromkeys(
        ["max_completion_tokens", "stop", "n", "seed", "logprobs", "top_logprobs", "logit_bias", "stream", "user",
         "stream_options", "response_format", "tools", "tool_choice", "top_p", "suffix", "best_of", "echo", "priority"]
    )  # fmt: skip
    assert texts(post(http, endpoint, **fields)) == texts(post(http, endpoint))
    nulls = {"max_tokens": None, "temperature": None, "max_completion_tokens": 1}
    assert post(http, endpoint, **fields | nulls).status_code == 200


@BOTH
def test_k02_max_completion_tokens_wins(http, endpoint):
    answer = post(http, endpoint, max_tokens=50, max_completion_tokens=5, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


@BOTH
def test_k03_unknown_fields(http, endpoint):
    fields = {f"x_{i}": {"a": [None, i]} for i in range(10)}
    assert texts(post(http, endpoint, **fields)) == texts(post(http, endpoint))
    message = {"role": "user", "content": "Hello", "id": "m1", "opts": {}, "injected": True}
    assert texts(chat(http, [message])) == texts(post(http, CHAT))


def test_k04_text_parts_in_every_role(http):
    """K04, B101."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    roles = ["system", "user", "assistant", "tool"]
    response = chat(http, [{"role": r, "content": parts, "tool_call_id": "x"} for r in roles])
    joined = chat(http, [{"role": r, "content": "a\nb", "tool_call_id": "x"} for r in roles])
    assert texts(response) == texts(joined)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = error_of(chat(http, [{"role": "user", "content": [parts[0], image]}]), 400)
    assert error["param"] == "messages[0].content" and "image_url" in error["message"]


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
@pytest.mark.parametrize("with_calls", [True, False])
def test_k06_assistant_without_content(http, content, with_calls):
    """K06, B102."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turn = {"role": "assistant", **content} | ({"tool_calls": [call]} if with_calls else {})
    tool = {"role": "tool", "tool_call_id": "c", "content": "2"}
    assert chat(http, [{"role": "user", "content": "a"}, turn, tool]).status_code == 200


def test_k07_messages(http):
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert error_of(chat(http, []), 400)["param"] == "messages"
    assert error_of(chat(http, None), 400)["param"] == "messages"
    assert chat(http, [{"role": "system", "content": "a"}]).status_code == 200
    assert error_of(chat(http, [{"role": "robot", "content": "a"}]), 400)["param"] == "messages[0].role"
    assert error_of(chat(http, [{"role": "user"}]), 400)["param"] == "messages[0].content"
    assert chat(http, [user | {"name": "bo"}]).status_code == 200
    new_turn = texts(chat(http, [user, assistant]))
    continued = texts(chat(http, [user, assistant], continue_final_message=True))
    assert new_turn != continued
    assert continued == texts(post(http, COMPLETIONS, prompt="user: a\nassistant: b"))
    both = chat(http, [user, assistant], continue_final_message=True, add_generation_prompt=True)
    assert error_of(both, 400)["param"] == "continue_final_message"


def test_k08_prompts(http):
    """K08, B106: the toy tokenizer adds no BOS, so "" has no token. One bad prompt of several refuses all."""
    for good, count in ((["a", "b"], 2), ([10, 11, 12], 1), ([[10, 11], [12]], 2), ("a", 1)):
        assert len(texts(post(http, COMPLETIONS, prompt=good))) == count
    for bad in ("", [""], ["a", ""], [], [[]], [[10], []], ["a", 1], [1, "a"], [[1], "a"], None, 5, {"a": 1}):
        assert error_of(post(http, COMPLETIONS, prompt=bad), 400)["param"].startswith("prompt"), bad
    assert "prompt[1]" in error_of(post(http, COMPLETIONS, prompt=["a", ""]), 400)["message"]
    response = post(http, COMPLETIONS, prompt=["a", "b", "c"], n=2)
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(6))
    alone = [texts(post(http, COMPLETIONS, prompt=p))[0] for p in "abc"]
    assert texts(response) == [alone[0], alone[0], alone[1], alone[1], alone[2], alone[2]]
    assert response.json()["usage"]["prompt_tokens"] == 3  # each prompt once


def test_k09_token_ids(http):
    """K09, B066."""
    for bad in ([-1], [259], [269], [10**6 + 259], [1.5], [True], [10**30]):
        assert error_of(post(http, COMPLETIONS, prompt=bad), 400)["param"].startswith("prompt")
    for token in (-1, 259, 10**6):
        assert error_of(post(http, COMPLETIONS, stop_token_ids=[token]), 400)["param"] == "stop_token_ids"


def test_k11_chat_logprobs(http):
    for top in (0, 5, 20):
        choice = post(http, CHAT, logprobs=True, top_logprobs=top).json()["choices"][0]
        assert len(choice["logprobs"]["content"]) == 4
        for entry in choice["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) == top
            assert bytes(entry["bytes"]).decode() == entry["token"]
            if top:  # greedy: exactly the first
                assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]
    assert error_of(post(http, CHAT, logprobs=True, top_logprobs=21), 400)["param"] == "top_logprobs"
    assert error_of(post(http, CHAT, top_logprobs=5), 400)["param"] == "top_logprobs"
    assert post(http, CHAT).json()["choices"][0]["logprobs"] is None


def test_k12_completion_logprobs(http):
    for top in (0, 5):
        choice = post(http, COMPLETIONS, logprobs=top).json()["choices"][0]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert [choice["text"][o:][:1] for o in logprobs["text_offset"]] == logprobs["tokens"]
        assert all(len(entry) == max(top, 1) for entry in logprobs["top_logprobs"])
    for bad in (True, 1000, "5", -1):
        assert error_of(post(http, COMPLETIONS, logprobs=bad), 400)["param"] == "logprobs"


def test_echo_with_logprobs(http):
    """B043, B068, B069 and how scoring tools read it: the prompt's logprobs, the first one null, the same whether
    the prompt is cached or not; a token's logprob is the same float as its entry among the likeliest."""
    ids = [[3 + b for b in b"\n1. Carol has 20 apples and eats one"], [3 + b for b in b"xyz"]]
    fields = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    first = post(http, COMPLETIONS, **fields).json()["choices"]
    for prompt, choice in zip(ids, first, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert "".join(logprobs["tokens"]) == choice["text"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
        for token, value, top in list(zip(*list(logprobs.values())[:3], strict=True))[1:]:
            assert top[token] == value and max(top.values()) >= value
    for _ in range(2):
        again = post(http, COMPLETIONS, **fields).json()["choices"]
        assert again == first
    streamed_choice = post(http, COMPLETIONS, **fields | {"prompt": ids[0]}, stream=True)
    assert "".join(text for text, _ in pieces(streamed_choice)) == first[0]["text"]


def test_echo(http):
    text = texts(post(http, COMPLETIONS))[0]
    assert texts(post(http, COMPLETIONS, echo=True)) == ["Hello" + text]
    assert texts(post(http, COMPLETIONS, echo=True, n=2)) == ["Hello" + text] * 2
    assert texts(post(http, COMPLETIONS, prompt=[3 + b for b in b"Hello"], echo=True)) == ["Hello" + text]
    assert streamed(http, COMPLETIONS, echo=True) == "Hello" + text
    assert error_of(post(http, COMPLETIONS, echo=True, logprobs=1, n=2, stream=True), 400)["param"] == "stream"
    both = post(http, COMPLETIONS, echo=True, logprobs=1, n=2).json()["choices"]
    assert both[0]["logprobs"] == both[1]["logprobs"] and both[0]["text"] == "Hello" + text


def test_b067_no_infinities(http):
    """B067: a cut that leaves one token makes others impossible; what is written is still JSON."""
    for endpoint, fields in ((COMPLETIONS, {"logprobs": 5}), (CHAT, {"logprobs": True, "top_logprobs": 20})):
        response = post(http, endpoint, top_k=1, temperature=1, seed=1, logit_bias={"5": -100}, **fields)
        json.loads(response.text, parse_constant=lambda name: pytest.fail(name))


def test_k13_suffix_and_best_of(http):
    assert error_of(post(http, COMPLETIONS, suffix="x"), 400)["param"] == "suffix"
    assert len(texts(post(http, COMPLETIONS, best_of=3, n=2))) == 2
    assert error_of(post(http, COMPLETIONS, best_of=1, n=2), 400)["param"] == "best_of"
    assert len(texts(post(http, COMPLETIONS, best_of=2, n=2))) == 2


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_k14_n(http, endpoint, stream):
    """K14, B083: refused as plain HTTP errors, also where a stream was asked for."""
    for bad in (0, -1, 1.5, "2", 129, 10_000):
        assert error_of(post(http, endpoint, n=bad, stream=stream), 400)["param"] == "n"
    if endpoint == COMPLETIONS:
        assert error_of(post(http, endpoint, n=128, prompt=["a"] * 100, stream=stream), 400)["param"] == "n"
    for good in (1, 4):
        assert post(http, endpoint, n=good, stream=stream).status_code == 200


def test_b088_more_completions_than_slots(http):
    """B088: n above max_num_seqs is served in waves."""
    response = post(http, COMPLETIONS, n=64, temperature=1, seed=7)
    assert len(texts(response)) == 64 and response.json()["usage"]["prompt_tokens"] == 5


@BOTH
def test_k16_numbers(http, endpoint):
    for fields in ({"temperature": 0}, {"temperature": 1e-9}, {"temperature": 2}, {"top_p": 1}, {"top_k": 0},
                   {"top_k": -1}, {"top_k": 1}, {"repetition_penalty": 1.1}):  # fmt: skip
        assert post(http, endpoint, **fields).status_code == 200
    for fields in ({"temperature": -1}, {"temperature": "0"}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2},
                   {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": 1e9}):  # fmt: skip
        assert error_of(post(http, endpoint, **fields), 400)["param"] == next(iter(fields))
    data = json.dumps(body_for(endpoint)).replace('"temperature": 0', '"temperature": NaN').encode()
    assert error_of(post_raw(http, endpoint, data), 400)["code"] == "invalid_json"


@BOTH
def test_k17_stop(http, endpoint):
    """K17, B071, B073."""
    for bad in ("", [""], ["a", ""]):
        assert error_of(post(http, endpoint, stop=bad), 400)["param"] == "stop"
    whole = texts(post(http, endpoint, max_tokens=40))[0]
    for good in (None, [], ["\x00"] * 5, "\x00" * 10_000):
        assert texts(post(http, endpoint, max_tokens=40, stop=good)) == [whole]
    for start, length in ((0, 1), (5, 3), (17, 12), (35, 5)):  # a token here is one character
        stop = whole[start : start + length]
        response = post(http, endpoint, max_tokens=40, stop=["\x00", stop])
        choice = response.json()["choices"][0]
        assert texts(response) == [whole[: whole.index(stop)]]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert streamed(http, endpoint, max_tokens=40, stop=stop) == whole[: whole.index(stop)]
        included = post(http, endpoint, max_tokens=40, stop=stop, include_stop_str_in_output=True)
        assert texts(included) == [whole[: whole.index(stop)] + stop]


def test_b053_logprobs_end_with_the_text(http):
    whole = texts(post(http, COMPLETIONS, max_tokens=40))[0]
    answer = post(http, COMPLETIONS, max_tokens=40, stop=whole[10:13], logprobs=2).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert answer["usage"]["completion_tokens"] == len(logprobs["tokens"]) == whole.index(whole[10:13]) + 3


@BOTH
def test_k18_stream_options(http, endpoint):
    """K18, B081: usage comes only when asked, in one last chunk whose choices are []."""
    for options in (None, {}, {"include_usage": False}):
        response = post(http, endpoint, stream=True, stream_options=options)
        assert '"usage"' not in response.text
    response = post(http, endpoint, stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = post(http, endpoint, stream=True, stream_options=options, ignore_eos=True)
    counts = [json.loads(line[6:])["usage"]["completion_tokens"] for line in response.text.split("\n\n")[:-2]]
    assert counts == sorted(counts) and counts[-1] == 4
    assert post(http, endpoint, stream_options={"include_usage": True}).status_code == 200


def test_k19_response_format(http):
    for good in (None, {"type": "text"}):
        assert chat(http, [{"role": "user", "content": "a"}], response_format=good).status_code == 200
    schema = {"name": "x", "strict": True, "schema": {}}
    for bad in ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema}, {}, "json", []):
        assert error_of(post(http, CHAT, response_format=bad), 400)["param"] == "response_format"


def test_tools(http):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert error_of(post(http, CHAT, tools=tools), 400)["param"] == "tools"
    assert error_of(post(http, CHAT, tools=tools, tool_choice="auto"), 400)["param"] == "tools"
    for good in ({"tools": []}, {"tools": tools, "tool_choice": "none"}, {"parallel_tool_calls": True}):
        assert post(http, CHAT, **good).status_code == 200


AWKWARD = [
    "👨‍👩‍👧‍👦 family", "🇩🇪🇯🇵 flags", "e\u0301\u0323 combining", "שלום عربي", "nul \x00 byte", "line\u2028sep",
    "\ufeffbom", "\n" * 1000,
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("text", AWKWARD)
def test_k22_awkward_text(http, endpoint, text):
    prompt = {"prompt": text} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    whole = texts(post(http, endpoint, **prompt))[0]
    assert streamed(http, endpoint, **prompt) == whole
    if endpoint == COMPLETIONS:
        assert texts(post(http, endpoint, **prompt, echo=True)) == [text + whole]


@BOTH
def test_k22_what_no_text_can_be(http, endpoint):
    half = json.dumps(body_for(endpoint)).replace("Hello", "\\ud83d")
    assert error_of(post_raw(http, endpoint, half.encode()), 400)["code"] == "invalid_json"
    for long in ("a" * 1_000_000, "\n" * 100_000):
        prompt = {"prompt": long} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}
        error = error_of(post(http, endpoint, **prompt), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if endpoint == COMPLETIONS else "messages")


def test_k23_prompt_that_ends_in_half_a_character(http):
    """K23, B076: nothing of the prompt appears."""
    ids = [3 + b for b in b"Hello world " + "ก".encode()[:2]]
    text = streamed(http, COMPLETIONS, prompt=ids)
    assert "Hello" not in text and "ก" not in text
    assert texts(post(http, COMPLETIONS, prompt=ids)) == [text]


def test_k24_half_a_character_at_the_end(http):
    """K24, B078: half a character is held back until the end, then it is U+FFFD; never before."""
    bias = {str(3 + b): 100 for b in "😀".encode()[:1]}
    for n in (1, 2):
        fields = {"logit_bias": bias, "max_tokens": n, "logprobs": 1}
        assert texts(post(http, COMPLETIONS, **fields)) == ["\ufffd" * n]
        response = post(http, COMPLETIONS, **fields, stream=True)
        assert "".join(text for text, _ in pieces(response)) == "\ufffd" * n
    names = post(http, COMPLETIONS, **fields).json()["choices"][0]["logprobs"]["tokens"]
    assert names == ["bytes:\\xf0"] * 2


@BOTH
def test_k26_bodies(http, endpoint):
    big = json.dumps(body_for(endpoint, padding="x" * (20 << 20))).encode()
    assert error_of(post_raw(http, endpoint, big), 413)["code"] == "request_too_large"
    assert error_of(post_raw(http, endpoint, iter([big[i : i + 65536] for i in range(0, len(big), 65536)])), 413)
    for data in (b"", b"{", b"prompt=a", b'{"prompt": "\xff"}'):
        assert error_of(post_raw(http, endpoint, data), 400)["code"] == "invalid_json"
    assert error_of(post_raw(http, endpoint, b"[]"), 400)
    good = json.dumps(body_for(endpoint)).encode()
    for headers in ({"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}):
        assert error_of(post_raw(http, endpoint, good, **headers), 415)["code"] == "unsupported_media_type"
    assert post_raw(http, endpoint, good, **{"Content-Type": "application/json; charset=utf-8"}).status_code == 200


def test_k26_upload_that_stops_half_way(http, server):
    with connect(server) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"pro\r\n")  # fmt: skip
    assert post(http, COMPLETIONS).status_code == 200


@BOTH
def test_k27_logit_bias(http, endpoint):
    for bad in ({"259": 1}, {"-1": 1}, {"a": 1}, {"5": 101}, {"5": -101}, {"5": "1"}, [1]):
        assert error_of(post(http, endpoint, logit_bias=bad), 400)["param"] == "logit_bias"
    assert texts(post(http, endpoint, logit_bias={str(3 + ord("z")): 100})) == ["zzzz"]


@BOTH
def test_k28_same_request_id_twice(server, endpoint):
    """K28, B107: the client's id is a label: echoed, never used."""

    def one(_: int) -> httpx.Response:
        headers = {"X-Request-Id": "same"}
        return httpx.post(f"{server.url}/v1/{endpoint}", json=body_for(endpoint, max_tokens=50), headers=headers)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(one, range(4)))
    assert [r.status_code for r in responses] == [200] * 4
    assert {r.headers["x-request-id"] for r in responses} == {"same"}
    assert len({r.json()["id"] for r in responses}) == 4


def test_k33_names_and_paths(http, server):
    assert error_of(post(http, CHAT, model="gpt-4"), 404)["code"] == "model_not_found"
    assert post(http, CHAT, model=server.model).status_code == 200
    for path in ("/v1//completions", "/v1/completions//", "/v1/completions/", "/completions"):
        assert http.post(path, json=body_for(COMPLETIONS)).status_code == 200
    assert error_of(http.post("/v1/nothing", json={}), 404)["code"] == "not_found"
    assert error_of(http.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    for path in ("/v1/models", "/models", "/v1/models/"):
        assert [m["id"] for m in http.get(path).json()["data"]] == [server.model]
    assert http.get(f"/v1/models/{server.model}").json()["max_model_len"] == 2048


def test_k34_methods(http):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            response = http.request(method, path)
            assert error_of(response, 405) and response.headers["allow"] == "POST"
        assert http.head(path).status_code == 405
    assert http.head("/health").status_code == 200
    preflight = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    allowed = http.options("/v1/completions", headers=preflight)
    assert allowed.headers["access-control-allow-origin"] == "http://localhost:3000"
    foreign = http.options("/v1/completions", headers=preflight | {"Origin": "http://example.com"})
    assert "access-control-allow-origin" not in foreign.headers


@BOTH
def test_k36_min_tokens(http, endpoint):
    """Stop strings do not end a completion before min_tokens; what they would have cut stays."""
    error = error_of(post(http, endpoint, ignore_eos=True, min_tokens=8, max_tokens=4), 400)
    assert error["param"] == "min_tokens"
    whole = texts(post(http, endpoint, max_tokens=20))[0]
    answer = post(http, endpoint, max_tokens=20, min_tokens=10, stop=whole[2])
    assert answer.json()["usage"]["completion_tokens"] >= 10
    assert texts(answer)[0].startswith(whole[:10])


@BOTH
def test_k37_priority_and_salt(http, endpoint):
    for good in (-5, 0, 5):
        assert post(http, endpoint, priority=good).status_code == 200
    for bad in ("high", 10**12, 1.5):
        assert error_of(post(http, endpoint, priority=bad), 400)["param"] == "priority"
    assert texts(post(http, endpoint, cache_salt="a")) == texts(post(http, endpoint))
    for bad in ("", "x" * 10_000):
        assert error_of(post(http, endpoint, cache_salt=bad), 400)["param"] == "cache_salt"
    assert post(http, endpoint, user="").status_code == 200
    assert error_of(post(http, endpoint, user="x" * 10_000), 400)["param"] == "user"


def test_cache_salt_keeps_apart_what_is_cached(http):
    prompt = "shared prefix, long enough for several blocks: " * 3

    def cached(**fields: Any) -> int:
        usage = post(http, COMPLETIONS, prompt=prompt, **fields).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(cache_salt="s"), cached(cache_salt="s") > 0, cached(cache_salt="t")] == [0, True, 0]
    assert cached(cache_salt="s", n=4) == cached(cache_salt="s") < len(prompt)  # of a prompt, not of its completions


@pytest.mark.parametrize("length", [2046, 2047, 2048, 4000])
def test_b104_the_context_limit(http, length):
    """B104: prompt + output fit in max_model_len (2048): max_tokens is cut to the room that is left."""
    for fields in ({"max_tokens": None}, {"max_tokens": 1}, {"max_tokens": 10_000}):
        response = post(http, COMPLETIONS, prompt=[70] * length, ignore_eos=True, **fields)
        if length >= 2048:
            error = error_of(response, 400)
            assert error["code"] == "context_length_exceeded" and "2047" in error["message"]
        else:
            assert response.json()["usage"]["total_tokens"] == min(2048, length + (fields["max_tokens"] or 16))
            assert response.json()["choices"][0]["finish_reason"] == "length"


def test_tokenize(http):
    answer = http.post("/tokenize", json={"prompt": "Hé"}).json()
    assert answer == {"count": 3, "max_model_len": 2048, "tokens": [75, 198, 172], "token_strs": None}
    assert http.post("/v1/detokenize", json={"tokens": [75, 198, 172]}).json() == {"prompt": "Hé"}
    messages = [{"role": "user", "content": "a"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "user: a\nassistant: "
    no_prompt = {"messages": messages, "add_generation_prompt": False, "return_token_strs": True}
    assert "".join(http.post("/tokenize", json=no_prompt).json()["token_strs"]) == "user: a\n"
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [259]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ):
        assert error_of(http.post(path, json=body), 400)
    assert error_of(http.post("/tokenize", json={"prompt": "a", "model": "x"}), 404)


def test_k21_special_tokens_in_a_users_text(http):
    """The toy tokenizer knows no special token by its text; what a model's own does is visible here."""
    tokens = http.post("/tokenize", json={"prompt": "<eos>"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "<eos>"}
    assert chat(http, [{"role": "user", "content": "<eos><bos>"}]).status_code == 200


def test_return_tokens_as_token_ids(http):
    choice = post(http, COMPLETIONS, logprobs=0, return_tokens_as_token_ids=True).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{3 + ord(c)}" for c in choice["text"]]


def test_chat_template_of_the_request(http):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"
    kwargs = {"chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    assert texts(post(http, CHAT, **kwargs)) == texts(post(http, COMPLETIONS, prompt="[Hello]!"))
    assert error_of(post(http, CHAT, chat_template="{% for %}"), 400)["param"] == "chat_template"


def test_answers_have_what_typed_clients_need(http):
    for endpoint, kind in ((COMPLETIONS, "text_completion"), (CHAT, "chat.completion")):
        answer = post(http, endpoint).json()
        assert answer["object"] == kind and isinstance(answer["created"], int)
        assert {"id", "model", "system_fingerprint", "service_tier", "choices", "usage"} <= set(answer)
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert post(http, CHAT).json()["choices"][0]["message"]["refusal"] is None


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_k39_probes_stay_fast(http, server):
    """K39, B117: while a large body is read and refused and long prompts are tokenized, probes answer at once."""
    slowest = {"/metrics": 0.0, "/health": 0.0, "/v1/models": 0.0}
    stop = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=server.url) as client:
            while not stop.is_set():
                for path in slowest:
                    start = time.monotonic()
                    assert client.get(path).status_code == 200
                    slowest[path] = max(slowest[path], time.monotonic() - start)
                stop.wait(0.05)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        for size in (20 << 20, 15 << 20, 1 << 20):
            assert post(http, COMPLETIONS, prompt="a" * size).status_code in (400, 413)
        post(http, COMPLETIONS, n=64, max_tokens=20)
    finally:
        stop.set()
        thread.join()
    assert max(slowest.values()) < 0.5, slowest
