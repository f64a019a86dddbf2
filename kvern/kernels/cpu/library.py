"""The compiled library: where it lies, what it offers, and its errors as Python's."""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvern.kernels.cpu import abi

ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "portable")  # the best first
MOST_OPS = 8192
_NAME = "libkvern_cpu.so"


class KernelsMissing(RuntimeError):
    """There are no native kernels here: not built, or not for this machine."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library. Raises KernelsMissing if it is not there, or is another version's. KVERN_CPU_LIBRARY in the
    environment names another build of it, as with a sanitizer."""
    # An editable install puts what it builds beside the other packages, not beside this file.
    folders = [Path(__file__).parent, Path(sysconfig.get_path("platlib")) / "kvern" / "kernels" / "cpu"]
    places = [Path(os.environ["KVERN_CPU_LIBRARY"])] if "KVERN_CPU_LIBRARY" in os.environ else []
    places += [folder / _NAME for folder in folders]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise KernelsMissing("kvern was installed without its native kernels: no C++ compiler was found")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as exc:
        raise KernelsMissing(f"the native kernels cannot be loaded: {exc}") from None
    try:
        _declare(library)
        sizes = library.kvern_op_bytes(), library.kvern_step_bytes(), library.kvern_num_op_kinds()
        same = sizes == (ctypes.sizeof(abi.Op), ctypes.sizeof(abi.Step), len(abi.OP_KINDS))
    except AttributeError:  # a function is missing
        same = False
    if not same:
        raise KernelsMissing(f"{path} belongs to another version of kvern; install kvern again")
    return library


def _declare(library: ctypes.CDLL) -> None:
    for name, result, arguments in (
        ("kvern_op_bytes", c_int64, ()),
        ("kvern_step_bytes", c_int64, ()),
        ("kvern_num_op_kinds", c_int64, ()),
        ("kvern_allocate", c_void_p, (c_int64,)),
        ("kvern_release", None, (c_void_p, c_int64)),
        ("kvern_populate", None, (c_void_p, c_int64)),
        ("kvern_open", c_void_p, (c_char_p, c_int, POINTER(c_int), c_int64)),
        ("kvern_close", None, (c_void_p,)),
        ("kvern_isa", c_char_p, (c_void_p,)),
        ("kvern_packed_bytes", c_int64, (c_void_p, c_int32, c_int64, c_int64)),
        (
            "kvern_pack",
            None,
            (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64),
        ),
        ("kvern_read", c_int64, (c_void_p, c_int64)),
        ("kvern_run", None, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p)),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


class Memory:
    """Zeroed bytes in huge pages, given back when nobody holds this any more. Untouched pages cost nothing."""

    def __init__(self, num_bytes: int) -> None:
        self._release = load().kvern_release
        self.num_bytes = max(num_bytes, 1)
        address = load().kvern_allocate(self.num_bytes)
        if not address:
            raise MemoryError(f"cannot allocate {num_bytes} bytes")
        self.address: int = address

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._release(self.address, self.num_bytes)

    def populate(self, start: int, num_bytes: int) -> None:
        """Have the system provide these pages now, not when they are first written. Their content stays."""
        load().kvern_populate(self.address + start, min(num_bytes, self.num_bytes - start))

    def array(self) -> NDArray[np.uint8]:
        """All of it, uint8; valid as long as this object is."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.num_bytes).from_address(self.address))


class NativeEngine:
    """An instruction set and a pool of threads. isa: one of ISAS, "" for the best that this machine has. cpus: the core
    of each thread but the first, which is the caller's own; none: the system's choice. Raises KernelsMissing."""

    def __init__(self, threads: int, isa: str = "", cpus: Sequence[int] | None = None) -> None:
        self._library = load()
        self.threads = threads
        places = (c_int * threads)(*cpus) if cpus is not None else None
        self._handle = self._library.kvern_open(isa.encode(), threads, places, MOST_OPS)
        if not self._handle:
            raise KernelsMissing(f"this machine cannot run kernels for {isa or 'its processor'} in {threads} threads")
        self._run = self._library.kvern_run
        self.isa: str = self._library.kvern_isa(self._handle).decode()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.kvern_close(self._handle)
            self._handle = None

    def packed_bytes(self, kind: int, out: int, columns: int) -> int:
        """Bytes of a packed weight [out, columns] of ggml type `kind`; 0 if it cannot be packed."""
        size: int = self._library.kvern_packed_bytes(self._handle, kind, out, columns)
        return size

    def pack(
        self, kind: int, rows: NDArray[np.uint8], columns: int, panels: int, first_panel: int, last_panel: int
    ) -> None:
        """Panels [first_panel, last_panel) of rows [out, row bytes] -> memory at `panels`. Other threads may run."""
        self._library.kvern_pack(
            self._handle, kind, rows.ctypes.data, rows.strides[0], len(rows), columns, panels, first_panel, last_panel
        )

    def read(self, num_bytes: int) -> None:
        """Read so much memory once, all threads together."""
        if self._library.kvern_read(self._handle, num_bytes) < 0:
            raise MemoryError(f"cannot allocate {num_bytes} bytes")

    def run(self, ops: ctypes.Array[abi.Op], num_ops: int, step: abi.Step, nanoseconds: int | None = None) -> None:
        """All ops, one after the other, on all threads."""
        self._run(self._handle, ops, num_ops, ctypes.byref(step), nanoseconds)


def op_array(ops: Iterable[abi.Op]) -> ctypes.Array[abi.Op]:
    """Ops side by side, each with a counter of its own."""
    listed = list(ops)
    array = (abi.Op * len(listed))(*listed)
    for i, op in enumerate(array):
        op.counter = i
    return array
