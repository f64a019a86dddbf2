"""Which layers share a block table, and which share memory.

Layers that see equally far back keep and forget alike. They are put into *groups* of up to `num_slots` layers, and a
request has one block table for each group. All groups take blocks from one pool: a block belongs to one group at a
time, and holds the keys and values of that group's layers. So the cache has a *slot* for each layer of a group, not
for each layer of the model, and a slot serves one layer of every group. Six layers, every third of which sees all:

                     block 1       block 2       block 3     ...
                   (group "full") (window)      (window)
        slot 0      layer 2       layer 0       layer 0
        slot 1      layer 5       layer 1       layer 1
                                                              and layers 3, 4 in a second window group

The idea is that of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from typing import NamedTuple

from kvern.config import ModelConfig


class CacheLayout(NamedTuple):
    groups: tuple[str, ...]  # as in SchedulerConfig.kv_groups
    group_of: tuple[int, ...]  # of each layer
    slot_of: tuple[int, ...]  # of each layer
    num_slots: int


def cache_layout(model: ModelConfig) -> CacheLayout:
    """Groups of equal size, kinds in the order in which they first appear.

    The last group of a kind may be smaller, which wastes its other slots; many small groups waste nothing, but each
    costs the scheduler a table per request. The size is the one with the fewest slots in all groups plus groups."""
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(model.windows):
        layers.setdefault(window, []).append(layer)

    def price(size: int) -> tuple[int, int]:
        num_groups = sum(-(-len(same) // size) for same in layers.values())
        return num_groups * (size + 1), num_groups * size

    num_slots = min(range(1, max(map(len, layers.values())) + 1), key=price)
    groups: list[str] = []
    group_of, slot_of = [0] * model.num_layers, [0] * model.num_layers
    for window, same in layers.items():
        for place, layer in enumerate(same):
            if place % num_slots == 0:
                groups.append("full" if window is None else f"window:{window}")
            group_of[layer], slot_of[layer] = len(groups) - 1, place % num_slots
    return CacheLayout(tuple(groups), tuple(group_of), tuple(slot_of), num_slots)
