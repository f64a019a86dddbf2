"""What the process may use: the system's numbers, and the limits of control groups of both versions."""

import os

import pytest

from kvern.executor.machine import available_memory, usable_cores

GIB = 2**30


@pytest.fixture
def machine(tmp_path):
    """Write files below a fake /proc and /sys/fs/cgroup; returns the keyword arguments that point there."""

    def make(files):
        for name, text in {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {"proc": tmp_path / "proc", "cgroup": tmp_path / "cgroup"}

    return make


def test_without_control_groups_the_system_decides(machine):
    where = machine({})
    assert available_memory(**where) == 16 * GIB
    assert usable_cores(**where) == len(os.sched_getaffinity(0))


def test_the_strictest_group_on_the_way_up_counts(machine):
    where = machine(
        {
            "proc/self/cgroup": "0::/user/app\n",
            "cgroup/user/app/memory.max": "max\n",
            "cgroup/user/app/memory.current": f"{3 * GIB}\n",
            "cgroup/user/memory.max": f"{4 * GIB}\n",
            "cgroup/user/memory.current": f"{3 * GIB}\n",
            "cgroup/user/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        }
    )
    assert available_memory(**where) == 2 * GIB


def test_version_1_and_a_path_that_is_the_hosts(machine):
    where = machine(
        {
            "proc/self/cgroup": "7:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
            "cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
            "cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert available_memory(**where) == 3 * GIB // 2
    assert usable_cores(**where) == 1


def test_a_group_that_is_over_its_limit_leaves_nothing(machine):
    where = machine({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "1000", "cgroup/memory.current": "2000"})
    assert available_memory(**where) == 0


@pytest.mark.parametrize(("limit", "cores"), [("100000 100000", 1), ("max 100000", None), ("1000 100000", 1)])
def test_the_quota_of_cpu_time_limits_cores(machine, limit, cores):
    where = machine({"proc/self/cgroup": "0::/a\n", "cgroup/a/cpu.max": limit})
    assert usable_cores(**where) == (cores or len(os.sched_getaffinity(0)))


def test_this_machine():
    assert available_memory() > 0
    assert usable_cores() >= 1
