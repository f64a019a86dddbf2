"""The engine in its own process, through AsyncClient, with the toy model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvern.config import EngineConfig, InvalidConfig
from kvern.engine.client import AsyncClient, RequestStream
from kvern.engine.messages import Control, ControlReply, EngineDeadError, FromEngine
from kvern.engine.process import EngineProcess
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.testing.toy import reference_tokens

ROOT = Path(__file__).parents[2]
CONFIG = EngineConfig(model="toy:history-hash", num_blocks=600, max_num_seqs=32, log_level="error")
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def ids(name: str) -> list[int]:
    return [3 + byte for byte in name.encode()]


class Collected:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.ends: dict[int, str] = {}


async def collect(stream: RequestStream, into: Collected | None = None) -> Collected:
    found = into or Collected()
    async for delta in stream:
        assert delta.index not in found.ends
        found.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        found.text[delta.index] = found.text.get(delta.index, "") + delta.text
        if delta.finish_reason is not None:
            found.ends[delta.index] = delta.finish_reason
    return found


async def until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 60))
    loop.close()


@pytest.fixture(scope="module")
def shared(run: Run) -> Iterator[AsyncClient]:
    client = run(AsyncClient.start(CONFIG))
    yield client
    run(client.shutdown())


@pytest.fixture
def client(shared: AsyncClient, run: Run) -> Iterator[AsyncClient]:
    """The shared engine; each test leaves it as it found it."""
    yield shared

    async def check() -> None:
        await until(lambda: shared.num_unfinished == 0)
        assert shared.health().ok
        stats = await shared.call("stats")
        assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
        assert stats["num_free_blocks"] == stats["num_blocks"]
        assert await shared.call("requests") == []
        assert not shared._streams and not shared._children and not shared._calls and len(shared._output or ()) == 0

    run(check())


def test_in_company_as_alone(client: AsyncClient, run: Run) -> None:
    async def one(i: int) -> None:
        prompt = ids(f"prompt number {i % 17} " * (1 + i % 3))
        stream = await client.generate(prompt, greedy(5 + i), request_id=f"company{i}")
        found = await collect(stream)
        assert found.tokens[0] == reference_tokens(prompt, 5 + i)
        assert found.ends == {0: "length"}

    async def all_of_them() -> None:
        await asyncio.gather(*(one(i) for i in range(60)))

    run(all_of_them())


def test_text_goes_in_and_comes_out(client: AsyncClient, run: Run) -> None:
    async def go() -> None:
        stream = await client.generate("Grüße", greedy(12), request_id="text")
        assert stream.prompt_token_ids == ids("Grüße")
        found = await collect(stream)
        assert found.text[0] == client.tokenizer.decode(reference_tokens(ids("Grüße"), 12))

    run(go())


def test_a_long_text_does_not_hold_up_the_loop(client: AsyncClient, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """B117."""
    encode = client.tokenizer.encode

    def slow(text: str, *args: Any, **kwargs: Any) -> list[int]:
        time.sleep(0.2)
        return encode(text, *args, **kwargs)

    monkeypatch.setattr(client.tokenizer, "encode", slow)

    async def go() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        stream = await client.generate("x" * 5000, greedy(2), request_id="long")
        ticking.cancel()
        await collect(stream)
        assert ticks > 10

    run(go())


def test_completions_of_one_prompt_end_once_each(client: AsyncClient, run: Run) -> None:
    """B086."""

    async def go() -> None:
        sampling = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=40)
        found = await collect(await client.generate(ids("four"), sampling, request_id="n4"))
        assert sorted(found.ends) == [0, 1, 2, 3]
        assert len({tuple(tokens) for tokens in found.tokens.values()}) == 4

    run(go())


def test_closing_the_stream_aborts_all_completions(client: AsyncClient, run: Run) -> None:
    """B086: gone from the engine within a second, although nobody waits for it."""

    async def go() -> None:
        sampling = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=4000, ignore_eos=True)
        async with await client.generate(ids("close"), sampling, request_id="close") as stream:
            for _ in range(3):
                await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await until(lambda: client.stats.num_running == 0, 1.0)

    run(go())


def test_cancelling_the_reader_aborts(client: AsyncClient, run: Run) -> None:
    """B112, with 50 readers at once, each cancelled at another moment; then fresh requests are served."""

    async def read(i: int) -> None:
        text = "y" * 6000 if i % 5 == 0 else f"reader {i}"
        stream = await client.generate(text, greedy(1500), request_id=f"cancel{i}")
        await collect(stream)

    async def go() -> None:
        readers = [asyncio.create_task(read(i)) for i in range(50)]
        for i, reader in enumerate(readers):
            if i % 3 == 0:
                await asyncio.sleep(0.002)
            reader.cancel()
        ended = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        await until(lambda: client.num_unfinished == 0)
        fresh = [await client.generate(ids(f"fresh {i}"), greedy(5), request_id=f"fresh{i}") for i in range(10)]
        for i, stream in enumerate(fresh):
            assert (await collect(stream)).tokens[0] == reference_tokens(ids(f"fresh {i}"), 5)

    run(go())


def test_abort_and_send_again(client: AsyncClient, run: Run) -> None:
    """B111: no zombie writes into the conversation that is sent anew."""

    async def go() -> None:
        expected = reference_tokens(ids("again and again"), 6)
        for i in range(100):
            stream = await client.generate(ids("again and again"), greedy(3000), request_id=f"again{i}")
            if i % 2:
                await anext(stream)
            await stream.aclose()
            stream = await client.generate(ids("again and again"), greedy(6), request_id=f"again{i}b")
            assert (await collect(stream)).tokens[0] == expected

    run(go())


def test_abort_by_name_ends_the_streams(client: AsyncClient, run: Run) -> None:
    async def go() -> None:
        stream = await client.generate(ids("abort me"), greedy(4000, n=3), request_id="named")
        await anext(stream)
        await client.abort(["named", "unknown"])
        await client.abort(["named"])
        found = await asyncio.wait_for(collect(stream), 2)
        assert found.ends == {0: "abort", 1: "abort", 2: "abort"}

    run(go())


def test_a_live_id_is_refused_and_its_owner_unharmed(client: AsyncClient, run: Run) -> None:
    """B107."""

    async def go() -> None:
        first = await client.generate(ids("first"), greedy(50), request_id="same")
        with pytest.raises(InvalidRequest, match="'same'"):
            await client.generate(ids("second"), greedy(50, n=2), request_id="same")
        assert (await collect(first)).tokens[0] == reference_tokens(ids("first"), 50)
        second = await client.generate(ids("second"), greedy(5), request_id="same")
        assert (await collect(second)).tokens[0] == reference_tokens(ids("second"), 5)

    run(go())


def test_what_is_invalid_is_said_before_admission(client: AsyncClient, run: Run) -> None:
    async def go() -> None:
        steps = client.stats.steps
        for prompt in ("", [], [1, 9999], "z" * 100_000):
            with pytest.raises(InvalidRequest):
                await client.generate(prompt, greedy(5), request_id="bad")
        assert client.num_unfinished == 0 and client.stats.steps == steps

    run(go())


def test_a_stop_string_ends_the_request_in_the_engine_too(client: AsyncClient, run: Run) -> None:
    async def go() -> None:
        text = client.tokenizer.decode(reference_tokens(ids("stop it"), 40))
        sampling = greedy(3000, stop=(text[20:23],))
        found = await collect(await client.generate(ids("stop it"), sampling, request_id="stop"))
        assert (found.text[0], found.ends) == (text[: text.index(text[20:23])], {0: "stop"})
        await until(lambda: client.stats.num_running == 0, 1.0)

    run(go())


def test_an_id_is_free_again_when_the_engine_has_let_go_of_it(client: AsyncClient, run: Run) -> None:
    """After a stop string the reader is done before the engine is; a new request must not get the old one's tokens."""

    async def go() -> None:
        text = client.tokenizer.decode(reference_tokens(ids("reuse"), 9))
        stream = await client.generate(ids("reuse"), greedy(4000, stop=(text[5:9],)), request_id="reuse")
        assert (await collect(stream)).ends == {0: "stop"}
        with pytest.raises(InvalidRequest, match="'reuse'"):
            await client.generate(ids("next"), greedy(50), request_id="reuse")
        await until(lambda: client.num_unfinished == 0)
        stream = await client.generate(ids("next"), greedy(50), request_id="reuse")
        assert (await collect(stream)).tokens[0] == reference_tokens(ids("next"), 50)

    run(go())


