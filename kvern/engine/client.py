"""The two fronts of the engine: InprocClient (LLM, same process, step by step) and AsyncClient (server, own process).

AsyncClient owns the engine's process and three things per request, in this order of life:
  1. before admission: validation and tokenization; nothing is known of the request yet, cancelling costs nothing;
  2. from the moment Add is sent: an entry per completion, a child, in `_children`, forgotten only when the engine
     itself says that it ended (every Add is answered by exactly one finish), so an abort always finds its target;
  3. the RequestStream the caller iterates. Closing it, or cancelling its reader, sends the abort first.
There is no await between the first Add sent and the stream returned, and none between seeing a cancellation and
sending the abort: no point at which a cancelled task leaves a request running that nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import zmq

from kvern.config import EngineConfig, InvalidConfig, ModelConfig, SchedulerConfig
from kvern.engine.messages import (
    AbortRequests,
    AddRequest,
    Control,
    ControlReply,
    EngineDeadError,
    EngineFailure,
    EngineProgress,
    EngineReady,
    EngineStats,
    FromEngine,
    StartEngine,
    StepReport,
    ToEngine,
)
from kvern.sampling_params import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from kvern.engine.input_processor import InputProcessor
    from kvern.engine.output_processor import CompletionDelta, OutputProcessor
    from kvern.tokenizer import Tokenizer

__all__ = ["AsyncClient", "EngineDeadError", "Health", "InprocClient", "RequestStream"]

logger = logging.getLogger(__name__)

Prompt = str | list[int]
Progress = Callable[[str, float], None]
T = TypeVar("T")

_STALL_SECONDS = 120.0  # more than a step of a large model takes on a slow machine
_GIVE_UP_FACTOR = 5  # requests wait so many stall timeouts for an engine that may only be slow
_TERMINATE_SECONDS = 5.0  # for a told engine to end by itself before it is killed
_LAST_WORDS_SECONDS = 0.2  # for what a process sent before it ended to be read
_TOKENIZER_THREADS = 2
_INLINE_CHARACTERS = 4096  # a longer text is tokenized in a thread


class Health(NamedTuple):
    ok: bool
    reason: str  # "" when ok


class EngineTransport:
    """An engine process and the socket to it. Knows bytes and life, nothing of requests.

    The socket is read by the event loop itself, without futures in between: a message comes with every step, and what
    is spent on it here a step's threads lack. Its descriptor becomes readable when the socket's state *changes*, and
    any use of the socket takes that notice away: so whoever has used it looks once more whether there is something to
    read or to send.
    """

    def __init__(self, socket: zmq.Socket[bytes], folder: str, process: asyncio.subprocess.Process) -> None:
        self._socket = socket
        self._folder: str | None = folder  # of the socket's name
        self.process = process
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._unsent: deque[tuple[bytes, int]] = deque()  # until the engine is connected
        self._on_message: Callable[[FromEngine], None] | None = None
        self._on_error: Callable[[Exception], None] | None = None

    @classmethod
    async def launch(cls, *flags: str) -> EngineTransport:
        """Start the process; it waits for StartEngine. The socket lies in a folder only this user can enter."""
        folder = tempfile.mkdtemp(prefix="kvern-")
        address = f"ipc://{folder}/engine"
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)  # nothing that is sent to a living engine waits
        socket.linger = 0
        try:
            socket.bind(address)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvern.engine.process", address, *flags,
                stdin=asyncio.subprocess.PIPE,  # never written to: its end tells the engine that we are gone
                start_new_session=True,  # ctrl-C in a terminal reaches only this process
            )  # fmt: skip
        except BaseException:
            socket.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(socket, folder, process)

    def start_reading(self, on_message: Callable[[FromEngine], None], on_error: Callable[[Exception], None]) -> None:
        """Call on_message with each message, in order; on_error with what it raises, or what is wrong with a message:
        then no more are read."""
        self._on_message, self._on_error = on_message, on_error
        self._loop.add_reader(self._descriptor, self._look)
        self._loop.call_soon(self._look)

    def send(self, *messages: ToEngine) -> None:
        """Queue messages, in order, without waiting; the engine sees all of one call before its next step. Nothing
        happens if the engine is gone."""
        if self._socket.closed:
            return
        for message in messages[:-1]:
            self._unsent.append((self._encoder.encode(message), zmq.SNDMORE))
        self._unsent.append((self._encoder.encode(messages[-1]), 0))
        self._send_unsent()
        self._loop.call_soon(self._look)

    def _send_unsent(self) -> None:
        while self._unsent:
            data, flags = self._unsent[0]
            try:
                self._socket.send(data, zmq.NOBLOCK | flags)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _look(self) -> None:
        """One message, then whoever else has something to do: streams are to be written in between."""
        if self._socket.closed or self._on_message is None:
            return
        self._send_unsent()
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            # This very call may be the one that noticed that the engine has connected.
            if self._unsent and self._socket.getsockopt(zmq.EVENTS):
                self._loop.call_soon(self._look)
            return
        # The engine is connected, so the name has served. Gone now, it is not left behind however we end.
        self._remove_folder()
        try:
            self._on_message(self._decoder.decode(data))
        except Exception as exc:
            self._stop_reading()
            assert self._on_error is not None
            self._on_error(exc)
        else:
            self._loop.call_soon(self._look)

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._on_message = None

    async def wait_exit(self) -> int:
        return await self.process.wait()

    async def close(self) -> None:
        """End the process, hard if need be, and release the socket. Idempotent."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        if not self._socket.closed:  # afterwards the descriptor may be somebody else's
            self._stop_reading()
            self._socket.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class RequestStream:
    """The deltas of one prompt's n completions, in the order they came. An async iterator of CompletionDelta.

    It ends after every child's finish. Closing it earlier (`aclose`, leaving `async with`, cancelling the task that
    waits for the next delta) aborts all children in the engine. Raises EngineDeadError from `__anext__` when the
    engine dies or stalls; a failure of this request alone is a delta with finish_reason "error".
    """

    def __init__(self, client: AsyncClient, request_id: str, children: list[AddRequest]) -> None:
        self.request_id = request_id
        self.prompt_token_ids = children[0].prompt_token_ids
        self.arrival_time = children[0].arrival_time  # on the machine's monotonic clock, as all times of deltas
        self._client = client
        self._children = [child.request_id for child in children]
        self._pending: dict[int, CompletionDelta] = {}  # by index; a slow reader gets several steps in one delta
        self._unfinished = len(children)  # completions whose last delta has not been read yet
        self._error: EngineDeadError | None = None
        self._wake: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[CompletionDelta]:
        return self

    async def __anext__(self) -> CompletionDelta:
        while not self._pending:
            if self._unfinished == 0:
                raise StopAsyncIteration
            if self._error is not None:
                self._unfinished = 0
                raise self._error
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            except asyncio.CancelledError:
                self.close()
                raise
        delta = self._pending.pop(next(iter(self._pending)))
        if delta.finish_reason is not None:
            self._unfinished -= 1
        return delta

    def close(self) -> None:
        """Abort what still runs and end the stream. Idempotent; never waits."""
        if self._unfinished:
            self._unfinished = 0
            self._client._abort_children(self._children)
        self._pending.clear()
        self._notify()

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _push(self, delta: CompletionDelta) -> None:
        if not self._unfinished:
            return
        if delta.index in self._pending:
            self._pending[delta.index].merge(delta)
        else:
            self._pending[delta.index] = delta
        self._notify()

    def _fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class AsyncClient:
    """The server's front: starts and owns an engine in its own process. All methods on one event loop.

    Made by `start` only. Attributes: engine_config as given; model_name, in the API; model_config; limits, all final
    (max_model_len, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, ...); tokenizer; input_processor;
    stats, the engine's state after its latest step.
    """

    model_name: str
    model_config: ModelConfig
    limits: SchedulerConfig
    tokenizer: Tokenizer
    input_processor: InputProcessor

    def __init__(self, engine_config: EngineConfig, transport: EngineTransport, stall_timeout: float) -> None:
        self.engine_config = engine_config
        self.stats = EngineStats()
        self._transport = transport
        self._stall_timeout = stall_timeout
        self._output: OutputProcessor | None = None
        # Both until the engine has said that the last completion ended.
        self._streams: dict[str, RequestStream] = {}  # by request id
        self._children: dict[str, RequestStream] = {}  # by the engine's id, one per completion
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, "tokenize")
        self._on_progress: Progress | None = None
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._failure: EngineFailure | None = None  # the engine's last words
        self._death: str | None = None  # why the engine is gone
        self._shutting_down = False
        self._heard = time.monotonic()  # last message from the engine
        self._asked: float | None = None  # since when it owes us one
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        engine_config: EngineConfig,
        on_progress: Progress | None = None,
        *,
        stall_timeout: float = _STALL_SECONDS,
    ) -> AsyncClient:
        """Start the engine process and wait until it is ready; the tokenizer is read meanwhile, here.

        on_progress(phase, seconds it took) is called as loading goes on. Raises InvalidConfig, or EngineDeadError
        with the engine's own words when it cannot load. stall_timeout: see `health`.
        """
        uses_torch = engine_config.kernels == "reference" or engine_config.dtype == "float32"
        flags = ("--import-torch",) if uses_torch and not engine_config.model.startswith("toy:") else ()
        client = cls(engine_config, await EngineTransport.launch(*flags), stall_timeout)
        client._on_progress = on_progress
        client._transport.start_reading(client._on_message, client._on_unreadable)
        client._tasks = [asyncio.create_task(client._watch_exit())]
        try:
            # After the engine's process has started: it has as much to import, on another core.
            from kvern.engine.input_processor import InputProcessor
            from kvern.engine.output_processor import OutputProcessor
            from kvern.tokenizer import load_tokenizer
            from kvern.weights.hub import resolve_model

            with client._phase("find model"):
                files = await asyncio.to_thread(resolve_model, engine_config.model)
            client.model_name = engine_config.served_model_name or files.name
            client._transport.send(StartEngine(engine_config))
            with client._phase("load tokenizer"):
                client.tokenizer = await asyncio.to_thread(load_tokenizer, files)
            ready = await client._ready
        except BaseException:
            await client._close()
            raise
        client.model_config, client.limits = ready.model_config, ready.limits
        client.input_processor = InputProcessor(
            client.tokenizer, ready.model_config, ready.limits, seed=engine_config.seed
        )
        client._output = OutputProcessor(client.tokenizer)
        client._tasks.append(asyncio.create_task(client._watch_stall()))
        return client

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
    ) -> RequestStream:
        """Validate, tokenize (long texts in a thread) and admit one prompt: `stream = await client.generate(...)`.

        Raises InvalidRequest before anything is admitted, also when `request_id` is live; EngineDeadError when the
        engine is not healthy or is shutting down. When it returns, the request is on its way to the engine: the
        caller must exhaust the stream or close it (`async with stream:`).
        """
        self._require_serving()
        options: dict[str, Any] = {
            "arrival_time": time.monotonic(),
            "priority": priority,
            "tenant": tenant,
            "cache_salt": cache_salt,
            "ttft_target": ttft_target,
            "tpot_target": tpot_target,
        }
        if isinstance(prompt, str) and len(prompt) > _INLINE_CHARACTERS:
            children = await self.in_thread(self.input_processor.process, request_id, prompt, sampling, **options)
            self._require_serving()
        else:
            children = self.input_processor.process(request_id, prompt, sampling, **options)
        if request_id in self._streams or any(child.request_id in self._children for child in children):
            raise InvalidRequest(f"a request with the id {request_id!r} is running", "request_id")
        assert self._output is not None
        self._output.add(request_id, children)
        stream = self._streams[request_id] = RequestStream(self, request_id, children)
        for child in children:
            self._children[child.request_id] = stream
        # Together, or the first might have ended before its siblings come to share its prompt.
        self._transport.send(*children)
        self._expect_answer()
        return stream

    async def in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `function`, which may take long, beside the event loop: for tokenization and chat templates. Raises
        what it raises, and EngineDeadError when the engine is gone."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, functools.partial(function, *args, **kwargs)
        )

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests (as given to `generate`) and all their completions; unknown ones are fine. Their
        streams end with finish_reason "abort"."""
        assert self._output is not None
        self._abort_children(self._output.abort(request_ids))

    async def call(self, name: str, timeout: float = 10.0, **arguments: Any) -> Any:
        """Ask the engine: "stats" -> EngineStats as a dict, "requests" -> one dict per live request, "ping" -> None,
        "policy", "set_policy" (policy, options), "pins", "pin" (prompt_token_ids, ttl, cache_salt), "unpin" (pin_id)
        -> see kvern.engine.admin.

        It is answered between two steps. Raises TimeoutError, EngineDeadError, ValueError for an unknown name or with
        what the engine has against the arguments (InvalidRequest, if it names the field).
        """
        if self._death is not None:
            raise EngineDeadError(self._death)
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._transport.send(Control(call_id=call_id, name=name, arguments=arguments))
        self._expect_answer()
        try:
            return await asyncio.wait_for(answer, timeout)
        finally:
            self._calls.pop(call_id, None)

    def health(self) -> Health:
        """Whether the engine makes progress: not when it is gone, or shutting down, or has been silent for
        `stall_timeout` seconds although a request or a call waited for it. An idle engine is asked now and then.
        Meanwhile nothing new is admitted; after five times as long the streams that wait end with EngineDeadError."""
        if self._death is not None:
            return Health(False, self._death)
        if self._shutting_down:
            return Health(False, "shutting down")
        if self._asked is not None and time.monotonic() - self._asked > self._stall_timeout:
            return Health(False, f"the engine has made no step for {time.monotonic() - self._asked:.0f} s")
        return Health(True, "")

    @property
    def num_unfinished(self) -> int:
        """Completions the engine has not ended yet."""
        return len(self._children)

    @property
    def engine_pid(self) -> int:
        return self._transport.process.pid

    async def wait_gone(self) -> str:
        """Return, once the engine process is gone, why: it died, or it was shut down."""
        await self._gone.wait()
        assert self._death is not None
        return self._death

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Admit nothing more, give running requests `drain_seconds`, abort the rest (their streams end with
        finish_reason "abort"), end the process. Can be called again, with less patience."""
        self._shutting_down = True
        self._transport.send(
            Control(call_id=next(self._call_ids), name="shutdown", arguments={"drain_seconds": drain_seconds})
        )
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._gone.wait(), drain_seconds + _TERMINATE_SECONDS)
        await self._close()

    def _require_serving(self) -> None:
        ok, reason = self.health()
        if not ok:
            raise EngineDeadError(reason)

    def _abort_children(self, child_ids: list[str]) -> None:
        """Tell the engine. Entries stay until it answers: what was sent before this may still be on its way."""
        live = [child_id for child_id in child_ids if child_id in self._children]
        if live:
            self._transport.send(AbortRequests(live))

    def _expect_answer(self) -> None:
        if self._asked is None:
            self._asked = time.monotonic()

    def _on_message(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        self._handle(message)
        self._asked = self._heard if self._streams or self._calls else None

    def _on_unreadable(self, error: Exception) -> None:
        """Every stream would wait for ever: it ends the client."""
        logger.error("cannot read the engine", exc_info=error)
        self._die(f"the engine cannot be read: {error}")
        self._tasks.append(asyncio.create_task(self._transport.close()))

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, StepReport):
            self._on_step(message)
        elif isinstance(message, ControlReply):
            self._on_reply(message)
        elif isinstance(message, EngineProgress):
            if self._on_progress is not None:
                self._on_progress(message.phase, message.seconds)
        elif isinstance(message, EngineReady):
            if not self._ready.done():
                self._ready.set_result(message)
        else:
            self._failure = message
            self._die(message.message)

    def _on_step(self, report: StepReport) -> None:
        if report.stats is not None:
            self.stats = report.stats
        assert self._output is not None
        deltas, aborts = self._output.process(report)
        self._abort_children(aborts)
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream._push(delta)
        for child_id, update in report.updates.items():
            if update.finish_reason is not None:
                self._forget(child_id)

    def _forget(self, child_id: str) -> None:
        stream = self._children.pop(child_id, None)
        if stream is not None:
            stream._children.remove(child_id)
            if not stream._children:
                del self._streams[stream.request_id]

    def _on_reply(self, reply: ControlReply) -> None:
        answer = self._calls.pop(reply.call_id, None)
        if answer is None or answer.done():
            return
        if reply.error is not None:
            wrong = reply.param is not None
            answer.set_exception(InvalidRequest(reply.error, reply.param) if wrong else ValueError(reply.error))
        else:
            answer.set_result(reply.result)

    async def _watch_exit(self) -> None:
        code = await self._transport.wait_exit()
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        if self._shutting_down and code == 0:
            self._die("shut down")
        else:
            how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            self._die(f"the engine process {how}")
        self._gone.set()

    async def _watch_stall(self) -> None:
        """Ask an engine that was silent for long, and give up the requests of one that never answers. The engine
        itself is left alone: should it go on after all, it takes the aborts and serves what comes next."""
        period = self._stall_timeout / 8
        while self._death is None:
            slept = time.monotonic()
            await asyncio.sleep(period)
            now = time.monotonic()
            if now - slept > 2 * period and self._asked is not None:
                self._asked = now  # this process stood still, and perhaps all of them did
            elif self._asked is None and now - self._heard > self._stall_timeout / 2:
                self._transport.send(Control(call_id=next(self._call_ids), name="ping"))
                self._asked = now
            elif self._asked is not None and now - self._asked > self._stall_timeout * _GIVE_UP_FACTOR:
                self._give_up()

    def _give_up(self) -> None:
        waiting = [stream for stream in self._streams.values() if stream._error is None]
        if waiting:
            reason = self.health().reason
            logger.error("%s; giving up %d requests", reason, len(waiting))
            self._abort_children(list(self._children))
            for stream in waiting:
                stream._fail(EngineDeadError(reason))

    def _die(self, reason: str) -> None:
        """The engine is gone: nothing waits for it any more. Only the first reason counts."""
        if self._death is not None:
            return
        self._death = reason
        if self._output is not None and not self._shutting_down:  # before, `start` raises it
            logger.error("the engine is gone: %s", reason)
        for stream in self._streams.values():
            stream._fail(EngineDeadError(reason))
        self._streams.clear()
        self._children.clear()
        if self._output is not None:
            self._output.fail_all(reason, time.monotonic())
        for answer in [*self._calls.values(), self._ready]:
            if not answer.done():
                invalid = self._failure is not None and self._failure.invalid_config
                answer.set_exception(InvalidConfig(reason) if invalid else EngineDeadError(reason))
                answer.exception()  # counts as seen, also when nobody waits any more
        self._calls.clear()

    async def _close(self) -> None:
        await self._transport.close()
        self._die("shut down")
        self._gone.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        if self._on_progress is not None:
            self._on_progress(name, time.monotonic() - started)


