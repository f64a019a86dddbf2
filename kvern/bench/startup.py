"""How long until a new server answers: from the start of `kvern serve` to the first token over HTTP.

Phases are the server's own and go on side by side, so they need not add up. Files are read from the system's cache, if
they are in it: the first run after a while shows what the disk costs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from kvern.bench.load import kernels_used
from kvern.bench.report import ProgressLine, Row, repeat
from kvern.config import EngineConfig, InvalidConfig
from kvern.engine.messages import EngineDeadError
from kvern.weights.config import read_model_config
from kvern.weights.hub import resolve_model

_ADDRESS = re.compile(r"^kvern serves .+ at (http://\S+)$")
_PHASE = re.compile(r" kvern\.server\.app: ([\w ]+): ([\d.]+) s$", re.MULTILINE)
_PATIENCE = 30.0  # seconds a server may take to end
_FIRST_TOKEN_TIMEOUT = 300.0


def time_run(config_file: Path) -> Row:
    """Raises InvalidConfig or EngineDeadError, with the server's own words, if it does not come up."""
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        with _server(config_file, log) as process:
            assert process.stdout is not None
            url = next((match[1] for match in map(_ADDRESS.match, process.stdout) if match), None)
            ready = time.perf_counter() - start
            if url is None:
                _raise(process.wait(), _text(log))
            _wait_for_token(url)
            first_token = time.perf_counter() - start
        phases = {f"{name.replace(' ', '_')}_s": float(seconds) for name, seconds in _PHASE.findall(_text(log))}
    return phases | {"ready_s": ready, "first_token_s": first_token}


@contextlib.contextmanager
def _server(config_file: Path, log: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kvern.cli.main", "serve", "--port=0", f"--config={config_file}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_PATIENCE)  # also reads what it still says, which it would wait for
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _wait_for_token(url: str) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_FIRST_TOKEN_TIMEOUT)
    body = json.dumps({"prompt": "The sea is", "max_tokens": 1, "ignore_eos": True, "stream": True})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        line = next((line for line in response if line.strip()), b"")
        if response.status != 200 or not line.startswith(b"data: {") or b'"error"' in line:
            raise EngineDeadError(f"the server answered {response.status} {line.decode(errors='replace').strip()}")
    except (OSError, http.client.HTTPException) as exc:
        raise EngineDeadError(f"the server did not answer: {exc!r}") from None
    finally:
        connection.close()


def _raise(code: int, log: str) -> NoReturn:
    last = log.strip().rpartition("\n")[2].removeprefix("kvern serve: error: ")
    raise (InvalidConfig if code == 2 else EngineDeadError)(last or f"the server exited with code {code}")


def _text(log: Any) -> str:
    log.seek(0)
    text: str = log.read()
    return text


class _Titles(dict[str, str]):
    """Phases are named as the server names them."""

    def __missing__(self, key: str) -> str:
        return key.removesuffix("_s").replace("_", " ")


def run(config: EngineConfig, args: argparse.Namespace) -> int:
    files = resolve_model(config.model)  # a download is not what is measured
    kernels = kernels_used(config, read_model_config(files))
    options = {
        field.name: getattr(config, field.name)
        for field in msgspec.structs.fields(EngineConfig)
        if getattr(config, field.name) is not None
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kvern.yaml"
        file.write_text(json.dumps(options | {"log_level": "info"}))  # phases are in the log
        about = {"bench": "startup", "model": config.model, "kernels": kernels, "unit": "seconds"}
        repeat(lambda i: time_run(file), args.repeat, about, _Titles(), args.json, ProgressLine())
    return 0