def test_a_slow_reader_gets_everything_in_few_deltas(client: AsyncClient, run: Run) -> None:
    async def go() -> None:
        stream = await client.generate(ids("slow"), greedy(200), request_id="slow")
        await until(lambda: client.num_unfinished == 0)
        delta = await anext(stream)
        assert delta.token_ids == reference_tokens(ids("slow"), 200)
        assert delta.finish_reason == "length"

    run(go())


def test_calls(client: AsyncClient, run: Run) -> None:
    async def go() -> None:
        async with await client.generate(ids("look"), greedy(4000), request_id="look", tenant="t") as stream:
            await anext(stream)
            (seen,) = await client.call("requests")
            assert (seen["request_id"], seen["status"], seen["tenant"]) == ("look", "running", "t")
        assert await client.call("ping") is None
        with pytest.raises(ValueError, match="'dance'"):
            await client.call("dance")

    run(go())


def test_unreadable_messages_hurt_nobody(client: AsyncClient, run: Run) -> None:
    async def go() -> None:
        stream = await client.generate(ids("calm"), greedy(30), request_id="calm")
        for junk in (b"", b"\xc1\xff", b"\x81\xa4type\xa3add", b"\x93\x01\x02\x03"):
            client._transport._socket.send(junk)
        assert (await collect(stream)).tokens[0] == reference_tokens(ids("calm"), 30)

    run(go())


