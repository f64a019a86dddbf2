"""Blocks of the KV cache as files: what a disk tier keeps over a restart.

    folder / fingerprint / first two letters of the name / name

The fingerprint stands for everything that gives a block's bytes their meaning (model, weights, dtype, layout), so that
another model's files are never seen. A file is a header and the block's bytes:

    magic 8 | length 8 | blake2b-128 of the bytes 16 | bytes

It is written under another name and then renamed, so a reader sees all of it or nothing; a file that is torn, cut or
altered anyway does not match its checksum and counts as not there.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_MAGIC = b"kvblock1"
_HEADER = struct.Struct("<8sQ16s")


class DiskStore:
    """block_bytes: length of every block. Raises OSError if the folder cannot be made."""

    def __init__(self, folder: Path, fingerprint: str, block_bytes: int) -> None:
        self.folder = folder / fingerprint
        self.block_bytes = block_bytes
        self.folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Names of all blocks that are there, the longest unused first."""
        found = []
        for path in self.folder.glob("??/*"):
            if path.name.startswith("."):
                path.unlink(missing_ok=True)  # left by a writer that was interrupted
            else:
                found.append((path.stat().st_mtime_ns, path.name))
        return [name for _, name in sorted(found)]

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def write(self, name: str, content: NDArray[np.uint8]) -> bool:
        """False, and a line in the log, if it cannot be written (the disk is full, say): a cache may forget."""
        path = self._path(name)
        data = content.tobytes()
        header = _HEADER.pack(_MAGIC, len(data), blake2b(data, digest_size=16).digest())
        try:
            path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
                file.write(header)
                file.write(data)
            _mark_used(file.name)
            os.replace(file.name, path)
        except OSError as exc:
            logger.warning("the KV cache on disk: %s cannot be written: %s", name, exc)
            return False
        return True

    def read(self, name: str) -> NDArray[np.uint8] | None:
        """The block's bytes; None if there is no such file, or what is in it is not what was written."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            _mark_used(path)
        except OSError:
            return None
        if len(data) == _HEADER.size + self.block_bytes:
            magic, length, digest = _HEADER.unpack_from(data)
            content = memoryview(data)[_HEADER.size :]
            if magic == _MAGIC and length == self.block_bytes and blake2b(content, digest_size=16).digest() == digest:
                return np.frombuffer(content, dtype=np.uint8)
        logger.warning("the KV cache on disk: %s is damaged and is dropped", name)
        self.delete(name)
        return None

    def delete(self, name: str) -> None:
        """Unknown names are fine."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name


def _mark_used(path: str | Path) -> None:
    now = time.time_ns()  # finer than what the file system notes by itself
    os.utime(path, ns=(now, now))
