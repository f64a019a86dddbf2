"""Where layers keep their keys and values: which share a block table, which memory, and how blocks move."""

import ctypes
import platform
import sys

import numpy as np
import pytest

from kvern.cache.groups import make_group
from kvern.kernels.ops import load_ops
from kvern.runner.cache_layout import cache_layout
from kvern.runner.costs import measure_costs
from kvern.runner.model_runner import ModelRunner
from tests.native import engine
from tests.tiny_model import Driver, tiny_config, tiny_model


def layout(*windows):
    return cache_layout(tiny_config(num_layers=len(windows), layer_windows=windows))


def test_layers_that_are_all_alike_are_one_group():
    assert cache_layout(tiny_config(num_layers=3)) == (("full",), (0, 0, 0), (0, 1, 2), 3)
    assert cache_layout(tiny_config(num_layers=2, sliding_window=9)) == (("window:9",), (0, 0), (0, 1), 2)
    assert layout(None, None).groups == ("full",)


def test_gemma_3_with_18_layers_has_six_groups_of_three():
    found = layout(*([512] * 5 + [None]) * 3)
    assert found.groups == (*["window:512"] * 5, "full")
    assert found.num_slots == 3
    for group in range(6):
        layers = [layer for layer, g in enumerate(found.group_of) if g == group]
        assert sorted(found.slot_of[layer] for layer in layers) == [0, 1, 2]
        assert len({layer % 6 == 5 for layer in layers}) == 1


@pytest.mark.parametrize(
    ("windows", "groups", "slots"),
    [
        ([8] * 22 + [None] * 4, 7, 4),  # two slots of one group are wasted: better than 13 groups of two
        ([8] * 5 + [None] * 4, 2, 5),
        ([8, None], 2, 1),
        ([8, 16, None] * 4, 3, 4),
    ],
)
def test_group_sizes(windows, groups, slots):
    found = layout(*windows)
    assert (len(found.groups), found.num_slots) == (groups, slots)
    for spec, window in {("full", None), *((f"window:{w}", w) for w in windows if w)}:
        mine = [i for i, g in enumerate(found.group_of) if found.groups[g] == spec]
        assert mine == [i for i, w in enumerate(windows) if w == window]
    assert len(set(zip(found.group_of, found.slot_of, strict=True))) == len(windows)


def test_a_runner_refuses_groups_that_are_not_the_models():
    config = Driver(tiny_model()).config
    with pytest.raises(ValueError, match="cache groups"):
        ModelRunner(tiny_model(sliding_window=4), config)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 101, length).tolist()


WINDOWS = (20, None, 20)


@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_blocks_left_of_a_window_may_be_anybodys(chunk):
    """What a window no longer reaches is given back and may be overwritten, even with what is not finite."""
    model = tiny_model(num_layers=3, layer_windows=WINDOWS)
    driver = Driver(model)
    driver.add(0, prompt(100))
    want = driver.run(0, 30), driver.logits
    driver = Driver(model)
    driver.add(0, prompt(100))
    windows = [g for g, spec in enumerate(driver.config.kv_groups) if spec != "full"]
    group = make_group("window:20", 16)
    sampled = []
    while len(sampled) < 30:
        computed, known, table = driver.rows[0]
        for g in windows:
            for block in table[: group.first_needed(computed)]:
                for cache in driver.runner.mover.slots:
                    cache.arena[:, block + driver.pools[g]] = float("nan")
        result = driver.step({0: min(chunk, known - computed)})
        assert not result.errors
        sampled += result.token_ids[0, : result.count[0]].tolist()
    assert sampled == want[0]
    assert all(np.array_equal(driver.logits[key], line) for key, line in want[1].items())


