"""Kinds of attention as the cache sees them. Each is one small file; a model has one block table per group."""

from __future__ import annotations

from kvern.cache.groups.base import CacheGroup
from kvern.cache.groups.full import FullAttention
from kvern.cache.groups.window import SlidingWindow

__all__ = ["CacheGroup", "FullAttention", "SlidingWindow", "make_group"]


def make_group(spec: str, block_size: int) -> CacheGroup:
    """ "full" or "window:N", N = how many tokens, itself included, a token sees. Raises ValueError."""
    kind, _, argument = spec.partition(":")
    if kind == "full" and not argument:
        return FullAttention(block_size)
    if kind == "window" and argument.isdigit() and int(argument) > 0:
        return SlidingWindow(block_size, int(argument))
    raise ValueError(f"kv_groups: unknown group {spec!r}; there are full and window:N")
