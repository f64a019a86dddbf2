"""From options to an executor: the cache's size, what is refused, and a step through all of it."""

import json
import logging
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvern.config import EngineConfig, InvalidConfig
from kvern.executor.inline import load_executor
from kvern.executor.limits import size_cache
from kvern.request import Request
from kvern.sampling_params import SamplingParams
from kvern.scheduler.scheduler import Scheduler
from kvern.weights.files import ModelError
from tests.tiny_model import RandomCheckpoint, tiny_config

GIB = 2**30
MODEL = tiny_config(max_position_embeddings=4096)  # 2 layers x 2 x 2 heads x 8 x 4 bytes = 256 bytes per token


def sized(free_memory=GIB, **options):
    return size_cache(EngineConfig(**options), MODEL, bytes_per_element=4, free_memory=free_memory)


def test_blocks_that_were_asked_for():
    limits = sized(num_blocks=300, block_size=32)
    assert (limits.num_blocks, limits.block_size, limits.max_model_len) == (300, 32, 4096)


def test_memory_that_was_asked_for():
    assert sized(kv_cache_memory="2MiB").num_blocks == 2 * 2**20 // (16 * 256)


def test_by_default_a_share_of_what_is_free():
    assert sized(free_memory=100 * 2**20, max_num_seqs=1000).num_blocks == 40 * 2**20 // (16 * 256)


def test_by_default_no_more_than_requests_can_fill():
    assert sized(free_memory=1000 * GIB, max_num_seqs=3, max_model_len=1000).num_blocks == 3 * 63 + 1


def test_the_other_options_reach_the_scheduler():
    limits = sized(policy="priority", max_bypass=3, max_num_batched_tokens=77, watermark=0.1, max_num_seqs=5)
    assert (limits.policy, limits.max_bypass) == ("priority", 3)
    assert (limits.max_num_batched_tokens, limits.watermark, limits.max_num_seqs) == (77, 0.1, 5)
    config = size_cache(EngineConfig(), tiny_config(eos_token_ids=(4, 5)), bytes_per_element=4, free_memory=GIB)
    assert config.eos_token_ids == (4, 5)


def test_a_length_that_does_not_fit_is_refused_with_numbers():
    """CASES B001, B138: a pool for 128 tokens and max_model_len 1000."""
    with pytest.raises(InvalidConfig) as refused:
        sized(num_blocks=9, max_model_len=1000)
    message = str(refused.value)
    for said in ("1000", "num_blocks 9", "room for 128", "max_model_len to 128", "256KiB", "num_blocks 64"):
        assert said in message
    assert sized(num_blocks=64, max_model_len=1000).max_model_len == 1000
    assert sized(kv_cache_memory="256KiB", max_model_len=1000).max_model_len == 1000
    assert sized(num_blocks=9, max_model_len=128).max_model_len == 128


def test_the_models_own_length_is_lowered_with_a_warning(caplog):
    """CASES B127: a long context and little memory still start, and say what was lowered and how to raise it."""
    with caplog.at_level(logging.WARNING):
        limits = sized(free_memory=2**20)
    assert limits.max_model_len == (limits.num_blocks - 1) * 16 < 4096
    (record,) = caplog.records
    for said in (str(limits.max_model_len), "4096", "kv_cache_memory"):
        assert said in record.getMessage()


def test_a_length_above_the_models_is_refused():
    with pytest.raises(InvalidConfig, match="4096"):
        sized(max_model_len=4097)


@pytest.mark.parametrize("options", [{"num_blocks": 10**6}, {"kv_cache_memory": "2GiB"}])
def test_a_cache_that_is_larger_than_what_is_free_is_refused(options):
    with pytest.raises(InvalidConfig, match=r"1024MiB of memory are free|1GiB of memory are free"):
        sized(**options)


@pytest.mark.parametrize(("options", "free"), [({"kv_cache_memory": "4KiB"}, GIB), ({}, 1000)])
def test_a_cache_without_room_for_one_block_is_refused(options, free):
    with pytest.raises(InvalidConfig, match="too small"):
        sized(free, **options)


# ---- a model in a folder


@pytest.fixture
def folder(tmp_path):
    config = tiny_config()
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "max_position_embeddings": 512,
                "rms_norm_eps": config.rms_norm_eps,
                "eos_token_id": 100,
            }
        )
    )
    save_file(RandomCheckpoint(config).tensors, tmp_path / "model.safetensors")
    return tmp_path


def rewrite(folder, change):
    tensors = RandomCheckpoint(tiny_config()).tensors
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_memory_on_the_host():
    limits = sized(num_blocks=300, preemption="swap", kv_host_memory="2MiB")
    assert (limits.preemption, limits.host_blocks) == ("swap", 2 * 2**20 // (16 * 256))
    assert sized(num_blocks=300).host_blocks == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"preemption": "swap"}, "set kv_host_memory"),
        ({"preemption": "auto"}, "set kv_host_memory"),
        ({"kv_host_memory": "2GiB"}, "more than the 1023MiB that are free"),
        ({"preemption": "swap", "kv_host_memory": "1KiB"}, "less than one block, 4KiB"),
        ({"preemption": "swap", "kv_host_memory": "2GiB"}, "more than the 1023MiB that are free"),
    ],
)
def test_what_cannot_be_on_the_host_is_refused(options, said):
    with pytest.raises(InvalidConfig, match=said):
        sized(num_blocks=300, **options)


