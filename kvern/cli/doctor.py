"""Tell what kvern finds on this machine, and what to do about what it lacks.

Exit codes: 0 all is well, 1 the native kernels are missing or do not run here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from kvern import __version__
from kvern.config import EngineConfig, InvalidConfig

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CPUINFO = Path("/proc/cpuinfo")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
# What the kernels of an instruction set need, as Linux calls it.
_NEEDS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma"),
}
_COMPILERS = ("c++", "g++", "clang++")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object, in place of lines")


def run(args: argparse.Namespace) -> int:
    found = examine()
    if args.json:
        print(json.dumps(found))
    else:
        for name, text in _lines(found):
            print(f"{name:<14}{text}")
    return 1 if found["problems"] else 0


def versions() -> dict[str, str | None]:
    """Of kvern and of what it computes with; None: not installed."""
    found: dict[str, str | None] = {"kvern": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def examine() -> dict[str, Any]:
    """What there is, for people and programs. "problems": what to do, a line each; none if all is well."""
    from kvern.executor.machine import available_memory, usable_cores

    native = _native(usable_cores())
    problems = [_hint(native)] if native["error"] is not None else []
    if (huge_pages := _huge_pages()) == "never":
        problems.append(
            f"huge pages are off and kernels wait for memory more: echo madvise | sudo tee {_HUGE_PAGES}",
        )
    return {
        "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _cpuinfo("model name") or None,
        "cores": {"usable": usable_cores(), "present": os.cpu_count()},
        "available_memory": available_memory(),
        "huge_pages": huge_pages,
        "native": native,
        "auto": _auto(),
        "problems": problems,
    }


def _native(threads: int) -> dict[str, Any]:
    """isa: the one that would be used. isas: each, and why it cannot be used, None if it can. error: why none can."""
    from kvern.kernels.cpu.library import ISAS, KernelsMissing, NativeEngine, load

    try:
        load()
    except KernelsMissing as exc:
        return {"built": False, "isa": None, "isas": {}, "error": str(exc)}
    isas: dict[str, str | None] = {}
    for isa in ISAS:
        try:
            NativeEngine(1, isa)
            isas[isa] = None
        except KernelsMissing:
            isas[isa] = _why_not(isa)
    try:
        return {"built": True, "isa": NativeEngine(threads).isa, "isas": isas, "error": None}
    except KernelsMissing as exc:
        return {"built": True, "isa": None, "isas": isas, "error": str(exc)}


def _why_not(isa: str) -> str:
    has = _cpuinfo("flags").split()
    lacking = [flag for flag in _NEEDS.get(isa, ()) if flag not in has]
    if lacking and has:
        return f"the processor has no {', '.join(lacking)}"
    return "the processor has it, the system does not let it be used" if has else "not for this processor"


def _hint(native: dict[str, Any]) -> str:
    text = f"{native['error']}; models run, slowly, on the reference kernels"
    if native["built"]:
        return text
    if any(shutil.which(name) for name in _COMPILERS):
        return f"{text}; there is a C++ compiler now: install kvern again"
    return f"{text}; install a C++ compiler (g++ or clang++), then kvern again"


def _auto() -> dict[str, Any]:
    """The kernels that compute the default model, and what stands against native ones. None: not known before the model
    is here, which is not fetched for this."""
    from kvern.executor.backend import choose_backend
    from kvern.weights.config import read_model_config
    from kvern.weights.hub import list_models, resolve_model

    # Asked for "auto" it would log what is told here.
    config = EngineConfig(kernels="native")
    if not any(model.cached for model in list_models() if model.name == config.model):
        return {"model": config.model, "kernels": None, "reason": "it has not been fetched yet"}
    try:
        backend = choose_backend(config, read_model_config(resolve_model(config.model)))
    except InvalidConfig as exc:
        return {"model": config.model, "kernels": "reference", "reason": str(exc).removeprefix("kernels native: ")}
    return {"model": config.model, "kernels": backend.kernels, "reason": None}


def _huge_pages() -> str | None:
    """always, madvise or never; None where there is no such setting."""
    try:
        return _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        return None


def _cpuinfo(field: str) -> str:
    """The first core's, "" if it has none."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    from kvern.executor.limits import size_text

    native, auto = found["native"], found["auto"]
    lines = [(name, version or "not installed") for name, version in found["versions"].items()]
    lines += [
        ("system", found["system"] + (f", {found['processor']}" if found["processor"] else "")),
        ("cores", f"{found['cores']['usable']} usable of {found['cores']['present']}"),
        ("memory", f"{size_text(found['available_memory'])} available"),
        ("huge pages", found["huge_pages"] or "not known"),
        ("kernels", f"native, {native['isa']}" if native["isa"] else "reference only"),
    ]
    lines += [(f"  {isa}", f"no: {reason}" if reason else "usable") for isa, reason in native["isas"].items()]
    because = f" ({auto['reason']})" if auto["reason"] else ""
    lines.append(("auto", f"{auto['model']}: {auto['kernels'] or 'not known'}{because}"))
    lines += [("problem", text) for text in found["problems"]]
    return lines
