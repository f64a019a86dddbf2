"""Which block holds which prefix: a hash of everything that shaped a block's keys and values -> the block.

Hashes are chained, so that equal hashes mean equal prefixes, not only equal blocks:

    root       = sha256(version, cache salt, adapter)     one per name space
    hash of i  = sha256(hash of i - 1, token ids of block i, images in block i)

SHA-256 is collision-resistant (a forged prefix cannot read another user's cache) and equal in every process and on
every machine; token ids enter as little-endian int32.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from kvern.request import ImageSpan

_VERSION = b"kvern prefix 1"
DIGEST_SIZE = 32  # bytes of a hash


def root_hash(cache_salt: str | None, lora: str | None = None) -> bytes:
    """The hash before the first block: everything but the tokens that shapes keys and values, or that must keep
    requests apart. Requests with different roots never share a block."""
    parts = [_VERSION]
    for mark, value in ((b"salt", cache_salt), (b"lora", lora)):
        if value is not None:
            text = value.encode("utf-8", "surrogatepass")
            parts += [mark, len(text).to_bytes(8, "little"), text]
    return sha256(b" ".join(parts)).digest()


def token_bytes(tokens: NDArray[np.int32]) -> list[bytes]:
    """Each row of tokens [n, block_size] as the bytes that enter its block's hash."""
    if sys.byteorder == "big":
        tokens = tokens.byteswap()
    data, width = tokens.tobytes(), 4 * tokens.shape[1]
    return [data[offset : offset + width] for offset in range(0, len(data), width)]


def append_hash(
    hashes: list[bytes], root: bytes, content: bytes, images: tuple[ImageSpan, ...], block_size: int
) -> None:
    """Append to `hashes`, of a request's first blocks in order, that of the next block. content: see token_bytes.
    root: used if it is the first. What images put into the block is part of its hash."""
    if images:
        content += _image_key(images, len(hashes) * block_size, block_size)
    hashes.append(sha256((hashes[-1] if hashes else root) + content).digest())


def extend_hashes(
    hashes: list[bytes],
    root: bytes,
    token_ids: NDArray[np.int32],
    num_tokens: int,
    block_size: int,
    images: tuple[ImageSpan, ...] = (),
) -> None:
    """Append to `hashes` (of the first blocks of token_ids, in order) those of the further full blocks among the
    first `num_tokens` tokens."""
    first, end = len(hashes), num_tokens // block_size
    if first < end:
        for content in token_bytes(token_ids[first * block_size : end * block_size].reshape(-1, block_size)):
            append_hash(hashes, root, content, images, block_size)


def _image_key(images: tuple[ImageSpan, ...], start: int, size: int) -> bytes:
    """Which images, and which parts of them, lie in the tokens start .. start + size - 1."""
    parts = []
    for image in images:
        if image.offset < start + size and image.offset + image.length > start:
            text = image.id.encode("utf-8", "surrogatepass")
            parts.append(struct.pack("<qqq", image.offset - start, image.length, len(text)) + text)
    return b"".join(parts)


class PrefixIndex:
    """Hash -> block, and back. One block per hash: of two blocks with equal content the first stays hittable and
    the second stays unhashed (a table, once written, is never changed to point elsewhere)."""

    def __init__(self, on_remove: Callable[[bytes], None] | None = None) -> None:
        """on_remove(hash): a block can no longer be hit."""
        self._on_remove = on_remove
        self.version = 0  # changes whenever a lookup might give another answer
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def is_hashed(self, block: int) -> bool:
        return block in self._hash_of

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of.get(block)

    def items(self) -> list[tuple[int, bytes]]:
        """(block, hash) of everything that can be hit."""
        return list(self._hash_of.items())

    def insert(self, block_hash: bytes, block: int) -> bool:
        """Make `block` hittable. False, and nothing done, if an equal block already is."""
        if block_hash in self._block_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self.version += 1
        return True

    def remove(self, block: int) -> None:
        """`block` can no longer be hit."""
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.version += 1
        if self._on_remove is not None:
            self._on_remove(block_hash)

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()
        self.version += 1

    def get(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def longest_prefix(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest run of `hashes`, from the first, that can be hit."""
        blocks, block_of = [], self._block_of
        for block_hash in hashes:
            block = block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks
