"""The native kernels in tests: engines by instruction set, each made once, and a skip where the machine lacks one."""

import pytest

from kvern.kernels.cpu.library import ISAS, KernelsMissing, NativeEngine

_engines = {}


def engine(isa, threads):
    if (isa, threads) not in _engines:
        try:
            _engines[isa, threads] = NativeEngine(threads, isa)
        except KernelsMissing as exc:
            pytest.skip(str(exc))
    return _engines[isa, threads]


def has_bf16(isa):
    """Whether its dot products take bf16; else float32 is what a product in floats reads."""
    return isa in ("amx", "avx512_bf16")


def _best():
    try:
        return NativeEngine(1).isa
    except KernelsMissing:
        return ISAS[0]


# The one that this machine uses is tested always, the others in the slow part.
_FAST = _best()
ISA_PARAMS = [isa if isa == _FAST else pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS]
