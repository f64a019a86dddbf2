"""Cache events over ZeroMQ, with sequence numbers and a replay buffer.

A PUB socket sends one message for each step in which something happened:

    topic | sequence number, 8 bytes big-endian, from 0 without gaps | msgpack [time, [events]]

Who has missed some asks the replay socket (a ROUTER; use a REQ or DEALER): it sends a sequence number, 8 bytes
big-endian, and gets every buffered message from there on as (number | msgpack), then (-1 as 8 bytes signed | empty).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from kvern.cache.events import CacheEvent
from kvern.config import InvalidConfig

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """time: seconds on the engine's monotonic clock."""

    time: float
    events: list[CacheEvent]


class KVEventPublisher:
    """Binds `endpoint` and, if given, `replay_endpoint`. Raises InvalidConfig if it cannot.

    The replay socket is served by a thread of its own, which ends with close()."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, topic: str = "kv-events", buffer_steps: int = 10_000
    ) -> None:
        self._context = zmq.Context()
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()  # of the buffer
        self._socket = self._bind(zmq.PUB, endpoint, "kv_events")
        if replay_endpoint is not None:
            replay = self._bind(zmq.ROUTER, replay_endpoint, "kv_events_replay")
            threading.Thread(target=self._serve_replay, args=(replay,), daemon=True, name="kv-replay").start()

    def publish(self, events: Sequence[CacheEvent], now: float) -> None:
        """One message, if there is something to tell. Never waits for a subscriber."""
        if not events:
            return
        payload = self._encoder.encode(EventBatch(now, list(events)))
        with self._lock:
            number = self._sequence
            self._sequence += 1
            self._buffer.append((number, payload))
        self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._context.term()  # wakes the replay thread, and returns when it has closed its socket

    def _bind(self, kind: int, endpoint: str, option: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise InvalidConfig(f"{option}: cannot listen at {endpoint}: {exc}") from None
        return socket

    def _serve_replay(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                *envelope, start = socket.recv_multipart()
                with self._lock:
                    found = [entry for entry in self._buffer if entry[0] >= int.from_bytes(start[:8], "big")]
                for number, payload in found:
                    socket.send_multipart([*envelope, number.to_bytes(8, "big"), payload])
                socket.send_multipart([*envelope, END_OF_REPLAY, b""])
            except zmq.ContextTerminated:
                socket.close()
                return
