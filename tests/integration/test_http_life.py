"""A server's life: what it says at start, who may ask, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvern.config import EngineConfig, InvalidConfig, ServerConfig
from kvern.server.app import _listen, serve
from kvern.testing.server import ServerProcess

LONG = {"prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


class Call:
    """A generating call in a thread; `text` is the whole answer once it has ended."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self.status = 0
        self.text = ""
        self.begun = threading.Event()
        self._url = f"{server.url}/v1/completions"
        self._thread = threading.Thread(target=self._run, args=(LONG | fields,))
        self._thread.start()

    def _run(self, body: dict[str, Any]) -> None:
        with httpx.stream("POST", self._url, json=body, timeout=60) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece
                self.begun.set()

    def join(self) -> Call:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self


def wait_running(server: ServerProcess, count: int) -> None:
    deadline = time.monotonic() + 5
    while server.metrics()["kvern_num_requests_running"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def engine_pid(server: ServerProcess) -> int:
    (pid,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return int(pid)


def test_start_prints_a_line_that_works():
    """The address and a ready-made curl line, which a shell can run as it stands. And the process that answers it has
    no torch in it."""
    with ServerProcess(served_model_name="it's mine") as server:
        assert server.model == "it's mine"
        command = re.search(r"^try: (curl .*\\\n.*)$", server.output(), re.MULTILINE)
        assert command is not None, server.output()
        answer = subprocess.run(command[1], shell=True, capture_output=True, text=True, timeout=20)
        assert '"role":"assistant"' in answer.stdout
        assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        root = server.get("/")
        assert root["model"] == "it's mine" and server.get("/version") == {"version": root["version"]}
        assert server.terminate() == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads CPU times from /proc")
def test_b122_idle_server_uses_no_cpu():
    """B122: neither process spins while there is nothing to do."""

    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with ServerProcess() as server:
        pids = [server.process.pid, engine_pid(server)]
        before = sum(map(ticks, pids))
        time.sleep(1.5)
        assert sum(map(ticks, pids)) - before < 0.1 * os.sysconf("SC_CLK_TCK")


def test_api_key():
    """K34: without the key nothing but the probes; the error is one that clients know."""
    with ServerProcess(api_key="sesame") as server, httpx.Client(base_url=server.url) as http:
        body = {"prompt": "a", "max_tokens": 1}
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "sesame"},
            {"Authorization": "Basic x"},
        ):
            for path in ("/v1/completions", "/v1//completions", "/v1/tokenize", "/nothing"):
                response = http.post(path, json=body, headers=headers)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/v1/models", headers=headers).status_code == 401
        for path in ("/", "/health", "/version", "/metrics"):
            assert http.get(path).status_code == 200
        for key in ("Bearer sesame", "bearer  sesame"):
            assert http.post("/v1/completions", json=body, headers={"Authorization": key}).status_code == 200
        preflight = {"Origin": "http://example.com", "Access-Control-Request-Method": "POST"}
        assert http.options("/v1/completions", headers=preflight).headers["access-control-allow-origin"] == "*"


@pytest.mark.slow
def test_templates_of_strangers_are_not_run():
    """A server that anybody can reach takes no program from anybody."""
    with ServerProcess(host="0.0.0.0") as server:
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}
        for path in ("/v1/chat/completions", "/tokenize"):
            url = server.url.replace("localhost", "127.0.0.1") + path
            error = httpx.post(url, json=body).json()["error"]
            assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")


@pytest.mark.slow
def test_b118_sigterm_lets_calls_finish():
    """B118: what runs ends well, what comes is refused with 503 and Retry-After, and the exit code is 0."""
    with ServerProcess(num_blocks=2048, shutdown_timeout=60) as server, httpx.Client(base_url=server.url) as http:
        calls = [Call(server, stream=i < 2) for i in range(3)]
        wait_running(server, 3)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while (refused := http.post("/v1/completions", json={"prompt": "a"})).status_code == 200:
            assert time.monotonic() < deadline
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "shutting_down"
        assert http.get("/health").status_code == 503
        assert http.get("/metrics").status_code == 200
        for call in calls:
            assert call.join().status == 200
            assert call.text.endswith("data: [DONE]\n\n") or '"finish_reason":"length"' in call.text
        assert server.process.wait(10) == 0


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_b118_impatient_sigterm_tells_everybody(signals):
    """With no time left (or a second signal), streams end with one error event and plain calls with 503."""
    with ServerProcess(num_blocks=2048, shutdown_timeout=0 if signals == 1 else 60) as server:
        calls = [Call(server, stream=i < 2) for i in range(3)]
        wait_running(server, 3)
        assert calls[0].begun.wait(5) and calls[1].begun.wait(5)
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        start = time.monotonic()
        for call in calls[:2]:
            *_, last = call.join().text[:-2].split("\n\n")
            assert last.startswith('data: {"error":{') and '"shutting_down"' in last
        assert calls[2].join().status == 503 and '"shutting_down"' in calls[2].text
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 5


@pytest.mark.slow
def test_idle_server_ends_at_once():
    with ServerProcess(shutdown_timeout=60) as server:
        start = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - start < 3


@pytest.mark.slow
def test_client_that_does_not_read_does_not_keep_the_server():
    with ServerProcess(num_blocks=2048, shutdown_timeout=0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"stream": True, "logprobs": 20, "n": 16}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_running(server, 1)
            time.sleep(1)  # until the buffers on the way are full
            assert server.terminate(timeout=8) == 0


def test_k32_sockets_of_clients_that_vanish_are_closed():
    """Accepted sockets have the listener's limits: probes when idle, and an end to what is never acknowledged."""
    with _listen(ServerConfig(port=0)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()) as _, listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


@pytest.mark.slow
def test_b116_engine_killed():
    """B116: open calls get an error, /health turns 503, and the process ends with a code that is not 0."""
    with ServerProcess(num_blocks=2048) as server, httpx.Client(base_url=server.url) as http:
        calls = [Call(server, stream=True), Call(server, stream=False)]
        wait_running(server, 2)
        assert calls[0].begun.wait(5)
        os.kill(engine_pid(server), signal.SIGKILL)
        *_, last = calls[0].join().text[:-2].split("\n\n")
        assert last.startswith('data: {"error":{') and '"engine_dead"' in last
        assert calls[1].join().status == 503 and "SIGKILL" in calls[1].text
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert server.process.wait(10) == 1


def test_port_that_is_taken():
    """Said at once, before a model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidConfig, match="in use"):
        serve(EngineConfig(model="toy:history-hash"), ServerConfig(port=taken.getsockname()[1]))
    with pytest.raises(InvalidConfig, match=r"no\.such\.host\.invalid"):
        serve(EngineConfig(model="toy:history-hash"), ServerConfig(host="no.such.host.invalid"))