def test_swapped_out_and_in_is_as_if_it_had_stayed():
    """Elsewhere on the device, at other places on the host; its old blocks are taken over in the same step."""
    model = tiny_model()
    driver = Driver(model)
    driver.add(0, prompt(60))
    want = driver.run(0, 12), driver.logits
    driver = Driver(model, host_blocks=9)
    driver.add(0, prompt(60))
    first = driver.run(0, 5)
    computed, _, old = driver.rows.pop(0)
    host = [7, 2, 9, 4, 1][: len(old)]
    driver.add(1, prompt(60, 1))
    driver.rows[1][2][:] = old[::-1]
    driver.step({1: 60}, preempted_rows=[0], blocks_to_swap_out=list(zip(old, host, strict=True)))
    back = [driver.free.pop() for _ in old]
    driver.add(3, prompt(60), output=first, computed=computed, blocks=back)
    moves = list(zip(host, back, strict=True))
    result = driver.step({3: 1}, blocks_to_swap_in=moves)
    assert [*first, int(result.token_ids[0, 0]), *driver.run(3, 6)] == want[0]
    for (row, position), line in driver.logits.items():
        assert row == 1 or np.array_equal(line, want[1][0, position])


def test_swaps_out_come_before_copies_and_copies_before_swaps_in():
    driver = Driver(tiny_model(), host_blocks=3)
    mover = driver.runner.mover
    for caches in (mover.slots, mover.host_slots):
        for i, cache in enumerate(caches):
            cache.arena.zero_()
            cache.arena[:, 1:4] += np.float32(10 * i + 100 * (caches is mover.host_slots))
            for block in (1, 2, 3):
                cache.arena[:, block] += block
    driver.step(
        {},
        blocks_to_swap_out=[(1, 1)],
        blocks_to_copy=[(2, 1), (1, 3)],
        blocks_to_swap_in=[(1, 2), (2, 4)],
        blocks_to_zero=[5],
    )
    for i, (here, there) in enumerate(zip(mover.slots, mover.host_slots, strict=True)):
        assert [float(here.arena[0, b].min()) - 10 * i for b in (1, 2, 3, 4)] == [2, 1, 1, 102]
        assert float(there.arena[1, 1].max()) == 10 * i + 1


def test_costs_are_measured_only_with_a_host_tier():
    model = tiny_model()
    assert measure_costs(Driver(model).runner) is None
    copy_block, compute_token = measure_costs(Driver(model, host_blocks=5).runner)
    assert 0 < copy_block < 0.1
    assert 0 < compute_token < 0.1


def resident(cache):
    """Bytes of a cache's memory that the system has provided."""
    memory = cache.memory
    pages = np.zeros(-(-memory.num_bytes // 4096), dtype=np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(memory.address, memory.num_bytes, pages.ctypes.data) == 0
    return int((pages & 1).sum()) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="Linux provides pages on request from 5.14 on",
)
def test_idle_time_provides_a_caches_memory_and_leaves_what_is_in_it():
    engine("", 1)  # skips where there are no native kernels
    ops = load_ops("native", dtype="bfloat16")
    caches = ops.allocate_kv_cache(num_layers=3, num_blocks=400, block_size=16, num_kv_heads=4, head_dim=64)
    assert resident(caches[0]) == 0
    caches[1].bytes[7] = 5
    assert list(ops.populate(caches, lambda: 0)) == [True] * 3 * 4  # of 2 MiB: a layer has 6.25
    assert resident(caches[0]) == caches[0].memory.num_bytes // 4096 * 4096
    assert (caches[1].bytes[7] == 5).all()
    assert not caches[0].bytes.any() and not caches[1].bytes[8:].any() and not caches[2].bytes.any()


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_idle_time_provides_a_little_more_memory_than_is_used(monkeypatch):
    engine("", 1)
    monkeypatch.setattr("kvern.kernels.cpu.ops._POPULATED_BYTES", 3 * (2 << 20))  # a piece of each layer
    ops = load_ops("native", dtype="bfloat16")
    caches = ops.allocate_kv_cache(num_layers=3, num_blocks=400, block_size=16, num_kv_heads=4, head_dim=64)
    used = 0
    populating = ops.populate(caches, lambda: used)
    assert [next(populating) for _ in range(5)] == [True] * 3 + [False] * 2
    used = 1
    assert [next(populating) for _ in range(5)] == [True] * 3 + [False] * 2
    used = 400
    assert list(populating) == [True] * 6


def test_idle_time_knows_which_blocks_have_been_used():
    driver = Driver(tiny_model())
    batch = driver.runner.batch
    assert batch.num_blocks_used == 0
    driver.add(0, [1, 2, 3])
    driver.run(0, 1)
    assert batch.num_blocks_used == 2  # the null block and one more
    driver.run(0, 30)
    assert batch.num_blocks_used == 4
