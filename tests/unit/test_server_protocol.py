"""What clients send and what is made of it: bytes in, engine words or one InvalidRequest out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.server.openai.protocol import ChatCompletionRequest, CompletionRequest, parse, template_options

ALL_NULL = [
    "max_tokens", "max_completion_tokens", "stop", "n", "seed", "logprobs", "top_logprobs", "logit_bias", "stream",
    "stream_options", "response_format", "tools", "tool_choice", "user", "temperature", "top_p", "suffix", "best_of",
    "echo", "top_k", "min_p", "priority", "cache_salt", "modalities", "audio", "functions", "parallel_tool_calls",
    "stop_token_ids", "min_tokens", "ignore_eos", "chat_template", "continue_final_message", "skip_special_tokens",
]  # fmt: skip


def completion(**fields: Any) -> CompletionRequest:
    request = parse(json.dumps({"prompt": "a"} | fields).encode(), CompletionRequest)
    request.check()
    request.sampling_params()
    return request


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    request = parse(json.dumps(body).encode(), ChatCompletionRequest)
    request.check()
    request.sampling_params()
    return request


BOTH = pytest.mark.parametrize("make", [completion, chat])


def refused(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as info:
        make(**fields)
    return info.value


@BOTH
def test_k01_null_is_absent(make):
    """K01, B103: every optional field present and null means the same as none of them."""
    assert make(**dict.fromkeys(ALL_NULL)) == make()
    assert make(**dict.fromkeys(ALL_NULL)).sampling_params() == make().sampling_params()


@BOTH
def test_k02_max_completion_tokens_wins(make):
    assert make(max_tokens=500, max_completion_tokens=5).sampling_params().max_tokens == 5
    assert make(max_tokens=7).sampling_params().max_tokens == 7
    assert refused(make, max_completion_tokens=0).param == "max_completion_tokens"
    assert "max_completion_tokens" in str(refused(make, max_completion_tokens=0))


def test_default_max_tokens():
    """B104: chat gets the room that is left, completions the API's 16."""
    assert completion().sampling_params().max_tokens == 16
    assert chat().sampling_params().max_tokens is None


@BOTH
def test_k03_unknown_fields_are_ignored(make):
    extra = {f"unknown_{i}": i for i in range(10)} | {"num_ctx": 4096, "options": {"a": [1, None]}}
    assert make(**extra) == make()
    chat(messages=[{"role": "user", "content": "a", "id": 1, "opts": {}, "injected": True}])


def test_k07_messages():
    assert refused(chat, messages=[]).param == "messages"
    assert refused(chat, messages=None).param == "messages"
    assert refused(chat, messages=["a"]).param == "messages[0]"
    assert refused(chat, messages="a").param == "messages"


