"""A process group is ended with all that it holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.backends.vllm.groups import group_of
from weft.backends.vllm.vllm_process import end_group, kill_group

FAMILY = """
import signal, subprocess, sys
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=4096)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(shared.name, child.pid, flush=True)
signal.pause()
"""


def test_memory_that_a_killed_group_shared_is_given_back() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], process_group=0, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as first:
        assert first.stdout is not None
        name, child = first.stdout.readline().split()
        assert Path("/dev/shm", name).exists()
        assert len(group_of(first.pid)) == 3 and int(child) in group_of(first.pid), "both, and the tracker"
        end_group(first.pid)
        assert group_of(first.pid) == {}
        assert not Path("/dev/shm", name).exists()
        assert not kill_group(first.pid)


def test_one_may_be_spared() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], process_group=0, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as first:
        assert first.stdout is not None
        first.stdout.readline()
        kill_group(first.pid, spare=first.pid)
        assert first.poll() is None
        end_group(first.pid)
        assert group_of(first.pid) == {}
