"""The native kernels in tests: engines by instruction set, each made once, and a skip where the machine lacks one."""

import pytest

from kvern.kernels.cpu.library import ISAS, KernelsMissing, NativeEngine

# The two that machines use are tested always, the others in the slow part.
ISA_PARAMS = [*ISAS[:2], *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[2:])]

_engines = {}


def engine(isa, threads):
    if (isa, threads) not in _engines:
        try:
            _engines[isa, threads] = NativeEngine(threads, isa)
        except KernelsMissing as exc:
            pytest.skip(str(exc))
    return _engines[isa, threads]
