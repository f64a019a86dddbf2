"""The front's end of the socket: nothing that is to be sent stays behind, whenever the engine connects."""

from __future__ import annotations

import asyncio
import select
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvern.engine.client import EngineTransport
from kvern.engine.messages import Control, EngineProgress, FromEngine, ToEngine


class ConnectsAt:
    """A socket to which the engine connects at the end of call number `at`, seen by the system, not yet by the socket:
    only what is called next takes notice."""

    def __init__(self, socket: zmq.Socket[bytes], at: int, engine: zmq.Socket[bytes], address: str) -> None:
        self._socket, self._left, self._engine, self._address = socket, at, engine, address

    def _connect_in_turn(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._engine.connect(self._address)
            select.select([self._socket.getsockopt(zmq.FD)], [], [], 5)

    def send(self, data: bytes, flags: int) -> None:
        try:
            self._socket.send(data, flags)
        finally:
            self._connect_in_turn()

    def recv(self, flags: int) -> bytes:
        try:
            return self._socket.recv(flags)
        finally:
            self._connect_in_turn()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes], str]]:
    """The front's socket, bound; the engine's, not yet connected; the address."""
    context = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        front, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        front.linger = engine.linger = 0
        engine.rcvtimeo = 5000
        front.bind(f"ipc://{folder}/engine")
        yield front, engine, f"ipc://{folder}/engine"
        front.close()
        engine.close()
        context.term()


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_what_waits_is_sent_whenever_the_engine_connects(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes], str], at: int
) -> None:
    front, engine, address = pair

    async def meet() -> tuple[ToEngine, FromEngine]:
        process: Any = None  # not part of this
        transport = EngineTransport(ConnectsAt(front, at, engine, address), "", process)  # type: ignore[arg-type]
        heard: asyncio.Future[FromEngine] = asyncio.get_running_loop().create_future()
        transport.start_reading(heard.set_result, heard.set_exception)
        transport.send(Control(call_id=1, name="ping"))
        try:
            told = msgspec.msgpack.decode(await asyncio.to_thread(engine.recv), type=ToEngine)
            engine.send(msgspec.msgpack.encode(EngineProgress("load model", 1.0)))
            return told, await asyncio.wait_for(heard, 5)
        finally:
            asyncio.get_running_loop().remove_reader(front.getsockopt(zmq.FD))

    told, heard = asyncio.run(meet())
    assert told == Control(call_id=1, name="ping")
    assert heard == EngineProgress("load model", 1.0)
