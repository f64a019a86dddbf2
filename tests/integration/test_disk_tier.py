"""Prefixes on disk, through the whole engine: they survive a restart, and nothing else is ever read as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvern import LLM, SamplingParams
from kvern.config import SchedulerConfig
from kvern.engine.core import EngineCore
from kvern.engine.messages import AddRequest
from kvern.executor.inline import InlineExecutor
from kvern.runner.cache_layout import cache_layout
from kvern.runner.disk_store import DiskStore
from kvern.runner.model_runner import ModelRunner
from kvern.scheduler.scheduler import Scheduler
from tests.models import fetch
from tests.tiny_model import tiny_model

PROMPTS = [[3 + (i * step + shift) % 90 for i in range(100)] for step, shift in ((7, 0), (11, 5), (13, 2))]


class Engine:
    """A tiny model with nine usable blocks, which hold one prompt and a part of another."""

    def __init__(self, folder: Path | None, fingerprint: str = "tiny", host_blocks: int = 0) -> None:
        model = tiny_model(threads=1)
        layout = cache_layout(model.config)
        config = SchedulerConfig(
            num_blocks=10,
            max_num_seqs=2,
            max_model_len=128,
            host_blocks=host_blocks,
            disk_blocks=0 if folder is None else 40,
            kv_groups=layout.groups,
        )
        store = None
        if folder is not None:
            per_token = model.config.kv_bytes_per_token(4, layout.num_slots)
            store = DiskStore(folder, fingerprint, config.block_size * per_token)
        executor = InlineExecutor(ModelRunner(model, config, store=store))
        scheduler = Scheduler(config)
        scheduler.found_on_disk(executor.stored_blocks())
        self.core = EngineCore(executor, scheduler, check_invariants=True)
        self.served = 0

    def serve(self, prompt: list[int]) -> tuple[list[int], list[float], int]:
        """Tokens, logprobs of the tokens, and how much of the prompt was cached."""
        name = f"r{self.served}"
        self.served += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
        self.core.add(AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0))
        tokens, logprobs, cached = list[int](), list[float](), 0
        while self.core.has_work():
            report = self.core.step()
            tokens += [token for ids in report.token_ids for token in ids]
            update = report.updates.get(name)
            if update is not None:
                logprobs += [entry[1][0] for entry in update.logprobs or []]
                cached = max(cached, update.num_cached_tokens)
        return tokens, logprobs, cached


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], list[float]]]:
    return [Engine(None).serve(prompt)[:2] for prompt in PROMPTS]


@pytest.mark.parametrize("host_blocks", [0, 3])
def test_prefixes_survive_a_restart(
    tmp_path: Path, host_blocks: int, alone: list[tuple[list[int], list[float]]]
) -> None:
    first = Engine(tmp_path, host_blocks=host_blocks)
    for prompt, (tokens, logprobs) in zip(PROMPTS, alone, strict=True):
        assert first.serve(prompt) == (tokens, logprobs, 0)
    first.core.shutdown()
    second = Engine(tmp_path, host_blocks=host_blocks)
    for prompt, (tokens, logprobs) in zip(PROMPTS, alone, strict=True):
        assert second.serve(prompt) == (tokens, logprobs, 96)


def test_what_was_evicted_survives_a_crash(tmp_path: Path, alone: list[tuple[list[int], list[float]]]) -> None:
    """Without an orderly end, what had gone to disk before is there."""
    first = Engine(tmp_path)
    for prompt in PROMPTS:
        first.serve(prompt)
    assert Engine(tmp_path).serve(PROMPTS[0]) == (*alone[0], 96)


def test_another_model_never_hits(tmp_path: Path, alone: list[tuple[list[int], list[float]]]) -> None:
    first = Engine(tmp_path)
    for prompt in PROMPTS:
        first.serve(prompt)
    assert Engine(tmp_path, fingerprint="other").serve(PROMPTS[0]) == (*alone[0], 0)


def test_a_damaged_file_costs_time_and_nothing_else(tmp_path: Path, alone: list[tuple[list[int], list[float]]]) -> None:
    first = Engine(tmp_path)
    for prompt in PROMPTS:
        first.serve(prompt)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
    second = Engine(tmp_path)
    assert second.serve(PROMPTS[0])[:2] == alone[0]
    assert second.serve(PROMPTS[0])[:2] == alone[0]


@pytest.mark.slow
@pytest.mark.model
def test_a_system_prompt_of_a_thousand_tokens_is_hit_after_a_restart(tmp_path: Path) -> None:
    options = {"kv_disk": str(tmp_path), "num_blocks": 80, "max_model_len": 1200, "max_num_seqs": 2}
    system = "You are a careful assistant. " + " ".join(f"Rule {i}: be brief and be kind." for i in range(90))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    model = str(fetch("smollm2"))

    def ask(llm: LLM, question: str) -> tuple[str, int, int]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        output = llm.chat(messages, params)[0]
        return output.outputs[0].text, output.metrics.num_cached_tokens, len(output.prompt_token_ids)

    with LLM(model, **options) as llm:
        text, cached, length = ask(llm, "What is the capital of France?")
        assert cached == 0 and length > 1000
        llm.generate("A long text about the sea. " * 150, params)  # evicts it
    with LLM(model, **options) as llm:
        again, cached, _ = ask(llm, "What is the capital of France?")
    assert again == text and cached > 900
