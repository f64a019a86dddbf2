"""Where a replay's time goes: by kind of operation, beside what the machine could do.

Each product reads its weight once a step, so its bytes are the packed weight's; its operations are two per weight and
row. Other kinds have their time only. The limit of reading is measured here, over memory that no cache holds.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.library import NativeEngine
from kvern.kernels.cpu.tape import Tape

_READ_BYTES = 512 << 20
_TRIES = 5


class ProfileRow(NamedTuple):
    """Totals of one kind of operation. share: of all time. bytes, flops: of weights; 0 where there are none."""

    name: str
    seconds: float
    share: float
    calls: int
    bytes: int
    flops: int


class Profile:
    """Add each replay's nanoseconds; `rows` gives the totals, the longest first. replays: of the tape that holds the
    layers, one a step."""

    def __init__(self, engine: NativeEngine) -> None:
        self.replays = 0
        self._engine = engine
        self._totals: dict[str, list[int]] = {}  # nanoseconds, calls, bytes, flops

    def add(self, tape: Tape, nanoseconds: NDArray[np.int64], step: abi.Step) -> None:
        self.replays += "attention" in tape.kinds
        ops = [op for piece in tape.pieces for op in piece]
        for op, spent in zip(ops, nanoseconds.tolist(), strict=True):
            name = abi.OP_KINDS[op.kind]
            num_bytes = flops = 0
            if name == "linear":
                weight = op.linear.weight
                name = f"linear {weight.out} x {weight.in_}" + (" gate" if op.linear.gate else "")
                rows = step.num_tokens if op.rows == abi.TOKENS else step.num_rows
                num_bytes, flops = weight.num_bytes, 2 * rows * weight.out * weight.in_
            total = self._totals.setdefault(name, [0, 0, 0, 0])
            for i, value in enumerate((spent, 1, num_bytes, flops)):
                total[i] += value

    def rows(self) -> list[ProfileRow]:
        whole = sum(total[0] for total in self._totals.values()) or 1
        found = [
            ProfileRow(name, spent / 1e9, spent / whole, calls, num_bytes, flops)
            for name, (spent, calls, num_bytes, flops) in self._totals.items()
        ]
        return sorted(found, key=lambda row: -row.seconds)

    def read_rate(self) -> float:
        """Bytes per second that the engine's threads read from memory together, the best of a few tries."""
        seconds = []
        for _ in range(_TRIES):
            start = time.perf_counter()
            self._engine.read(_READ_BYTES)
            seconds.append(time.perf_counter() - start)
        return _READ_BYTES / min(seconds)
