"""LLM, the offline face: with the toy model, and once with a real one."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.config import InvalidConfig
from kvern.engine.messages import EngineDeadError
from kvern.engine.output_processor import OutputCollector
from kvern.request import Request
from kvern.sampling_params import InvalidRequest
from kvern.testing.faults import FaultyExecutor
from kvern.testing.toy import reference_tokens
from tests.models import fetch


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def make_llm(**options: Any) -> LLM:
    return LLM("toy:history-hash", **{"max_model_len": 1000, "num_blocks": 300, "check_invariants": True, **options})


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with make_llm(max_num_seqs=8, max_num_batched_tokens=64) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared LLM; each test leaves it as it found it."""
    yield shared
    core = shared._client.core
    assert not core.has_work() and not core.scheduler.requests and len(shared._client._output) == 0
    assert core.stats().num_free_blocks == core.stats().num_blocks
    assert core.failure is None


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i} " * (1 + i % 4) for i in range(30)]
    outputs = llm.generate(prompts, [greedy(1 + (7 * i) % 30) for i in range(30)])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompt, ids(prompt), True)
        (completion,) = output.outputs
        assert completion.token_ids == reference_tokens(ids(prompt), 1 + (7 * i) % 30)
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
        assert completion.finish_reason == "length"


def test_every_form_of_a_prompt(llm: LLM) -> None:
    expected = reference_tokens(ids("form"), 4)
    same = ["form", ids("form"), {"prompt": "form"}, {"prompt_token_ids": ids("form")}]
    for prompt in same:
        (output,) = llm.generate(prompt, greedy(4))
        assert output.outputs[0].token_ids == expected
    assert [output.outputs[0].token_ids for output in llm.generate(same, greedy(4))] == [expected] * 4
    assert llm.generate([]) == []


def test_several_completions(llm: LLM) -> None:
    (output,) = llm.generate("several", SamplingParams(n=3, seed=4, max_tokens=20))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    (alone,) = llm.generate("several", SamplingParams(seed=4, max_tokens=20))
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_sampled_in_company_as_one_by_one(llm: LLM) -> None:
    """B137."""
    prompts = [f"sample {i}" for i in range(12)]
    sampling = [SamplingParams(seed=i, max_tokens=12, top_p=0.9, logprobs=2) for i in range(12)]
    together = llm.generate(prompts, sampling)
    for prompt, params, output in zip(prompts, sampling, together, strict=True):
        (alone,) = llm.generate(prompt, params)
        assert alone.outputs == output.outputs


def test_chat(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": f"Hello {i}"}] for i in range(3)]
    outputs = llm.chat(conversations, greedy(5))
    for conversation, output in zip(conversations, outputs, strict=True):
        prompt = llm.chat_token_ids(conversation)
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == reference_tokens(prompt, 5)
        (alone,) = llm.chat(conversation, greedy(5))
        assert alone.outputs == output.outputs
    open_ended = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, I"}]
    (output,) = llm.chat(open_ended, greedy(5), add_generation_prompt=False, continue_final_message=True)
    assert llm.get_tokenizer().decode(output.prompt_token_ids).endswith("Well, I")
    (output,) = llm.chat(open_ended, greedy(5), chat_template="{{ messages[0].content }}")
    assert output.prompt_token_ids == ids("Hi")


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        (["good", ""], None, "prompt 1.*at least one token"),
        (["good", [3, 999]], None, "prompt 1.*999"),
        (["good", "x" * 2000], None, "prompt 1.*limit is 999"),
        (["good", {"text": "x"}], None, "'text'"),
        (["good", 7.5], None, "float"),
        (["good", "fine"], [greedy(1)], "1 entries for 2 prompts"),
        (["good", "fine"], [greedy(1), greedy(1, stop_token_ids=(777,))], "prompt 1.*777"),
    ],
)
def test_one_bad_prompt_is_said_before_anything_runs(llm: LLM, prompts: Any, sampling: Any, message: str) -> None:
    steps = llm._client.core.stats().steps
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, sampling)
    assert llm._client.core.stats().steps == steps


