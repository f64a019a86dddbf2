"""The engine in a process of its own: `python -m kvern.engine.process ADDRESS`, started by AsyncClient only.

Life: connect to ADDRESS (a ZMQ PAIR the front has bound), get StartEngine, tell EngineProgress while loading, then
EngineReady, then one StepReport per step. With unfinished work the socket is emptied without waiting before each step;
without any, the loop prepares what later steps need, as long as there is any of it, then sleeps on the socket and uses
no CPU.

Ends: on Control("shutdown"), exit code 0; when loading or a step fails, after EngineFailure, exit code 1; at once when
the front is gone, which shows as the end of stdin, a pipe only the front holds open. Signals meant for the whole
service (ctrl-C, SIGTERM to the group) are the front's to handle: it decides how long running requests may go on.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from kvern.config import InvalidConfig
from kvern.engine.core import EngineCore, load_core
from kvern.engine.messages import (
    AbortRequests,
    AddRequest,
    Control,
    ControlReply,
    EngineDeadError,
    EngineFailure,
    EngineProgress,
    EngineReady,
    FromEngine,
    RequestUpdate,
    StartEngine,
    StepReport,
    ToEngine,
)
from kvern.log import setup_logging
from kvern.sampling_params import InvalidRequest

logger = logging.getLogger(__name__)

_LINGER_MS = 5000  # how long a last message may take to leave


class EngineProcess:
    """Reads the socket, drives the core, writes the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._drain_until: float | None = None  # set by shutdown: when the last requests are aborted

    def load(self, import_torch: bool) -> EngineCore:
        """Wait for StartEngine, build executor and scheduler, and say EngineReady."""
        if import_torch:  # seconds, well spent while the front finds the model
            with self._phase("import torch"):
                import kvern.kernels.reference  # noqa: F401  # imports torch, with its threads told to sleep at barriers
        message = self._decoder.decode(self._socket.recv())
        if not isinstance(message, StartEngine):
            raise TypeError(f"expected StartEngine, got {type(message).__name__}")
        config = message.config
        setup_logging(config.log_level, "engine")
        with self._phase("load model"):
            core, model_config = load_core(config)
        # What is loaded lives as long as the process: keep the collector from walking it during steps.
        gc.collect()
        gc.freeze()
        self.send(EngineReady(model_config, core.scheduler.config))
        return core

    def serve(self, core: EngineCore) -> None:
        """Step until told to shut down. Raises EngineDeadError when a step fails."""
        while self._drain_until is None or core.has_work():
            self._receive(core)
            if self._drain_until is not None and time.monotonic() >= self._drain_until:
                core.abort_all()
            if core.has_work():
                self.send(core.step())

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def _receive(self, core: EngineCore) -> None:
        """Handle all that has arrived; if there is nothing to do, wait for the next message."""
        idle = not core.has_work() and self._drain_until is None
        while idle and not self._socket.poll(0) and core.use_idle_time():
            pass
        flags = 0 if idle else zmq.NOBLOCK
        while True:
            try:
                data = self._socket.recv(flags)
            except zmq.Again:
                return
            flags = zmq.NOBLOCK
            try:
                message = self._decoder.decode(data)
            except msgspec.DecodeError as exc:
                self._refuse_unreadable(data, exc)
                continue
            if isinstance(message, AddRequest):
                self._add(core, message)
            elif isinstance(message, AbortRequests):
                core.abort(message.request_ids)
            elif isinstance(message, Control):
                self._control(core, message)

    def _add(self, core: EngineCore, add: AddRequest) -> None:
        if self._drain_until is not None:
            self._end_unadmitted(add.request_id, "abort", "the engine is shutting down")
            return
        try:
            core.add(add)
        except InvalidRequest as exc:
            if add.request_id in core:
                # An end for this id would end the live request instead. Fronts make ids unique, so only say it.
                logger.error("refused a second request %r: %s", add.request_id, exc)
            else:
                self._end_unadmitted(add.request_id, "error", str(exc))

    def _control(self, core: EngineCore, control: Control) -> None:
        result: Any = None
        if control.name == "stats":
            result = core.stats()
        elif control.name == "requests":
            result = core.admin.requests()
        elif control.name == "policy":
            result = core.admin.policy()
        elif control.name == "set_policy":
            try:
                result = core.admin.set_policy(control.arguments["policy"], control.arguments.get("options"))
            except InvalidConfig as exc:
                self.send(ControlReply(call_id=control.call_id, error=str(exc)))
                return
        elif control.name == "pins":
            result = core.admin.pins()
        elif control.name == "unpin":
            result = core.admin.unpin(control.arguments["pin_id"])
        elif control.name == "pin":
            try:
                result = core.admin.pin(**control.arguments)
            except InvalidRequest as exc:
                self.send(ControlReply(call_id=control.call_id, error=str(exc), param=exc.param))
                return
        elif control.name == "shutdown":
            self._drain_until = time.monotonic() + float(control.arguments.get("drain_seconds", 0.0))
            return  # the answer is that the process ends
        elif control.name != "ping":
            self.send(ControlReply(call_id=control.call_id, error=f"the engine knows no {control.name!r}"))
            return
        self.send(ControlReply(call_id=control.call_id, result=result))

    def _refuse_unreadable(self, data: bytes, error: Exception) -> None:
        """A message that is not one of ours hurts nobody; if it wanted to be a request, its owner hears of it."""
        logger.error("unreadable message: %s", error)
        try:
            message = msgspec.msgpack.decode(data)
        except msgspec.DecodeError:
            return
        if isinstance(message, dict) and isinstance(message.get("request_id"), str):
            self._end_unadmitted(message["request_id"], "error", str(error))

    def _end_unadmitted(self, request_id: str, finish_reason: str, error: str) -> None:
        update = RequestUpdate(finish_reason=finish_reason, error=error)
        self.send(StepReport(request_ids=[], token_ids=[], updates={request_id: update}, time=time.monotonic()))

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time a phase of loading, and tell the front when it has ended well."""
        started = time.monotonic()
        yield
        self.send(EngineProgress(name, time.monotonic() - started))


def _die_with_front() -> None:
    """End this process, without any ado, when the front's end of stdin closes: it exited, or was killed."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="front-watch", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Arguments: the address to connect to, and --import-torch if the model will surely need it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_front()
    setup_logging(process="engine")
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # a slow front must not stall the steps of all requests
    socket.linger = _LINGER_MS
    socket.connect(arguments[0])
    process = EngineProcess(socket)
    core = None
    code = 1
    try:
        core = process.load("--import-torch" in arguments)
        process.serve(core)
        code = 0
    except EngineDeadError as exc:  # logged where it happened
        process.send(EngineFailure(str(exc)))
    except InvalidConfig as exc:
        process.send(EngineFailure(str(exc), invalid_config=True))
    except Exception as exc:
        logger.exception("the engine cannot go on")
        process.send(EngineFailure(f"{type(exc).__name__}: {exc}"))
    finally:
        if core is not None:
            core.shutdown()
        socket.close()
        context.term()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
