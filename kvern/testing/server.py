"""A kvern server in a process of its own, for tests over real sockets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r"^kvern serves (?P<model>.+) at (?P<url>http://\S+)$", re.MULTILINE)


class ServerProcess:
    """`with ServerProcess(model="toy:history-hash", num_blocks=9) as server:` and then `server.url`.

    options: those of `kvern serve`. It listens on any free port. Raises RuntimeError, with what the server said, if it
    does not come up within `timeout` seconds.
    """

    def __init__(self, *, timeout: float = 60.0, **options: Any) -> None:
        options = {"model": "toy:history-hash", "port": 0} | options
        arguments = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()
        ]
        self._output = tempfile.NamedTemporaryFile("a")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvern.cli.main", "serve", *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.model, self.url = self._wait_for_address(timeout)

    def _wait_for_address(self, timeout: float) -> tuple[str, str]:
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            match = _ADDRESS.search(self.output())
            if match is not None:
                return match["model"], match["url"]
            if ended or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"the server did not come up:\n{self.output()}")
            time.sleep(0.02)

    def output(self) -> str:
        """What it has printed and logged so far."""
        return Path(self._output.name).read_text()

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)

    def metrics(self) -> dict[str, float]:
        """Name, with labels as they are written -> value."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def busy(self) -> float:
        """Requests that run or wait, plus the share of the cache they hold: 0.0 when all is given back."""
        metrics = self.metrics()
        waiting = sum(value for name, value in metrics.items() if name.startswith("kvern_num_requests_waiting"))
        return metrics["kvern_num_requests_running"] + waiting + metrics["kvern_kv_cache_usage_ratio"]

    def wait_idle(self, timeout: float = 2.0) -> bool:
        """Whether everything is given back within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.busy():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def terminate(self, timeout: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._output.close()
