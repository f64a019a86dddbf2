"""From options to an executor that computes in this process: find the model, size the cache, load the weights."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvern.cache.connectors import SchedulerConnector
from kvern.cache.groups import make_group
from kvern.config import (
    DEFAULT_SPECULATIVE_TOKENS,
    EngineConfig,
    InvalidConfig,
    ModelConfig,
    SchedulerConfig,
    parse_bytes,
)
from kvern.executor.base import Executor
from kvern.executor.file_connector import FileConnector, FileWorker
from kvern.executor.machine import available_memory, usable_cores
from kvern.layers.weights import Progress
from kvern.runner.cache_layout import cache_layout
from kvern.runner.costs import measure_costs
from kvern.runner.disk_store import DiskStore
from kvern.runner.model_runner import ModelRunner
from kvern.speculative.ngram import NgramProposer, Proposer
from kvern.step import ModelRunnerOutput, SchedulerOutput
from kvern.weights.checkpoint import Checkpoint, open_checkpoint
from kvern.weights.config import read_model_config
from kvern.weights.files import ModelFiles
from kvern.weights.hub import resolve_model
from kvern.weights.identity import fingerprint

if TYPE_CHECKING:
    from kvern.models.registry import Model

logger = logging.getLogger(__name__)

_BYTES = {"float32": 4, "bfloat16": 2}
_CACHE_SHARE = 0.4  # of the memory that is free beside the weights, at most
_LARGEST_DEFAULT_CACHE = 4 * 2**30
_BLOCK_FORM = "reference 1"  # how a block's bytes are laid out: files of another form are not read


class InlineExecutor:
    """Computes steps in the thread that calls it."""

    def __init__(self, runner: ModelRunner, connector: SchedulerConnector | None = None) -> None:
        self._runner: ModelRunner | None = runner
        self._connector = connector

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self._runner is None:
            raise RuntimeError("the executor was shut down")
        return self._runner.execute(output)

    def costs(self) -> tuple[float, float] | None:
        return None if self._runner is None else measure_costs(self._runner)

    def stored_blocks(self) -> list[str]:
        store = self._runner.mover.store if self._runner is not None else None
        return [] if store is None else store.names()

    def scheduler_connector(self) -> SchedulerConnector | None:
        return self._connector

    def shutdown(self) -> None:
        self._runner = None


def load_executor(
    config: EngineConfig, *, progress: Progress | None = None
) -> tuple[Executor, SchedulerConfig, ModelConfig]:
    """The executor for `config`, the scheduler's limits, and what the model says of itself.

    What cannot work is refused before weights are read. Raises InvalidConfig naming the option to change; a model
    that cannot be found or read is one too (ModelError).
    """
    files = resolve_model(config.model)
    model_config = read_model_config(files)
    if files.kind == "toy":
        return _load_toy(config, model_config)
    checkpoint = open_checkpoint(files)
    dtype = "float32" if config.dtype == "auto" else config.dtype
    free = _free_beside_weights(checkpoint, model_config, dtype)
    limits = size_cache(config, model_config, bytes_per_element=_BYTES[dtype], free_memory=free)

    from kvern.kernels.ops import load_ops
    from kvern.models.registry import load_model

    ops = load_ops(config.kernels, dtype=dtype, threads=config.threads or usable_cores())
    model = load_model(model_config, checkpoint, ops, max_model_len=limits.max_model_len, progress=progress)
    store = None
    if config.kv_disk is not None:
        store = _open_store("kv_disk", config.kv_disk, files, model, limits)
    runner = ModelRunner(model, limits, make_proposer(config, limits), store=store)
    connector = None
    if config.kv_connector is not None:
        if len(limits.kv_groups) > 1:
            raise InvalidConfig(f"kv_connector: {model_config.architecture} has several cache groups, file needs one")
        folder = config.kv_connector.removeprefix("file:")
        shared = _open_store("kv_connector", folder, files, model, limits)
        runner.connector = FileWorker(shared, ops, runner.mover.slots)
        connector = FileConnector(shared, limits.block_size)
    return InlineExecutor(runner, connector), limits, model_config


def _load_toy(config: EngineConfig, model_config: ModelConfig) -> tuple[Executor, SchedulerConfig, ModelConfig]:
    from kvern.testing.toy import HistoryHashExecutor

    for option in ("kv_disk", "kv_connector"):
        if getattr(config, option) is not None:
            raise InvalidConfig(f"{option}: {config.model} has no keys and values to keep in files")
    limits = size_cache(config, model_config, bytes_per_element=4, free_memory=available_memory())
    return HistoryHashExecutor(limits, proposer=make_proposer(config, limits)), limits, model_config


def _free_beside_weights(checkpoint: Checkpoint, model: ModelConfig, dtype: str) -> int:
    """Bytes that will be free once the weights are loaded. Raises InvalidConfig if they cannot be."""
    elements = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    if model.tie_word_embeddings:
        elements += model.vocab_size * model.hidden_size  # kept twice: to look up rows, and packed for the logits
    need = elements * _BYTES[dtype]
    free = available_memory()
    if need > free:
        hint = "; dtype bfloat16 needs half of that" if dtype == "float32" else ""
        raise InvalidConfig(f"the weights need {_size(need)} in {dtype}, {_size(free)} of memory are free{hint}")
    return free - need


def size_cache(
    config: EngineConfig, model: ModelConfig, *, bytes_per_element: int, free_memory: int
) -> SchedulerConfig:
    """The scheduler's limits, with a cache that fits into `free_memory` bytes.

    num_blocks, else kv_cache_memory, else a share of the free memory, of which no more than max_num_seqs requests of
    max_model_len tokens can fill. A max_model_len that was asked for and does not fit is refused; the model's own is
    lowered, with a warning. Raises InvalidConfig.
    """
    layout = cache_layout(model)
    groups = [make_group(spec, config.block_size) for spec in layout.groups]
    block_bytes = config.block_size * model.kv_bytes_per_token(bytes_per_element, layout.num_slots)

    def blocks_for(num_tokens: int) -> int:
        return sum(group.most_held(num_tokens, config.max_num_batched_tokens) for group in groups)

    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise InvalidConfig(
            f"max_model_len {longest} is above the {model.max_position_embeddings} positions the model was made for"
        )
    if config.num_blocks is not None:
        num_blocks, source = config.num_blocks, f"num_blocks {config.num_blocks}"
    elif config.kv_cache_memory is not None:
        size = parse_bytes(config.kv_cache_memory, "kv_cache_memory")
        num_blocks, source = size // block_bytes, f"kv_cache_memory {config.kv_cache_memory}"
    else:
        share = min(int(free_memory * _CACHE_SHARE), _LARGEST_DEFAULT_CACHE)
        num_blocks = min(share // block_bytes, blocks_for(longest) * config.max_num_seqs + 1)
        source = f"{_size(share)}, the default share of {_size(free_memory)} free memory,"
    if num_blocks * block_bytes > free_memory:
        raise InvalidConfig(
            f"{source} makes a KV cache of {_size(num_blocks * block_bytes)}, {_size(free_memory)} of memory are free"
        )
    fewest = 1 + len(groups)  # block 0 is never used
    if num_blocks < fewest:
        raise InvalidConfig(
            f"{source} is too small for a KV cache: it needs {fewest} blocks or more, of {_size(block_bytes)} each; "
            "set kv_cache_memory or num_blocks"
        )
    room = bisect_right(range(longest + 1), num_blocks - 1, key=blocks_for) - 1
    if longest > room:
        need = (blocks_for(longest) + 1) * block_bytes
        text = f"{longest} tokens need a KV cache of {_size(need)}, {source} has room for {room}"
        if config.max_model_len is not None:
            raise InvalidConfig(
                f"max_model_len {text}; lower max_model_len to {room}, or raise kv_cache_memory to {_size(need)} "
                f"(num_blocks {blocks_for(longest) + 1})"
            )
        logger.warning("max_model_len lowered to %d: the model's %s; kv_cache_memory sets it", room, text)
        longest = room
    logger.info(
        "KV cache: %d blocks of %d tokens, %s; max_model_len %d",
        num_blocks, config.block_size, _size(num_blocks * block_bytes), longest,
    )  # fmt: skip
    derived = {
        "num_blocks": num_blocks,
        "host_blocks": _host_blocks(config, block_bytes, free_memory - num_blocks * block_bytes),
        "disk_blocks": _disk_blocks(config, block_bytes),
        "record_cache_events": config.kv_events is not None,
        "max_model_len": longest,
        "kv_groups": layout.groups,
        "eos_token_ids": model.eos_token_ids,
    }
    derived |= _looking_ahead(config)
    same = {name: getattr(config, name) for name in SchedulerConfig.__struct_fields__ if hasattr(config, name)}
    return SchedulerConfig(**(same | derived))


def _disk_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks of the disk tier. Raises InvalidConfig."""
    if config.kv_disk is None:
        return 0
    if not config.enable_prefix_caching:
        raise InvalidConfig("kv_disk keeps cached prefixes, and enable_prefix_caching is off")
    size = parse_bytes(config.kv_disk_size, "kv_disk_size")
    if size < block_bytes:
        raise InvalidConfig(f"kv_disk_size {config.kv_disk_size} is less than one block, {_size(block_bytes)}")
    return size // block_bytes