def test_k07_last_message_is_assistant():
    """A new assistant turn begins after it, unless continue_final_message asks to go on in it."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    options = template_options(chat(messages=messages))
    assert options["add_generation_prompt"] and not options["continue_final_message"]
    options = template_options(chat(messages=messages, continue_final_message=True))
    assert not options["add_generation_prompt"] and options["continue_final_message"]
    error = refused(chat, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"
    assert refused(chat, continue_final_message=True).param == "continue_final_message"


def test_template_options():
    options = template_options(chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low"))
    assert options["chat_template_kwargs"] == {"enable_thinking": False, "reasoning_effort": "low"}
    assert template_options(chat())["chat_template_kwargs"] is None


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("a", ["a"]),
        ("", [""]),  # whether it has a token is the tokenizer's to say
        (["a", ""], ["a", ""]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([-1], [[-1]]),  # likewise whether the vocabulary has it
    ],
)
def test_k08_prompt_shapes(prompt, prompts):
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[1], []], ["a", 1], [1, "a"], [[1], "a"], [1, [2]], [["a"]], [1.5], [True], [None], 5, {}, None],
)
def test_k08_k09_prompts_that_are_refused(prompt):
    """K08, K09, B106."""
    assert refused(completion, prompt=prompt).param.startswith("prompt")


def test_k11_chat_logprobs():
    for top in (0, 5, 20):
        assert chat(logprobs=True, top_logprobs=top).sampling_params().logprobs == top
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(logprobs=False).sampling_params().logprobs is None
    assert refused(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=-1).param == "top_logprobs"
    assert refused(chat, top_logprobs=5).param == "top_logprobs"
    assert refused(chat, logprobs=1).param == "logprobs"


def test_k12_completion_logprobs():
    for count in (0, 5):
        assert completion(logprobs=count).sampling_params().logprobs == count
    assert completion(logprobs=2, echo=True).sampling_params().prompt_logprobs == 2
    assert completion(logprobs=2).sampling_params().prompt_logprobs is None
    for bad in (True, 1000, -1, "5"):
        assert refused(completion, logprobs=bad).param == "logprobs"


def test_k13_suffix_and_best_of():
    assert refused(completion, suffix="x").param == "suffix"
    assert completion(best_of=3, n=2).sampling_params().num_candidates == 3
    assert refused(completion, best_of=1, n=2).param == "best_of"
    assert completion(best_of=2, n=2, suffix="").sampling_params().n == 2


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_k14_n(make, stream):
    """K14, B083, B088."""
    for bad in (0, -1, 1.5, "2", 129, 10000, True):
        assert refused(make, n=bad, stream=stream).param == "n"
    for good in (1, 4, 128):
        assert make(n=good, stream=stream).sampling_params().n == good


@BOTH
def test_k16_numbers(make):
    for good in (0, 1e-9, 2, 0.7):
        assert make(temperature=good).sampling_params().temperature == good
    for field, values in {
        "temperature": (-1, "0", True, 1e9),
        "top_p": (0, 1.1, -1),
        "top_k": (-2, 1.5, "1"),
        "min_p": (-0.1, 1.1),
        "presence_penalty": (2.1, -2.1),
        "frequency_penalty": (2.1, -2.1),
        "repetition_penalty": (0, -1, 1e9),
        "max_tokens": (0, -1, "1", 10**30),
        "min_tokens": (-1, 10**30),
        "seed": (2**64, -(2**63) - 1, 1.5),
        "stop_token_ids": ([-1], [1.5], 5, [10**30]),
    }.items():
        for bad in values:
            assert refused(make, **{field: bad}).param.startswith(field), (field, bad)
    for k in (0, -1, 1):
        assert make(top_k=k).sampling_params().top_k == k


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "unknown": NaN}',
        b'{"prompt": "a"',
        b"",
        b"prompt=a",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "unknown": "\xff"}',
        b'{"prompt": "a", "unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_k16_k22_k26_what_is_not_json(body):
    """Bare NaN, lone surrogates and bad UTF-8 are no JSON."""
    with pytest.raises(InvalidRequest) as info:
        parse(body, CompletionRequest)
    assert info.value.code == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b'"a"', b"1", b"null"])
def test_body_that_is_no_object(body):
    with pytest.raises(InvalidRequest, match="expected `object`"):
        parse(body, CompletionRequest)


@BOTH
def test_k17_stop(make):
    """K17, B073."""
    for bad in ("", [""], ["a", ""], [1], [None], ["x"] * 17):
        assert refused(make, stop=bad).param.startswith("stop")
    assert make(stop=[]).sampling_params().stop == ()
    assert make(stop="a").sampling_params().stop == ("a",)
    assert make(stop=["a", "b", "c", "d", "x" * 10_000]).sampling_params().stop[4] == "x" * 10_000


@BOTH
def test_k18_stream_options(make):
    """Without stream they change nothing and are accepted."""
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        assert not make(stream=True, stream_options=options).include_usage
    assert make(stream=True, stream_options={"include_usage": True}).include_usage
    assert make(stream_options={"include_usage": True}).include_usage
    assert refused(make, stream=True, stream_options={"include_usage": "yes"}).param == "stream_options.include_usage"
    both = make(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert both.continuous_usage


@BOTH
def test_k19_and_other_fields_that_are_refused(make):
    assert make(response_format={"type": "text"}, modalities=["text"], functions=[], function_call="none")
    for field, value in {
        "response_format": {"type": "json_object"},
        "audio": {"voice": "x"},
        "modalities": ["text", "audio"],
        "functions": [{"name": "f"}],
        "guided_json": {},
        "guided_regex": "a*",
        "structured_outputs": {"regex": "a"},
        "prompt_logprobs": 1,
        "allowed_token_ids": [1],
    }.items():
        error = refused(make, **{field: value})
        assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3, "n": 2, "stream": True}, "stream"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 65}, "beam_width"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "logit_bias": {"5": 1.0}}, "logit_bias"),
    ],
)
def test_what_goes_with_a_beam_and_with_best_of(fields, param):
    assert refused(lambda: completion(**fields).sampling_params()).param == param


def test_tools_are_refused_unless_none_is_chosen():
    tool = {"type": "function", "function": {"name": "f"}}
    assert refused(chat, tools=[tool]).param == "tools"
    assert refused(chat, tools=[tool], tool_choice="auto").param == "tools"
    assert refused(chat, tool_choice="required").param == "tool_choice"
    assert refused(chat, tool_choice={"type": "function", "function": {"name": "f"}}).param == "tool_choice"
    for good in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": [tool], "tool_choice": "none"}):
        chat(**good)


@BOTH
def test_k27_logit_bias(make):
    assert make(logit_bias={"5": 1, "6": -100.0}).sampling_params().logit_bias == {5: 1.0, 6: -100.0}
    for bad in ({"a": 1}, {"1.5": 1}, {"5": 101}, {"5": -101}, {"-1": 1}, {"5": "1"}, [5]):
        assert refused(make, logit_bias=bad).param == "logit_bias"


@BOTH
def test_k36_min_tokens(make):
    assert refused(make, ignore_eos=True, min_tokens=9, max_tokens=8).param == "min_tokens"
    assert make(min_tokens=2, max_tokens=8, stop=["a"], ignore_eos=True).sampling_params() == SamplingParams(
        min_tokens=2, max_tokens=8, stop=("a",), ignore_eos=True
    )


@BOTH
def test_k37_priority_and_salt(make):
    for good in (-5, 0, 5):
        assert make(priority=good).priority == good
    for bad in ("high", 10**12, 1.5, True):
        assert refused(make, priority=bad).param == "priority"
    assert make(cache_salt="a").cache_salt == "a"
    for bad in ("", "x" * 10_000):
        assert refused(make, cache_salt=bad).param == "cache_salt"