class InprocClient:
    """An engine in this process, for LLM: whoever calls `step` is its loop. One thread at a time.

    Life of a request: `input_processor.process` makes its AddRequests, `add` admits them, the deltas of `step` tell
    what became of it. Ctrl-C (SIGINT, in the main thread) is held back until the end of a step, so that it never
    leaves the engine half way.
    """

    def __init__(self, engine_config: EngineConfig) -> None:
        """Load model and tokenizer. Raises InvalidConfig."""
        from kvern.engine.core import load_core
        from kvern.engine.input_processor import InputProcessor
        from kvern.engine.output_processor import OutputProcessor
        from kvern.tokenizer import load_tokenizer
        from kvern.weights.hub import resolve_model

        self.engine_config = engine_config
        self.tokenizer: Tokenizer = load_tokenizer(resolve_model(engine_config.model))
        self.core, self.model_config = load_core(engine_config)
        self.limits: SchedulerConfig = self.core.scheduler.config
        self.input_processor = InputProcessor(
            self.tokenizer, self.model_config, self.limits, seed=engine_config.seed, clock=self.core.clock
        )
        self._output = OutputProcessor(self.tokenizer)

    def add(self, request_id: str, children: list[AddRequest]) -> None:
        """Admit a request. Raises InvalidRequest if its id is live, EngineDeadError after a failure."""
        self._output.add(request_id, children)
        for child in children:
            self.core.add(child)

    def has_unfinished(self) -> bool:
        return self.core.has_work()

    def step(self) -> list[CompletionDelta]:
        """One step of the engine; what it gave. Raises EngineDeadError: then nothing lives any more."""
        with _interrupts_held_back():
            try:
                deltas, aborts = self._output.process(self.core.step())
            except EngineDeadError as exc:
                self._output.fail_all(str(exc), self.core.clock.now())
                raise
            self.core.abort(aborts)
            return deltas

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; the next step's deltas say so. Idempotent, unknown ids are fine."""
        self.core.abort(self._output.abort(request_ids))

    def abort_all(self) -> None:
        """End every request, and step until the engine has let go of them. After a failure nothing is left to end."""
        if self.core.failure is None:
            self.core.abort_all()
        while self.core.has_work():
            self.step()

    def close(self) -> None:
        """Release the executor. Idempotent."""
        self.core.shutdown()


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Raise KeyboardInterrupt only at the end of the block; a second ctrl-C is not held back."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def note(signum: int, frame: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
