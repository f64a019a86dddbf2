"""A real model behind the server: its chat template, its special tokens, its characters of several tokens."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from kvern.testing.server import ServerProcess
from tests.models import fetch

pytestmark = [pytest.mark.slow, pytest.mark.model]

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
CHARACTERS = "🎉é"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # In int8 the likeliest first token of one answer is so by a hair's breadth, or another one.
    options = {"activations": "bf16", "max_model_len": 512, "num_blocks": 128}
    with ServerProcess(model=fetch("smollm2"), served_model_name="smol", timeout=240, **options) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def test_chat_ends_by_itself(client):
    answer = client.chat.completions.create(model="smol", messages=CAPITAL, temperature=0).choices[0]
    assert answer.message.content == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_k17_stop_string_that_is_a_special_token(client):
    """B074: raw text in the chat form; the end of the turn is no EOS here, and is seen whether it shows or not."""
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    for skip in (True, False):
        choice = client.completions.create(
            model="smol", prompt=prompt, temperature=0, max_tokens=10, stop="<|im_end|>",
            extra_body={"ignore_eos": True, "skip_special_tokens": skip},
        ).choices[0]  # fmt: skip
        assert (choice.text, choice.finish_reason) == ("The capital of France is Paris.", "stop")


@pytest.mark.parametrize("text", list(CHARACTERS))
def test_k22_characters_of_several_tokens(client, text):
    """B078: forced to say a character of several tokens again and again, no chunk holds a part of it."""
    tokens = client.post("/tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=dict)["tokens"]
    fields = {"model": "smol", "prompt": text * 4, "max_tokens": 8, "temperature": 1, "seed": 1}
    fields["logit_bias"] = {str(token): 100 for token in tokens}
    whole = client.completions.create(**fields, logprobs=1).choices[0]
    chunks = [chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True)]
    assert "".join(chunks) == whole.text
    assert all("\ufffd" not in chunk for chunk in chunks) or "\ufffd" in whole.text
    assert len(whole.logprobs.tokens) == 8


def test_echo_scores_a_prompt(client):
    """What a scoring tool does: the likelier continuation has the higher sum of logprobs, cached or not."""

    def score(ending: str) -> float:
        prompt = "The capital of France is"
        logprobs = client.completions.create(
            model="smol", prompt=prompt + ending, echo=True, logprobs=1, max_tokens=1, temperature=0
        ).choices[0].logprobs  # fmt: skip
        assert logprobs.token_logprobs[0] is None
        assert "".join(logprobs.tokens[:-1]) == prompt + ending
        return sum(logprobs.token_logprobs[5:-1])

    assert score(" Paris") > score(" Berlin") > score(" purple")
    assert score(" Paris") == score(" Paris")