def test_a_call_that_fails_takes_its_requests_with_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """B136."""
    count = 0

    def failing(self: OutputCollector, delta: Any) -> None:
        nonlocal count
        count += 1
        if count == 20:
            raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(OutputCollector, "put", failing)
        with pytest.raises(OSError, match="disk"):
            llm.generate([f"fails {i}" for i in range(20)], greedy(30))
    assert not llm._client.core.scheduler.requests
    outputs = llm.generate([f"fails {i}" for i in range(20)], greedy(30))
    for i, output in enumerate(outputs):
        assert output.outputs[0].token_ids == reference_tokens(ids(f"fails {i}"), 30)


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """As it does unless the process was started in the background, where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_ends_the_call_between_two_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step it would leave blocks that are hittable and were never computed."""
    executor = llm._client.core.executor
    execute = executor.execute
    steps = 0

    def interrupting(output: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
        return execute(output)

    handler = signal.getsignal(signal.SIGINT)
    prompts = [f"interrupted {i} " * 5 for i in range(8)]
    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute", interrupting)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, greedy(40))
    assert signal.getsignal(signal.SIGINT) is handler
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(40)), strict=True):
        assert output.outputs[0].token_ids == reference_tokens(ids(prompt), 40)


def test_a_failed_step_is_said_also_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm() as llm:
        core = llm._client.core
        core.executor = FaultyExecutor(core.executor, fail_at=2)
        with pytest.raises(EngineDeadError, match="injected fault in step 2"):
            llm.generate(["a", "b"], greedy(5))
        with pytest.raises(EngineDeadError, match=r"failed earlier.*injected fault"):
            llm.generate("c", greedy(5))


def test_stream(llm: LLM) -> None:
    sampling = greedy(9)
    deltas = list(llm.stream("streamed", sampling))
    assert [token for delta in deltas for token in delta.token_ids] == reference_tokens(ids("streamed"), 9)
    assert [delta.finish_reason for delta in deltas] == [None] * 8 + ["length"]
    stream = llm.stream("left open", greedy(500))
    next(stream)
    with pytest.raises(RuntimeError, match="close it first"):
        llm.generate("meanwhile", sampling)
    stream.close()
    assert llm.generate("meanwhile", sampling)[0].finished


def test_threads_wait_for_one_another(llm: LLM) -> None:
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = llm.generate(f"thread {i}", greedy(20))[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: reference_tokens(ids(f"thread {i}"), 20) for i in range(4)}


def test_priorities_are_given_per_prompt() -> None:
    with make_llm(policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate(["a", "b", "c"], greedy(5), priority=[3, 1, 2])
        order = sorted("abc", key=lambda name: outputs["abc".index(name)].metrics.finished_time or 0)
        assert order == ["b", "c", "a"]
        with pytest.raises(InvalidRequest, match="priority"):
            llm.generate(["a", "b"], greedy(5), priority=[1])


def test_an_option_that_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"max_num_seq.*did you mean 'max_num_seqs'"):
        LLM("toy:history-hash", max_num_seq=3)
    with pytest.raises(InvalidConfig, match=r"max_num_seqs.*>= 1"):
        LLM("toy:history-hash", max_num_seqs=0)
    with pytest.raises(InvalidConfig, match="max_model_len"):
        LLM("toy:history-hash", max_model_len=10**6)


def test_progress_shows_on_a_terminal_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["quiet"] * 3, greedy(3))
    assert capsys.readouterr() == ("", "")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        llm.generate(["shown"] * 3, greedy(3))
        shown = terminal.getvalue()
        assert "3/3" in shown and "tokens/s" in shown
        llm.generate(["hidden"] * 3, greedy(3), progress=False)
        assert terminal.getvalue() == shown


def test_closing_lets_go_of_everything() -> None:
    with make_llm() as llm:
        llm.generate(["a", "b"], greedy(5))
    llm.close()
    del llm
    gc.collect()
    assert not any(isinstance(found, Request) for found in gc.get_objects())


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_knows_the_capital_of_france() -> None:
    # In int8 the likeliest first token is so by a hair's breadth, or another one.
    with LLM(str(fetch("smollm2")), max_model_len=512, activations="bf16") as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (output,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=24))
        assert output.outputs[0].text == "The capital of France is Paris."
        assert output.outputs[0].finish_reason == "stop"
