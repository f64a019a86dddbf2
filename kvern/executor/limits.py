"""From options to the scheduler's limits: how large the cache and its tiers are, and what fits into them."""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import Any

from kvern.cache.groups import make_group
from kvern.config import (
    DEFAULT_SPECULATIVE_TOKENS,
    EngineConfig,
    InvalidConfig,
    ModelConfig,
    SchedulerConfig,
    parse_bytes,
)
from kvern.runner.cache_layout import cache_layout

logger = logging.getLogger(__name__)

_CACHE_SHARE = 0.4  # of the memory that is free beside the weights, at most
_LARGEST_DEFAULT_CACHE = 4 * 2**30


def size_cache(
    config: EngineConfig, model: ModelConfig, *, bytes_per_element: float, free_memory: int
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
        source = f"{size_text(share)}, the default share of {size_text(free_memory)} free memory,"
    if num_blocks * block_bytes > free_memory:
        raise InvalidConfig(
            f"{source} makes a KV cache of {size_text(num_blocks * block_bytes)}, "
            f"{size_text(free_memory)} of memory are free"
        )
    fewest = 1 + len(groups)  # block 0 is never used
    if num_blocks < fewest:
        raise InvalidConfig(
            f"{source} is too small for a KV cache: it needs {fewest} blocks or more, of {size_text(block_bytes)} "
            "each; set kv_cache_memory or num_blocks"
        )
    room = bisect_right(range(longest + 1), num_blocks - 1, key=blocks_for) - 1
    if longest > room:
        need = (blocks_for(longest) + 1) * block_bytes
        text = f"{longest} tokens need a KV cache of {size_text(need)}, {source} has room for {room}"
        if config.max_model_len is not None:
            raise InvalidConfig(
                f"max_model_len {text}; lower max_model_len to {room}, or raise kv_cache_memory to {size_text(need)} "
                f"(num_blocks {blocks_for(longest) + 1})"
            )
        logger.warning("max_model_len lowered to %d: the model's %s; kv_cache_memory sets it", room, text)
        longest = room
    logger.info(
        "KV cache: %d blocks of %d tokens, %s; max_model_len %d",
        num_blocks, config.block_size, size_text(num_blocks * block_bytes), longest,
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


def _host_blocks(config: EngineConfig, block_bytes: int, free_memory: int) -> int:
    """Blocks of the host's part of the cache. Raises InvalidConfig."""
    if config.kv_host_memory is None:
        if config.preemption != "recompute":
            raise InvalidConfig(f"preemption {config.preemption} needs room to swap to; set kv_host_memory")
        return 0
    size = parse_bytes(config.kv_host_memory, "kv_host_memory")
    if size > free_memory:
        raise InvalidConfig(
            f"kv_host_memory {config.kv_host_memory} is more than the {size_text(free_memory)} that are free"
        )
    if size < block_bytes:
        raise InvalidConfig(f"kv_host_memory {config.kv_host_memory} is less than one block, {size_text(block_bytes)}")
    return size // block_bytes


def _disk_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks of the disk tier. Raises InvalidConfig."""
    if config.kv_disk is None:
        return 0
    if not config.enable_prefix_caching:
        raise InvalidConfig("kv_disk keeps cached prefixes, and enable_prefix_caching is off")
    size = parse_bytes(config.kv_disk_size, "kv_disk_size")
    if size < block_bytes:
        raise InvalidConfig(f"kv_disk_size {config.kv_disk_size} is less than one block, {size_text(block_bytes)}")
    return size // block_bytes


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
            "its drafts are known; use one of the two"
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


def size_text(num_bytes: int) -> str:
    """A size that `kv_cache_memory` would take back, rounded up."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= 10 * size or unit == "KiB":
            return f"{-(-num_bytes // size)}{unit}"
    raise AssertionError
