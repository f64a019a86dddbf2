"""Kinds of attention as the cache sees them. Each is one small file; a model has one block table per group.

Multi-head latent attention (MLA) is no kind of its own: it writes something else into a block, and keeps and forgets as
full attention does.
"""

from __future__ import annotations

from collections.abc import Callable

from kvern.cache.groups.base import CacheGroup
from kvern.cache.groups.chunked_local import ChunkedLocal
from kvern.cache.groups.full import FullAttention
from kvern.cache.groups.mamba import Mamba
from kvern.cache.groups.window import SlidingWindow

__all__ = ["CacheGroup", "ChunkedLocal", "FullAttention", "Mamba", "SlidingWindow", "make_group"]

_KINDS: dict[str, Callable[[int], CacheGroup]] = {"full": FullAttention, "mamba": Mamba}
_KINDS_OF_A_SIZE: dict[str, Callable[[int, int], CacheGroup]] = {"window": SlidingWindow, "chunked_local": ChunkedLocal}


def make_group(spec: str, block_size: int) -> CacheGroup:
    """ "full", "mamba", "window:N" (N = how many tokens, itself included, a token sees) or "chunked_local:N" (N = how
    many tokens a chunk has). Raises ValueError."""
    kind, _, argument = spec.partition(":")
    if kind in _KINDS and not argument:
        return _KINDS[kind](block_size)
    if kind in _KINDS_OF_A_SIZE and argument.isdigit() and int(argument) > 0:
        return _KINDS_OF_A_SIZE[kind](block_size, int(argument))
    known = ", ".join([*_KINDS, *(f"{kind}:N" for kind in _KINDS_OF_A_SIZE)])
    raise ValueError(f"kv_groups: unknown group {spec!r}; there are {known}")
