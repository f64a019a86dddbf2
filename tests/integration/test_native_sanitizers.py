"""The native kernels under AddressSanitizer and ThreadSanitizer: built once more, and their own tests run on that."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvern.kernels.cpu.library import ISAS, KernelsMissing, NativeEngine

ROOT = Path(__file__).parents[2]
# Of everything a little: all row operations, a few shapes of products and attention, whole models.
TESTS = {
    "address": [
        *("tests/unit/test_native_rows.py", "tests/unit/test_graphs.py", "tests/unit/test_native_sampling.py"),
        *("tests/unit/test_native_gemm.py", "tests/unit/test_native_attention.py"),
    ],
    "thread": ["tests/unit/test_native_rows.py", "tests/unit/test_graphs.py", "tests/unit/test_native_sampling.py"],
}
KEYWORDS = {"address": "not numbers or 75", "thread": "not sleep"}


def best_isa():
    for isa in ISAS:
        try:
            NativeEngine(1, isa)
            return isa
        except KernelsMissing:
            pass
    return pytest.skip("there are no native kernels here")


def build(sanitizer, isa):
    """The library with this sanitizer; kept between runs, in the folder that the package is built in."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = ROOT / "build" / f"sanitize-{sanitizer}"
    options = [f"-DKVERN_SANITIZE={sanitizer}", f"-DKVERN_ISAS={isa}", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (["cmake", "-S", ROOT, "-B", folder, *options], ["cmake", "--build", folder, "-j2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "libkvern_cpu.so"


def runtime(sanitizer):
    """The sanitizer's own library, which must be loaded before Python's."""
    name = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"g++ has no {name}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", TESTS)
def test_the_kernels_do_nothing_forbidden(sanitizer):
    isa = best_isa()
    environment = os.environ | {
        "KVERN_CPU_LIBRARY": str(build(sanitizer, isa)),
        "LD_PRELOAD": runtime(sanitizer),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66",
        "TSAN_OPTIONS": "exitcode=66:halt_on_error=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *TESTS[sanitizer], "-k", KEYWORDS[sanitizer]],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
