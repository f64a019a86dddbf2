"""Beam search: as transformers does it, and as an exhaustive search over the toy model, however it is scheduled."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvern import LLM, SamplingParams
from kvern.config import SchedulerConfig
from kvern.engine.core import EngineCore
from kvern.engine.messages import AddRequest, StepReport
from kvern.sampling_params import InvalidRequest
from kvern.scheduler.scheduler import Scheduler
from kvern.testing import SchedulerHarness
from kvern.testing.toy import HistoryHashExecutor, reference_tokens, toy_logits
from tests.integration.test_transformers_equality import reference_model
from tests.models import fetch
from tests.tiny_folder import write_model

PROMPTS = ["hello there", "abc", "a longer prompt than the others"]


def toy_beams(prompt: list[int], width: int, num_tokens: int) -> list[list[int]]:
    """The beam after num_tokens steps, the best first, of the toy model without any cache. Nothing ends a sequence."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(num_tokens):
        longer = []
        for tokens, total in beams:
            ids = np.array([*prompt, *tokens], dtype=np.int64)
            logits = toy_logits(ids + (np.arange(len(ids)) << 32)).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            longer += [([*tokens, token], total + logprob) for token, logprob in enumerate(logprobs.tolist())]
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    return [tokens for tokens, _ in beams]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 64, "enable_prefix_caching": False},
        {"num_blocks": 14, "block_size": 4, "max_model_len": 52},
        {"num_blocks": 14, "block_size": 4, "max_model_len": 52, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 3},
        {"preempt_probability": 0.5},
        {"preempt_probability": 0.5, "preemption": "swap", "kv_host_memory": "64KiB", "enable_prefix_caching": False},
        {"batching": "prefill_first", "policy": "fair"},
        {"speculative": "ngram", "num_speculative_tokens": 2},
        {"async_scheduling": "on"},
        {"async_scheduling": "on", "preempt_probability": 0.5, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_best_sequences_however_it_is_scheduled(options: dict[str, Any]) -> None:
    given = {"max_model_len": 100, "num_blocks": 100, "max_num_seqs": 5, "check_invariants": True} | options
    with LLM("toy:history-hash", **given) as llm:
        sampling = SamplingParams(use_beam_search=True, beam_width=4, n=3, max_tokens=8, ignore_eos=True, logprobs=1)
        others = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([*PROMPTS, "bystander"], [sampling] * 3 + [others])
        for prompt, output in zip(PROMPTS, outputs, strict=False):
            expected = toy_beams(llm.get_tokenizer().encode(prompt), 4, 8)[:3]
            assert [completion.token_ids for completion in output.outputs] == expected, prompt
            totals = [completion.cumulative_logprob or 0.0 for completion in output.outputs]
            assert totals == sorted(totals, reverse=True)
            for completion in output.outputs:
                assert completion.finish_reason == "length"
                logprobs = completion.logprobs or []
                assert sum(at[t].logprob for t, at in zip(completion.token_ids, logprobs, strict=True)) == (
                    pytest.approx(completion.cumulative_logprob)
                )
                assert all(1 <= len(at) <= 2 for at in logprobs)
        core = llm._client.core
        assert core.stats().num_free_blocks == core.stats().num_blocks and not core.scheduler.requests
        assert not core.beams._beams and not core.beams._leaving and core.beams._num_rows == 0


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
def test_the_prompt_and_shared_tokens_are_computed_once(batching: str) -> None:
    options: dict[str, Any] = {"max_model_len": 100, "num_blocks": 100, "enable_prefix_caching": False}
    with LLM("toy:history-hash", batching=batching, **options) as llm:
        sampling = SamplingParams(use_beam_search=True, beam_width=4, max_tokens=8, ignore_eos=True)
        llm.generate("x" * 40, sampling)
        assert llm._client.core.stats().scheduled_tokens == 40 + 7 * 4


def test_a_chosen_token_takes_the_place_of_the_sampled_one_and_of_its_drafts() -> None:
    h = SchedulerHarness(block_size=4, num_speculative_tokens=2)
    name = h.add([5, 6, 7, 8, 9], max_tokens=9)
    h.update(h.schedule(), drafts={name: [50, 51]})
    h.scheduler.replace_last_token(name, 77)
    output = h.schedule()
    assert not output.draft_tokens and output.num_scheduled_tokens == {name: 1}
    (told,) = output.new_requests
    assert told.token_ids.tolist() == [5, 6, 7, 8, 9, 77] and told.num_computed_tokens == 5
    h.update(output)
    h.check_invariants()
    h.run()
    assert h.request(name).output_token_ids[1:] == reference_tokens([5, 6, 7, 8, 9, 77], 8)


def test_a_chosen_token_of_a_fork_that_waits_and_was_looked_up() -> None:
    """The policy looks waiting requests up when they come, with the token that the parent sampled."""
    h = SchedulerHarness(block_size=1, max_num_seqs=1, policy="prefix")
    parent = h.add([5, 6, 7], max_tokens=4)
    h.step()
    (sampled,) = h.request(parent).output_token_ids
    child = h.fork(parent)
    h.scheduler.replace_last_token(child, 88)
    h.scheduler.replace_last_token(parent, 99)
    h.run()
    assert h.request(child).output_token_ids[1:] == reference_tokens([5, 6, 7, 88], 3)
    prompt = [5, 6, 7, sampled, 9]  # nobody has computed the fourth token after the first three
    other = h.add(prompt, max_tokens=3)
    h.run()
    assert h.request(other).output_token_ids == reference_tokens(prompt, 3)


def make_core(**limits: Any) -> EngineCore:
    config = SchedulerConfig(**{"num_blocks": 64, "block_size": 4, "max_model_len": 64, **limits})
    return EngineCore(HistoryHashExecutor(config), Scheduler(config), check_invariants=True)


def owners(name: str, n: int = 2, width: int = 3, max_tokens: int = 6) -> list[AddRequest]:
    sampling = SamplingParams(use_beam_search=True, beam_width=width, n=n, max_tokens=max_tokens, ignore_eos=True)
    return [
        AddRequest(
            request_id=f"{name}_{i}",
            prompt_token_ids=[7, 8, 9, 10, 11],
            sampling=sampling,
            arrival_time=0.0,
            fork_of=f"{name}_0" if i else None,
        )
        for i in range(n)
    ]


def ends(reports: list[StepReport]) -> dict[str, list[str | None]]:
    """Every end of every id."""
    found: dict[str, list[str | None]] = {}
    for report in reports:
        for request_id, update in report.updates.items():
            if update.finish_reason is not None:
                found.setdefault(request_id, []).append(update.finish_reason)
    return found


def drain(core: EngineCore) -> list[StepReport]:
    reports = []
    while core.has_work():
        reports.append(core.step())
    assert core.stats().num_free_blocks == core.stats().num_blocks
    assert core.beams._num_rows == 0 and not core.beams._beams and not core.beams._searches
    return reports


@pytest.mark.parametrize("steps", range(7))
def test_every_owner_ends_once_also_when_aborted(steps: int) -> None:
    core = make_core()
    for add in owners("a") + owners("b"):
        core.add(add)
    reports = [core.step() for _ in range(steps)]
    core.abort(["a_0"])
    core.abort(["a_0", "b_0", "b_1", "nobody"])
    core.abort(["b_1"])
    reports += drain(core)
    found = ends(reports)
    assert all(len(reasons) == 1 for reasons in found.values())
    assert set(found) == {"a_0", "a_1", "b_0", "b_1"}
    assert found["a_1"] == ["length"]
    assert found["b_0"] == (["abort"] if steps < 6 else ["length"])


def test_a_search_begins_when_all_of_its_owners_have_come() -> None:
    core = make_core()
    first, second = owners("a")
    core.add(first)
    assert not core.has_work()
    core.abort(["a_0"])
    core.add(second)
    assert ends(drain(core)) == {"a_0": ["abort"], "a_1": ["length"]}
    with pytest.raises(InvalidRequest, match="in use"):
        for add in owners("b") + owners("b"):
            core.add(add)
    core.abort_all()
    assert ends(drain(core)) == {"b_0": ["abort"], "b_1": ["abort"]}


def random_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_model_len": 40,
        "block_size": rng.choice([1, 4, 16]),
        "max_num_seqs": rng.choice([3, 4, 8]),
        "max_num_batched_tokens": rng.choice([2, 7, 64]),
        "enable_prefix_caching": rng.random() < 0.7,
        "policy": rng.choice(["fcfs", "priority", "fair", "deadline", "prefix"]),
        "batching": rng.choice(["mixed", "prefill_first"]),
        "preempt_probability": rng.choice([0.0, 0.3]),
        "async_scheduling": rng.choice(["on", "off"]),
        "preemption": rng.choice(["recompute", "swap"]),
        "kv_host_memory": "64KiB",
    }
    whole = -(-options["max_model_len"] // options["block_size"])  # what one request may take
    options["num_blocks"] = 1 + whole * rng.choice([1, 2, 4])
    if options["preemption"] == "recompute":
        del options["kv_host_memory"]
    return options


@pytest.mark.parametrize("seed", range(30))
def test_searches_in_any_company(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    with LLM("toy:history-hash", check_invariants=True, **random_options(rng)) as llm:
        core, process = llm._client.core, llm._client.input_processor.process
        expected: dict[str, list[int]] = {}
        coming: list[AddRequest] = []
        for i in range(rng.randint(2, 5)):
            prompt = [rng.randrange(20, 100) for _ in range(rng.randint(1, 12))]
            width, length = rng.randint(1, 3), rng.randint(1, 7)
            n = rng.randint(1, width)
            beams = SamplingParams(use_beam_search=True, beam_width=width, n=n, max_tokens=length, ignore_eos=True)
            plain = SamplingParams(temperature=0.0, n=n, max_tokens=length, ignore_eos=True)
            if rng.random() < 0.3:
                coming += process(f"plain{i}", prompt, plain)
            else:
                children = process(f"beams{i}", prompt, beams, priority=i % 2, tenant=str(i % 2))
                coming += children
                best = toy_beams(prompt, width, length)
                expected |= {child.request_id: tokens for child, tokens in zip(children, best, strict=False)}
        aborted: set[str] = set()
        got: dict[str, list[int]] = {}
        reports = []
        while coming or core.has_work():
            while coming and rng.random() < 0.6:
                core.add(coming.pop(0))
            if rng.random() < 0.03:
                aborted.add(name := rng.choice([*expected, "nobody"]))
                core.abort([name])
            core.admin.requests()
            reports.append(core.step())
            for name, tokens in zip(reports[-1].request_ids, reports[-1].token_ids, strict=True):
                got.setdefault(name, []).extend(tokens)
        assert all(len(reasons) == 1 for reasons in ends(reports).values())
        for name, tokens in expected.items():
            assert name in aborted or got[name] == tokens, name
        assert not caplog.records, "no step was empty without need"
        drain(core)


def test_searches_wait_for_rows_for_all_of_their_beams() -> None:
    core = make_core(max_num_seqs=7, enable_prefix_caching=False)
    for add in owners("a") + owners("b") + owners("c"):
        core.add(add)
    assert core.stats().num_waiting == 3 and core.stats().waiting_by_reason["max_num_seqs"] == 1
    reports = drain(core)
    assert core.stats().scheduled_tokens == 3 * (5 + 5 * 3), "nothing was computed twice"
    assert list(ends(reports)) == ["a_0", "a_1", "b_0", "b_1", "c_0", "c_1"]


def test_a_cache_that_is_too_small_is_said() -> None:
    core = make_core(num_blocks=3, block_size=4, max_model_len=64)
    for add in owners("a", max_tokens=30):
        core.add(add)
    reports = drain(core)
    assert ends(reports) == {"a_0": ["error"], "a_1": ["error"]}
    errors = {update.error for report in reports for update in report.updates.values() if update.error}
    assert len(errors) == 1 and "the whole KV cache holds 8 tokens" in errors.pop()


def test_what_cannot_be_searched_is_refused() -> None:
    with LLM("toy:history-hash", max_model_len=100, num_blocks=50, max_num_seqs=4) as llm:
        with pytest.raises(InvalidRequest, match="max_num_seqs = 4"):
            llm.generate("x", SamplingParams(use_beam_search=True, beam_width=5))
        with pytest.raises(InvalidRequest, match="between 0 and 20"):
            llm.generate("x", SamplingParams(use_beam_search=True, beam_width=2, logprobs=21))
        with pytest.raises(InvalidRequest, match="cannot be streamed"):
            next(llm.stream("x", SamplingParams(use_beam_search=True, beam_width=2)))


CASES: list[dict[str, Any]] = [
    {"num_beams": 4},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 5, "early_stopping": True},
    {"num_beams": 2, "length_penalty": -0.5},
    {"num_beams": 6, "length_penalty": 1.5},
]


def compare(llm: LLM, model: Any, prompts: list[list[int]], cases: list[dict[str, Any]], **shared: Any) -> int:
    """kvern's sequences against those of `model.generate`; returns how many ended before their length."""
    import torch

    num_stopped = 0
    for case in cases:
        sampling = SamplingParams(
            use_beam_search=True,
            beam_width=case["num_beams"],
            n=case["num_beams"],
            max_tokens=shared["max_new_tokens"],
            length_penalty=case.get("length_penalty", 1.0),
            early_stopping=case.get("early_stopping", False),
            stop_token_ids=tuple(shared["eos_token_id"]),
            ignore_eos=True,
        )
        for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
            with torch.no_grad():
                theirs = model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    num_return_sequences=case["num_beams"],
                    do_sample=False,
                    pad_token_id=1,
                    output_scores=True,
                    return_dict_in_generate=True,
                    **case,
                    **shared,
                )
            for completion, sequence, score in zip(
                output.outputs, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True
            ):
                ours, length = completion.token_ids, len(completion.token_ids)
                assert ours == sequence[len(prompt) :][:length], (case, prompt)
                assert set(sequence[len(prompt) + length :]) <= {1}, "padding follows"
                assert (completion.cumulative_logprob or 0.0) / length**sampling.length_penalty == (
                    pytest.approx(score, abs=2e-4)
                )
                num_stopped += completion.finish_reason == "stop"
    return num_stopped


@pytest.mark.slow
def test_a_tiny_llama_as_transformers_has_it(tmp_path: Any) -> None:
    from transformers import LlamaForCausalLM

    folder = write_model(tmp_path / "llama", "llama")
    model = LlamaForCausalLM.from_pretrained(folder, dtype="float32").eval()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 250, length).tolist() for length in (1, 9, 24)]
    with LLM(folder, max_model_len=128, num_blocks=200, max_num_seqs=16, dtype="float32", threads=1) as llm:
        ending = list(range(100, 160))
        stopped = compare(llm, model, prompts, CASES, max_new_tokens=14, eos_token_id=ending)
        assert stopped > 10
        assert compare(llm, model, prompts, CASES[:1], max_new_tokens=14, eos_token_id=[257]) < 5


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_as_transformers_has_it() -> None:
    path = fetch("smollm2")
    model = reference_model(path)
    with LLM(str(path), max_model_len=256, num_blocks=100, dtype="float32") as llm:
        prompt = llm.get_tokenizer().encode("The capital of France is")
        compare(llm, model, [prompt], CASES[:1], max_new_tokens=12, eos_token_id=[2, 30, 18])
