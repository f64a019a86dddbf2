"""The official OpenAI client against a running server: answers parse into its types, errors raise its classes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest

from kvern.testing.server import ServerProcess

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(max_num_seqs=16, num_blocks=1024, max_model_len=4096) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_models(server, client):
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).owned_by == "kvern"


def test_completion(server, client):
    answer = client.completions.create(model=server.model, prompt="Hello", max_tokens=8, temperature=0)
    stream = client.completions.create(
        model=server.model, prompt="Hello", max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == answer.choices[0].text
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == answer.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert answer.usage.completion_tokens == 8 and answer.usage.total_tokens == 13


def test_chat(server, client):
    answer = client.chat.completions.create(model=server.model, messages=HELLO, max_tokens=8, temperature=0)
    message = answer.choices[0].message
    assert (message.role, message.refusal, message.tool_calls) == ("assistant", None, None)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    # The client's own accumulator is content only with an answer that stopped.
    with client.chat.completions.stream(
        model=server.model, messages=HELLO, max_tokens=8, temperature=0, stop=message.content[5],
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        final = stream.get_final_completion()
    assert final.choices[0].message.content == message.content.partition(message.content[5])[0]
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.prompt_tokens == answer.usage.prompt_tokens


def test_n_and_seed(server, client):
    fields = {"model": server.model, "messages": HELLO, "n": 3, "seed": 11, "max_tokens": 12}
    answer = client.chat.completions.create(**fields)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    again = client.chat.completions.create(**fields)
    assert [choice.message.content for choice in again.choices] == texts
    pieces = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == texts
    alone = client.chat.completions.create(**fields | {"n": 1})
    assert alone.choices[0].message.content == texts[0]


def test_logprobs(server, client):
    answer = client.chat.completions.create(
        model=server.model, messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=5, temperature=0
    )
    for entry in answer.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
    legacy = client.completions.create(model=server.model, prompt="Hello", logprobs=3, max_tokens=5, temperature=0)
    logprobs = legacy.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5


def test_stop(server, client):
    fields = {"model": server.model, "prompt": "Hello", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**fields).choices[0].text
    stopped = client.completions.create(**fields, stop=[whole[9:12]]).choices[0]
    assert stopped.text == whole[: whole.index(whole[9:12])] and stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"n": 0}, openai.BadRequestError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, openai.BadRequestError),
        ({"model": "gpt-4"}, openai.NotFoundError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_k38_errors_raise_the_right_class(server, client, fields, error, stream):
    with pytest.raises(error) as info:
        client.chat.completions.create(**{"model": server.model, "messages": HELLO, "stream": stream} | fields)
    assert info.value.body["message"] and info.value.type == info.value.body["type"]
    param = next(iter(fields))
    assert info.value.param == param
    if param == "messages":
        assert info.value.code == "context_length_exceeded"


def test_closing_a_stream_gives_everything_back(server, client):
    stream = client.chat.completions.create(
        model=server.model, messages=HELLO, stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(iter(stream))
    assert server.busy()
    stream.close()
    assert server.wait_idle()


def test_what_a_client_times_out_on_is_ended(server, client):
    """The client gives up, and would try again: the first try must not go on beside the second."""
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model=server.model, prompt="Hello", max_tokens=3000, extra_body={"ignore_eos": True}
        )
    assert server.wait_idle()


def test_64_at_once(server):
    async def all_of_them() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> tuple[str, str]:
                fields = {"model": server.model, "messages": HELLO, "seed": i, "max_tokens": 20}
                stream = await client.chat.completions.create(**fields, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                plain = await client.chat.completions.create(**fields)
                return text, plain.choices[0].message.content

            return await asyncio.gather(*map(one, range(64)))

    pairs = asyncio.run(all_of_them())
    assert all(streamed == plain for streamed, plain in pairs)
    assert len({json.dumps(pair) for pair in pairs}) == 64
    assert server.wait_idle()
