"""How much of this machine the process may use: cores and memory, limits of its control groups included."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Cores this process may run on: its affinity, and no more than its control groups' quota of CPU time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders("cpu", proc, cgroup):
        limit = _text(folder / "cpu.max").split()
        quota, period = limit if len(limit) == 2 else ("", "")
        quota = quota or _text(folder / "cpu.cfs_quota_us")
        period = period or _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def available_memory(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes this process can still use: what the system has available, and no more than its control groups leave."""
    available = _field(proc / "meminfo", "MemAvailable:") * 1024
    if not available:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _cgroup_folders("memory", proc, cgroup):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        usage = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if limit.isdigit() and usage.isdigit():
            # The page cache of files nobody reads at the moment is given back on demand.
            used = int(usage) - _field(folder / "memory.stat", "inactive_file")
            available = min(available, max(int(limit) - used, 0))
    return available


def _cgroup_folders(controller: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """The folders of this process's control group and those above it, of version 2 and of version 1."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroup
        elif controller in controllers.split(","):
            root = cgroup / controller
        else:
            continue
        # In a container the path may be that of the host and not exist here; the root then is the container's own.
        folder = root / path.lstrip("/")
        yield from (f for f in (folder, *folder.parents) if f.is_relative_to(root) and f.is_dir())


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _field(path: Path, name: str) -> int:
    """The number after `name` in a file of lines "name number ...", 0 if there is none."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return 0
