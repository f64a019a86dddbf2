"""Cache events: what is said is what can be hit, without gaps, and can be asked for again."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import zmq

from kvern.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvern.config import EngineConfig, InvalidConfig, SchedulerConfig
from kvern.engine.core import load_core
from kvern.engine.kv_events import END_OF_REPLAY, EventBatch, KVEventPublisher
from kvern.request import Request
from kvern.sampling_params import SamplingParams
from kvern.scheduler.scheduler import Scheduler
from kvern.testing.harness import own_tokens
from kvern.testing.toy import HistoryHashExecutor


def test_a_follower_knows_what_can_be_hit() -> None:
    """Whoever applies the events in order has the engine's own picture, at every step, whatever happens."""
    r = random.Random(5)
    config = SchedulerConfig(
        num_blocks=30, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, record_cache_events=True,
        kv_groups=("full", "window:8"),
    )  # fmt: skip
    scheduler, executor = Scheduler(config), HistoryHashExecutor(config)
    followed: dict[tuple[str, int], BlockStored] = {}
    stem, removals = own_tokens("stem", 40), 0
    for i in range(120):
        if i % 3 == 0 and i < 90:
            prompt = stem[: r.randint(1, 30)] + own_tokens(str(i), r.randint(1, 6))
            sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            scheduler.add_request(Request(f"r{i}", prompt, sampling))
        if i % 7 == 0 and scheduler.num_running:
            scheduler.preempt(scheduler.running()[0].id)
        output = scheduler.schedule(0.0)
        scheduler.update_from_output(output, executor.execute(output), 0.0)
        for event in scheduler.take_cache_events():
            if isinstance(event, BlockStored):
                assert (event.block_hash, event.group) not in followed and len(event.token_ids) == 4
                followed[event.block_hash, event.group] = event
            else:
                assert isinstance(event, BlockRemoved)
                del followed[event.block_hash, event.group]
                removals += 1
        real = {(key[:32].hex(), key[32]) for _, key in scheduler.state.cache.index.items()}
        assert followed.keys() == real
    assert removals > 10 and not scheduler.has_work()
    assert scheduler.state.cache.reset() and scheduler.take_cache_events() == [AllBlocksCleared()]


def test_parents_make_a_chain() -> None:
    config = SchedulerConfig(num_blocks=30, block_size=4, record_cache_events=True)
    scheduler = Scheduler(config)
    scheduler.add_request(Request("r", list(range(3, 16)), SamplingParams(max_tokens=1), lora="x"))
    scheduler.schedule(0.0)
    stored = scheduler.take_cache_events()
    assert [e.parent for e in stored] == [None, stored[0].block_hash, stored[1].block_hash]  # type: ignore[union-attr]
    assert [e.token_ids for e in stored] == [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]]  # type: ignore[union-attr]
    assert {e.lora for e in stored} == {"x"}  # type: ignore[union-attr]


def test_nothing_is_recorded_unless_asked_for() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=30, block_size=4))
    scheduler.add_request(Request("r", list(range(3, 16)), SamplingParams(max_tokens=1)))
    scheduler.schedule(0.0)
    assert scheduler.take_cache_events() == []


EVENTS: list[CacheEvent] = [BlockStored("aa", None, [1, 2], None, 0), BlockRemoved("aa", 0), AllBlocksCleared()]


def test_messages_and_replay(tmp_path: Path) -> None:
    context = zmq.Context()
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", buffer_steps=3)
    try:
        live = context.socket(zmq.SUB)
        live.connect(f"ipc://{tmp_path}/events")
        live.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        live.setsockopt(zmq.RCVTIMEO, 5000)
        while not live.poll(20):  # a subscription takes a moment to arrive
            publisher.publish(EVENTS[:1], 0.5)
        publisher.publish([], 1.0)
        publisher.publish(EVENTS, 1.5)
        numbers, batches = [], []
        while not batches or batches[-1].time != 1.5:
            topic, number, payload = live.recv_multipart()
            assert topic == b"kv-events"
            numbers.append(int.from_bytes(number, "big"))
            batches.append(msgspec.msgpack.decode(payload, type=EventBatch))
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and batches[-1].events == EVENTS
        ask = context.socket(zmq.DEALER)
        ask.connect(f"ipc://{tmp_path}/replay")
        ask.setsockopt(zmq.RCVTIMEO, 5000)
        ask.send((numbers[-1]).to_bytes(8, "big"))
        number, payload = ask.recv_multipart()
        assert int.from_bytes(number, "big") == numbers[-1]
        assert msgspec.msgpack.decode(payload, type=EventBatch).events == EVENTS
        assert ask.recv_multipart() == [END_OF_REPLAY, b""]
    finally:
        publisher.close()
        publisher.close()
        context.destroy(linger=0)


def test_an_address_that_cannot_be_is_said(tmp_path: Path) -> None:
    publisher = KVEventPublisher(f"ipc://{tmp_path}/taken")
    try:
        with pytest.raises(InvalidConfig, match="kv_events: cannot listen at nonsense"):
            KVEventPublisher("nonsense")
    finally:
        publisher.close()


def test_replay_without_events_is_refused() -> None:
    config = EngineConfig(model="toy:history-hash", num_blocks=10, max_model_len=100, kv_events_replay="ipc:///nowhere")
    with pytest.raises(InvalidConfig, match="kv_events_replay needs kv_events"):
        load_core(config)
