"""Blocks saved by one engine and loaded by another through a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvern import SamplingParams
from kvern.config import SchedulerConfig
from kvern.engine.core import EngineCore
from kvern.engine.messages import AddRequest
from kvern.executor.file_connector import FileConnector, FileWorker
from kvern.executor.inline import InlineExecutor
from kvern.runner.cache_layout import cache_layout
from kvern.runner.disk_store import DiskStore
from kvern.runner.model_runner import ModelRunner
from kvern.scheduler.scheduler import Scheduler
from tests.tiny_model import tiny_model

PROMPT = [3 + i * 7 % 90 for i in range(100)]


class Engine:
    def __init__(self, folder: Path | None, num_blocks: int = 40, prefix_caching: bool = True) -> None:
        model = tiny_model(threads=1)
        layout = cache_layout(model.config)
        config = SchedulerConfig(
            num_blocks=num_blocks, max_num_seqs=4, max_model_len=160, kv_groups=layout.groups,
            enable_prefix_caching=prefix_caching,
        )  # fmt: skip
        runner = ModelRunner(model, config)
        connector = None
        if folder is not None:
            per_token = model.config.kv_bytes_per_token(4, layout.num_slots)
            store = DiskStore(folder, "tiny", config.block_size * per_token)
            runner.connector = FileWorker(store, model.ops, runner.mover.slots)
            connector = FileConnector(store, config.block_size)
        self.scheduler = Scheduler(config, connector)
        self.core = EngineCore(InlineExecutor(runner, connector), self.scheduler, check_invariants=True)

    def serve(self, *prompts: list[int]) -> list[tuple[list[int], list[float]]]:
        """Tokens and their logprobs, for each of the prompts, served together."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
            found[str(i)] = ([], [])
            self.core.add(AddRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0))
        while self.core.has_work():
            report = self.core.step()
            for name, tokens in zip(report.request_ids, report.token_ids, strict=True):
                found[name][0].extend(tokens)
            for name, update in report.updates.items():
                found[name][1].extend(entry[1][0] for entry in update.logprobs or [])
        return list(found.values())


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], list[float]]]:
    return Engine(None).serve(PROMPT)


def test_another_engine_computes_only_what_is_left(tmp_path: Path, alone: list[tuple[list[int], list[float]]]) -> None:
    first, second = Engine(tmp_path), Engine(tmp_path)
    assert first.serve(PROMPT) == alone
    assert first.scheduler.num_free_blocks == 39, "blocks are free again once they are saved"
    assert second.serve(PROMPT) == alone
    computed = second.scheduler.stats.scheduled_tokens
    assert computed == 100 - 96 + 5


def test_without_a_prefix_cache_of_its_own(tmp_path: Path, alone: list[tuple[list[int], list[float]]]) -> None:
    Engine(tmp_path, prefix_caching=False).serve(PROMPT)
    second = Engine(tmp_path, prefix_caching=False)
    assert second.serve(PROMPT, PROMPT) == alone * 2


def test_a_whole_prompt_in_files_computes_one_token(tmp_path: Path) -> None:
    want = Engine(None).serve(PROMPT[:96])
    Engine(tmp_path).serve(PROMPT[:96])
    second = Engine(tmp_path)
    assert second.serve(PROMPT[:96]) == want
    assert second.scheduler.stats.scheduled_tokens == 1 + 5


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_a_file_that_cannot_be_loaded_is_computed(
    tmp_path: Path, damage: str, alone: list[tuple[list[int], list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Engine(tmp_path).serve(PROMPT)
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    if damage == "gone":  # between the question whether it is there and the reading of it
        monkeypatch.setattr(DiskStore, "read", lambda self, name: None)
    assert Engine(tmp_path).serve(PROMPT) == alone


def test_many_readers_at_once(tmp_path: Path) -> None:
    prompts = [PROMPT[: 40 + 8 * i] + [90 - i] * 3 for i in range(6)]
    want = [Engine(None).serve(prompt)[0] for prompt in prompts]
    Engine(tmp_path).serve(PROMPT)
    assert Engine(tmp_path, num_blocks=24).serve(*prompts) == want