def test_signals_to_the_group_are_the_fronts_business(client: AsyncClient, run: Run) -> None:
    """B118."""

    async def go() -> None:
        os.kill(client.engine_pid, signal.SIGTERM)
        os.kill(client.engine_pid, signal.SIGINT)
        stream = await client.generate(ids("still here"), greedy(5), request_id="signals")
        assert (await collect(stream)).tokens[0] == reference_tokens(ids("still here"), 5)

    run(go())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_an_idle_engine_uses_no_processor(client: AsyncClient, run: Run) -> None:
    """B122."""

    async def go() -> None:
        await collect(await client.generate(ids("busy"), greedy(5), request_id="busy"))
        before = [cpu_seconds(client.engine_pid), time.process_time()]
        await asyncio.sleep(1.5)
        after = [cpu_seconds(client.engine_pid), time.process_time()]
        assert after[0] - before[0] <= 0.03 and after[1] - before[1] <= 0.03
        started = time.monotonic()
        await anext(await client.generate(ids("wake up"), greedy(1), request_id="wake"))
        assert time.monotonic() - started < 0.5

    run(go())


# ---- life and death: each with an engine of its own


def with_client(run: Run, test: Callable[[AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def go() -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", folder)
            client = await AsyncClient.start(CONFIG, **options)
            assert os.listdir(folder) == []  # nothing to be left behind, however this ends
        try:
            await test(client)
        finally:
            await client.shutdown()
        assert not is_alive(client.engine_pid)

    run(go())


def test_a_killed_engine_ends_every_stream_with_an_error(run: Run) -> None:
    """B116."""

    async def test(client: AsyncClient) -> None:
        streams = [await client.generate(ids(f"{i}"), greedy(4000, n=2), request_id=f"{i}") for i in range(5)]
        await anext(streams[0])
        reading = [asyncio.create_task(collect(stream)) for stream in streams]
        call = asyncio.create_task(client.wait_gone())
        await asyncio.sleep(0.05)
        os.kill(client.engine_pid, signal.SIGKILL)
        for end in await asyncio.wait_for(asyncio.gather(*reading, return_exceptions=True), 2):
            assert isinstance(end, EngineDeadError) and "SIGKILL" in str(end)
        assert "SIGKILL" in await asyncio.wait_for(call, 2)
        assert not client.health().ok and "SIGKILL" in client.health().reason
        with pytest.raises(EngineDeadError):
            await client.generate(ids("late"), greedy(4), request_id="late")
        with pytest.raises(EngineDeadError):
            await client.call("ping")

    with_client(run, test)


@pytest.mark.slow
def test_a_frozen_engine_is_unhealthy_and_recovers(run: Run) -> None:
    """B116: streams end with an error, and when the engine goes on, so does the service, without zombies."""

    async def test(client: AsyncClient) -> None:
        stream = await client.generate(ids("frozen"), greedy(4000), request_id="frozen")
        await anext(stream)
        os.kill(client.engine_pid, signal.SIGSTOP)
        try:
            reading = asyncio.create_task(collect(stream))
            await until(lambda: not client.health().ok, 0.4)
            assert not reading.done()  # it may only be slow
            with pytest.raises(EngineDeadError, match="no step"):
                await asyncio.wait_for(reading, 3)
            with pytest.raises(EngineDeadError, match="no step"):
                await client.generate(ids("later"), greedy(4), request_id="later")
        finally:
            os.kill(client.engine_pid, signal.SIGCONT)
        await until(lambda: client.health().ok)
        await until(lambda: client.num_unfinished == 0)
        assert client.stats.generated_tokens < 4000
        found = await collect(await client.generate(ids("thawed"), greedy(4), request_id="thawed"))
        assert found.tokens[0] == reference_tokens(ids("thawed"), 4)

    with_client(run, test, stall_timeout=0.2)


@pytest.mark.slow
def test_an_engine_that_freezes_while_idle_is_noticed(run: Run) -> None:
    async def test(client: AsyncClient) -> None:
        await collect(await client.generate(ids("before"), greedy(3), request_id="before"))
        for _ in range(30):
            await asyncio.sleep(0.03)
            assert client.health().ok  # idle is not stalled
        os.kill(client.engine_pid, signal.SIGSTOP)
        try:
            await until(lambda: not client.health().ok, 3)
        finally:
            os.kill(client.engine_pid, signal.SIGCONT)
        await until(lambda: client.health().ok)

    with_client(run, test, stall_timeout=0.2)


@pytest.mark.slow
def test_a_pause_of_the_whole_machine_is_nobodys_fault(run: Run) -> None:
    async def test(client: AsyncClient) -> None:
        stream = await client.generate(ids("paused"), greedy(2000), request_id="paused")
        await anext(stream)
        os.kill(client.engine_pid, signal.SIGSTOP)
        time.sleep(1.5)
        await asyncio.sleep(0.1)
        os.kill(client.engine_pid, signal.SIGCONT)
        assert (await collect(stream)).ends == {0: "length"}

    with_client(run, test, stall_timeout=0.2)


@pytest.mark.parametrize(("patience", "end"), [(20.0, "length"), (0.0, "abort")])
def test_shutdown_waits_as_long_as_it_is_told(run: Run, patience: float, end: str) -> None:
    """B118."""

    async def test(client: AsyncClient) -> None:
        streams = [await client.generate(ids(f"{i}"), greedy(400), request_id=f"{i}") for i in range(3)]
        reading = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.sleep(0.02)
        ending = asyncio.create_task(client.shutdown(patience))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await client.generate(ids("late"), greedy(4), request_id="late")
        for found in await asyncio.gather(*reading):
            assert found.ends == {0: end}
            assert (len(found.tokens[0]) == 400) == (end == "length")
        await ending
        assert client._transport.process.returncode == 0

    with_client(run, test)


def test_a_second_shutdown_can_be_less_patient(run: Run) -> None:
    async def test(client: AsyncClient) -> None:
        reading = asyncio.create_task(collect(await client.generate(ids("a"), greedy(4000, n=3), request_id="a")))
        first = asyncio.create_task(client.shutdown(60.0))
        await asyncio.sleep(0.05)
        await client.shutdown(0.0)
        await asyncio.wait_for(first, 1)
        assert set((await reading).ends.values()) == {"abort"}

    with_client(run, test)


def test_an_engine_that_cannot_load_says_which_option(run: Run) -> None:
    async def go() -> None:
        config = EngineConfig(model="toy:history-hash", num_blocks=3, max_model_len=1000, log_level="error")
        with pytest.raises(InvalidConfig, match="max_model_len"):
            await AsyncClient.start(config)
        with pytest.raises(InvalidConfig, match="toy:nothing"):
            await AsyncClient.start(EngineConfig(model="toy:nothing"))

    run(go())


def test_progress_is_told(run: Run) -> None:
    async def go() -> None:
        phases: list[str] = []
        client = await AsyncClient.start(CONFIG, lambda phase, seconds: phases.append(phase))
        await client.shutdown()
        assert sorted(phases) == ["find model", "load model", "load tokenizer"]

    run(go())


def test_a_step_that_raises_ends_the_engine_in_its_own_words(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is put in place when the engine's interpreter starts: its executor raises in the third step."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import kvern.executor.inline as inline
            from kvern.testing.faults import FaultyExecutor
            load = inline.load_executor
            def faulty(config):
                executor, *rest = load(config)
                return FaultyExecutor(executor, fail_at=3), *rest
            inline.load_executor = faulty
        """)
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))

    async def test(client: AsyncClient) -> None:
        stream = await client.generate(ids("doomed"), greedy(50), request_id="doomed")
        with pytest.raises(EngineDeadError, match="injected fault in step 3"):
            await collect(stream)
        await client.wait_gone()
        assert "injected fault" in client.health().reason
        assert client._transport.process.returncode == 1

    with_client(run, test)


def test_the_engine_ends_with_its_front(tmp_path: Path) -> None:
    """Also when the front is killed in the middle of requests and can tell nobody."""
    script = tmp_path / "front.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio
            from kvern.config import EngineConfig
            from kvern.engine.client import AsyncClient
            from kvern.sampling_params import SamplingParams
            async def main():
                client = await AsyncClient.start(EngineConfig(model="toy:history-hash"))
                stream = await client.generate([5], SamplingParams(max_tokens=None, ignore_eos=True), request_id="a")
                await anext(stream)
                print(client.engine_pid, flush=True)
                await asyncio.sleep(60)
            asyncio.run(main())
        """)
    )
    front = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert front.stdout is not None
    engine_pid = int(front.stdout.readline())
    assert is_alive(engine_pid)
    front.kill()
    front.wait()
    front.stdout.close()
    end = time.monotonic() + 5
    while is_alive(engine_pid):
        assert time.monotonic() < end, "the engine outlives its front"
        time.sleep(0.01)


def test_the_front_never_imports_torch() -> None:
    code = textwrap.dedent("""
        import asyncio, sys
        from kvern.config import EngineConfig
        from kvern.engine.client import AsyncClient
        async def main():
            client = await AsyncClient.start(EngineConfig(model="toy:history-hash", log_level="error"))
            await client.shutdown()
        asyncio.run(main())
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)


@pytest.mark.parametrize("left", [3, 1_000_000])
def test_an_idle_engine_prepares_until_nothing_is_left_or_a_message_comes(left: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as front, context.socket(zmq.PAIR) as back:
        front.bind("inproc://idle")
        back.connect("inproc://idle")
        calls = 0

        def use_idle_time() -> bool:
            nonlocal calls
            calls += 1
            if calls == 3:
                front.send(msgspec.msgpack.encode(Control(name="ping", call_id=1)))
            return calls < left

        core = SimpleNamespace(has_work=lambda: False, use_idle_time=use_idle_time)
        EngineProcess(back)._receive(core)  # type: ignore[arg-type]
        assert calls == 3
        assert msgspec.msgpack.decode(front.recv(zmq.NOBLOCK), type=FromEngine) == ControlReply(call_id=1)
