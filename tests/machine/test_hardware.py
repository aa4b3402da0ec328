"""Hardware is read from the kernel's files of other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.machine.hardware import MemoryGauge, inspect_machine, oom_kills, read_cpu, read_memory, resident_bytes

GIB = 2**30
MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   25165824 kB\n"
"""A machine with 32 GiB, of which 24 are available."""
UNIFIED = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
VERSION_1 = (
    "33 25 0:30 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "34 33 0:31 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "37 33 0:34 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_it_is_the_machines_memory(tmp_path: Path) -> None:
    memory = read_memory(machine(tmp_path, {}))
    assert (memory.total, memory.free, memory.limits) == (32 * GIB, 24 * GIB, ())
    assert memory.available == 24 * GIB and memory.allowed == 32 * GIB


def test_the_limit_of_any_control_group_around_holds(tmp_path: Path) -> None:
    """The innermost group has no limit, the one around it 8 GiB, the outermost 16 GiB."""
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod7/weft\n",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/kubepods/pod7/weft/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod7/weft/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/kubepods/pod7/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod7/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod7/memory.stat": f"anon 1\nactive_file {GIB}\ninactive_file {GIB}\n",
            "sys/fs/cgroup/kubepods/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/kubepods/memory.current": f"{15 * GIB}\n",
        },
    )
    memory = read_memory(root)
    found = {limit.set_by: limit.free for limit in memory.limits}
    # Two of the five are the cache of files, which the kernel gives up.
    assert found == {
        "/sys/fs/cgroup/kubepods/pod7/memory.max": 5 * GIB,
        "/sys/fs/cgroup/kubepods/memory.max": GIB,
    }
    assert memory.available == GIB and memory.allowed == 8 * GIB


def test_version_1_is_read_by_its_own_names(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/work/one\n1:cpu,cpuacct:/work\n0::/\n",
            "proc/self/mountinfo": VERSION_1,
            "sys/fs/cgroup/memory/work/one/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/work/one/memory.usage_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/work/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/work/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/work/memory.stat": f"active_file 5\ntotal_inactive_file {GIB}\n",
        },
    )
    (limit,) = read_memory(root).limits
    assert limit.limit == 4 * GIB and limit.free == 2 * GIB


def test_a_container_that_sees_its_own_part_of_the_hierarchy(tmp_path: Path) -> None:
    """The container's group is named from the outside, and mounted as the root."""
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "proc/self/mountinfo": "37 33 0:34 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    assert read_memory(root).available == GIB


def test_a_group_that_cannot_be_seen_is_stood_for_by_what_is_mounted(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../other\n",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert read_memory(root).available == 2 * GIB


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        },
    )
    assert read_memory(root).available == 0


def test_the_limits_of_the_process_count(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/limits": (
                "Limit                     Soft Limit           Hard Limit           Units     \n"
                f"Max data size             {3 * GIB}           unlimited            bytes     \n"
                "Max address space         unlimited            unlimited            bytes     \n"
            ),
            "proc/self/status": "VmSize:\t 9437184 kB\nVmData:\t 1048576 kB\n",
        },
    )
    (limit,) = read_memory(root).limits
    assert (limit.set_by, limit.free) == ("RLIMIT_DATA", 2 * GIB)


def test_a_real_limit_of_a_real_process() -> None:
    # The process sets its own limit: before its exec it has the memory of this one, which may have more.
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({GIB}, {GIB}))"
    script = f"{limited}; from weft.machine.hardware import read_memory; print(read_memory().available)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert GIB - 2**28 < int(done.stdout) < GIB


def test_kills_for_want_of_memory_are_counted(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/vmstat": "pgfault 7\noom_kill 4\n"})
    assert oom_kills(root) == 4
    machine(
        root,
        {
            "proc/self/cgroup": "0::/weft\n",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/weft/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
        },
    )
    assert oom_kills(root) == 2, "the group's own, where it counts them"


CPUINFO = {
    "x86": "processor\t: 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu avx2 avx512f amx_tile\n",
    "arm": "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n",
}


def test_features_are_those_that_every_core_has(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": CPUINFO["x86"]})
    assert (read_cpu(root).cores, read_cpu(root).features) == (2, ("avx2", "avx512f"))
    machine(root, {"proc/cpuinfo": CPUINFO["arm"]})
    assert read_cpu(root).features == ("asimd", "sve", "bf16", "i8mm")


@pytest.mark.parametrize(
    ("allowed", "files", "usable"),
    [
        ("0-15", {}, 16),
        ("0-3,8", {}, 5),
        ("0-15", {"sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 3),
        ("0-15", {"sys/fs/cgroup/a/cpu.max": "max 100000\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ("0-1", {"sys/fs/cgroup/a/cpu.max": "800000 100000\n"}, 2),
        ("0-15", {"sys/fs/cgroup/a/cpu.max": "1000 100000\n"}, 1),
    ],
)
def test_usable_cores_are_what_affinity_and_quotas_leave(
    allowed: str, files: dict[str, str], usable: int, tmp_path: Path
) -> None:
    root = machine(
        tmp_path,
        {
            "proc/cpuinfo": "".join(f"processor : {i}\n" for i in range(16)),
            "proc/self/status": f"Name:\tweft\nCpus_allowed_list:\t{allowed}\n",
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": UNIFIED,
            **files,
        },
    )
    cpu = read_cpu(root)
    assert (cpu.cores, cpu.usable_cores) == (16, usable)


def test_the_quota_of_version_1(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/cpuinfo": "".join(f"processor : {i}\n" for i in range(8)),
            "proc/self/cgroup": "1:cpu,cpuacct:/a\n",
            "proc/self/mountinfo": VERSION_1,
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_cpu(root).usable_cores == 2


def test_a_system_that_tells_nothing_has_memory_and_a_core(tmp_path: Path) -> None:
    assert read_memory(tmp_path).available > 0
    assert read_cpu(tmp_path).usable_cores >= 1


def test_this_machine() -> None:
    found = inspect_machine()
    assert 0 < found.memory.available <= found.memory.allowed <= found.memory.total < 2**50
    assert 1 <= found.cpu.usable_cores <= len(os.sched_getaffinity(0)) <= found.cpu.cores


def test_torch_is_not_needed_to_look() -> None:
    look = "import sys; from weft.machine.hardware import inspect_machine; inspect_machine()"
    script = f"{look}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_memory_of_a_process(tmp_path: Path) -> None:
    pages = machine(tmp_path, {"proc/77/statm": "5000 3000 1000 1 0 4000 0\n"})
    assert resident_bytes(77, pages) == 3000 * os.sysconf("SC_PAGE_SIZE")
    assert resident_bytes(78, pages) == 0, "it has ended"
    assert resident_bytes(os.getpid()) > 2**20


def test_memory_is_not_read_more_often_than_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, readings = [100.0], iter([(1, 2), (3, 4)])
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    gauge = MemoryGauge(lambda: next(readings))
    assert gauge.now() == gauge.now() == (1, 2)
    clock[0] += 1
    assert gauge.now() == (3, 4)