def windowed(**options):
    """Two layers with a window of 64 tokens and one without: groups of one layer."""
    model = tiny_config(max_position_embeddings=4096, num_layers=3, layer_windows=(64, 64, None))
    return size_cache(EngineConfig(**options), model, bytes_per_element=4, free_memory=GIB)


def test_a_window_holds_no_more_than_it_and_a_step_need():
    """4096 tokens: 256 blocks, and in each of two windows 63 + 100 tokens over at most 12 blocks."""
    limits = windowed(kv_cache_memory="1MiB", max_num_batched_tokens=100)
    assert limits.kv_groups == ("window:64", "window:64", "full")
    assert limits.num_blocks == 2**20 // (16 * 128)
    most = 256 + 2 * 12
    assert windowed(num_blocks=most + 1, max_num_batched_tokens=100).max_model_len == 4096
    assert windowed(num_blocks=most, max_num_batched_tokens=100).max_model_len == 4080
    with pytest.raises(InvalidConfig, match="lower max_model_len to 4080"):
        windowed(num_blocks=most, max_num_batched_tokens=100, max_model_len=4096)
    with pytest.raises(InvalidConfig, match="4 blocks or more"):
        windowed(num_blocks=3)


def test_requests_through_scheduler_and_executor(folder):
    seen = []
    executor, limits, model = load_executor(
        EngineConfig(model=str(folder), max_num_seqs=4, num_blocks=100), progress=lambda *args: seen.append(args)
    )
    assert model.vocab_size == 101
    assert limits.eos_token_ids == (100,)
    assert [done for _, done, _ in seen] == list(range(1, 22))
    assert {total for _, _, total in seen} == {21}
    scheduler = Scheduler(limits)
    tokens = {str(i): [] for i in range(6)}
    for name in tokens:
        prompt = np.random.default_rng(int(name)).integers(0, 100, 30)
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        scheduler.add_request(Request(name, prompt, sampling))
    while scheduler.has_work():
        output = scheduler.schedule(0.0)
        for name, new in scheduler.update_from_output(output, executor.execute(output), 0.0).tokens().items():
            tokens[name] += new
    assert {len(t) for t in tokens.values()} == {20}
    assert len({tuple(t) for t in tokens.values()}) == 6
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.execute(output)


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no tensor 'model.layers.1.mlp.up_proj.weight'"):
        load_executor(EngineConfig(model=str(folder)))


def test_a_tensor_of_another_shape_is_named(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(47, np.float32)}))
    with pytest.raises(ModelError, match=r"'model.norm.weight' has shape \(47,\), the configuration wants \(48,\)"):
        load_executor(EngineConfig(model=str(folder)))


def test_what_cannot_work_is_refused_before_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr("kvern.models.registry.load_model", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(InvalidConfig, match="max_model_len"):
        load_executor(EngineConfig(model=str(folder), num_blocks=4, max_model_len=512))
    monkeypatch.setattr("kvern.executor.inline.available_memory", lambda: 100_000)
    with pytest.raises(
        InvalidConfig, match=r"weights need \d+KiB in float32, 98KiB of memory are free; dtype bfloat16"
    ):
        load_executor(EngineConfig(model=str(folder)))


def test_the_cache_gets_a_share_of_what_the_weights_leave(folder, monkeypatch):
    weights = 4 * sum(tensor.size for tensor in RandomCheckpoint(tiny_config()).tensors.values())
    monkeypatch.setattr("kvern.executor.inline.available_memory", lambda: weights + 10 * 2**20)
    assert load_executor(EngineConfig(model=str(folder)))[1].num_blocks == 4 * 2**20 // (16 * 256)


def test_a_tied_embedding_counts_twice(folder, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    weights = 4 * sum(tensor.size for tensor in RandomCheckpoint(tiny_config()).tensors.values())
    monkeypatch.setattr("kvern.executor.inline.available_memory", lambda: weights + 10 * 2**20)
    assert load_executor(EngineConfig(model=str(folder)))[1].num_blocks == 4 * 2**20 // (16 * 256)


def test_bfloat16_halves_a_token_in_the_cache(folder):
    blocks = []
    for dtype in ("float32", "bfloat16", "auto"):
        config = EngineConfig(model=str(folder), dtype=dtype, kv_cache_memory="1MiB")
        blocks.append(load_executor(config)[1].num_blocks)
    assert blocks == [256, 512, 256]


def test_the_toy_model_needs_no_torch():
    script = """
import sys
from kvern.config import EngineConfig
from kvern.executor.inline import load_executor
executor, limits, model = load_executor(EngineConfig(model="toy:history-hash", num_blocks=9, max_model_len=100))
print(type(executor).__name__, limits.num_blocks, limits.max_model_len, model.vocab_size, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["HistoryHashExecutor", "9", "100", "259", "False"], done.stderr