def _open_store(option: str, folder: str, files: ModelFiles, model: Model, limits: SchedulerConfig) -> DiskStore:
    """Files of blocks of exactly these weights in exactly this form. Raises InvalidConfig naming `option`."""
    form = repr((_BLOCK_FORM, model.ops.dtype, limits.block_size, limits.kv_groups, model.config))
    name = sha256((fingerprint(files) + form).encode()).hexdigest()[:32]
    layout = cache_layout(model.config)
    per_token = model.config.kv_bytes_per_token(_BYTES[model.ops.dtype], layout.num_slots)
    try:
        return DiskStore(Path(folder), name, limits.block_size * per_token)
    except OSError as exc:
        raise InvalidConfig(f"{option}: {folder} cannot be used: {exc.strerror}") from None


def _looking_ahead(config: EngineConfig) -> dict[str, Any]:
    """The options of drafts and of steps planned ahead. Raises InvalidConfig if they cannot be together."""
    planned_ahead = config.async_scheduling == "on"  # "auto": planning would take a core from the kernels
    if config.speculative == "none":
        if config.num_speculative_tokens is not None:
            raise InvalidConfig("num_speculative_tokens is used by speculative ngram only, and speculative is none")
        return {"num_speculative_tokens": 0, "async_scheduling": planned_ahead}
    if planned_ahead:
        raise InvalidConfig(
            f"async_scheduling on cannot be used with speculative {config.speculative}: a step is then planned before "
            "its drafts are known; set one of the two to off"
        )
    drafts = config.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS
    need = config.max_num_seqs * (1 + drafts)
    if config.max_num_batched_tokens < need:
        raise InvalidConfig(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is too small for speculation: max_num_seqs "
            f"{config.max_num_seqs} requests with {drafts} drafts each take {need} tokens a step; raise it, or lower "
            "max_num_seqs or num_speculative_tokens"
        )
    return {"num_speculative_tokens": drafts, "async_scheduling": False}


def make_proposer(config: EngineConfig, limits: SchedulerConfig) -> Proposer | None:
    """Who guesses how a request goes on, if anybody."""
    return NgramProposer(limits.num_speculative_tokens) if config.speculative == "ngram" else None


def _host_blocks(config: EngineConfig, block_bytes: int, free_memory: int) -> int:
    """Blocks of the host's part of the cache. Raises InvalidConfig."""
    if config.kv_host_memory is None:
        if config.preemption != "recompute":
            raise InvalidConfig(f"preemption {config.preemption} needs room to swap to; set kv_host_memory")
        return 0
    size = parse_bytes(config.kv_host_memory, "kv_host_memory")
    if size > free_memory:
        raise InvalidConfig(
            f"kv_host_memory {config.kv_host_memory} is more than the {_size(free_memory)} that are free"
        )
    if size < block_bytes:
        raise InvalidConfig(f"kv_host_memory {config.kv_host_memory} is less than one block, {_size(block_bytes)}")
    return size // block_bytes


def _size(num_bytes: int) -> str:
    """A size that `kv_cache_memory` would take back, rounded up."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= 10 * size or unit == "KiB":
            return f"{-(-num_bytes // size)}{unit}"
    raise AssertionError
